"""One model over several devices of a process: each unit on one of them, and activations moved from one to the next.

Like `device_map` of other libraries: a unit's arguments are moved to where the unit lies, what it returns stays there
until the next unit, and what the model returns comes back to the first device, where the batch and the loss are. What
is computed does not change. On a machine without GPUs the devices can be names of the CPU (cpu:0, cpu:1, ...); then
arguments are copied at the same places, so that the moves can be seen and counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.plan.balance import balance
from evenstep.train.batch import map_tensors, tensors
from evenstep.train.options import Asked, Devices
from evenstep.train.parallel.fan_out import mark_move
from evenstep.train.randomness import blocks
from evenstep.train.sizes import refuse_fewer, unit_sizes


@dataclass
class Split:
    """Where the parts of a model lie. `places`: name of a submodule -> number of its device in `devices`; whatever is
    in none of them lies on the first. `moves` counts the tensors that were moved so far."""

    devices: list[torch.device]
    places: dict[str, int]
    bytes: list[int]
    """Of parameters and buffers, on each device."""
    exact: bool = True
    moves: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def said(self) -> str:
        """For a person, on one line."""
        parts = []
        for number, device in enumerate(self.devices):
            names = [name for name, place in self.places.items() if place == number]
            shown = ", ".join(names if len(names) < 4 else [names[0], "...", names[-1]]) or "nothing"
            parts.append(f"{device} has {shown} ({_size(self.bytes[number])})")
        order = [0, *self.places.values(), 0]
        crossings = sum(a != b for a, b in pairwise(order))
        return f"split over {len(self.devices)} devices: {'; '.join(parts)}; activations move {crossings} times"

    def hook(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        """Has `model`, or a copy of it that lies on `devices`, move its activations."""
        for name, place in self.places.items():
            unit = model.get_submodule(name)
            unit.register_forward_pre_hook(_Move(self, place, devices[place], name), with_kwargs=True)
            if devices[place].type == "cpu":
                unit.register_forward_hook(_Mark(place))
        model.register_forward_hook(_Return(self, devices[0]), always_call=True)

    def moved(self, nest: Any, place: int, device: torch.device, unit: str) -> Any:
        """`nest` with its tensors on `device`, for `unit`. One that is there twice is one tensor afterwards too: what
        a module computes may depend on that, as in nn.MultiheadAttention."""
        away = {id(t): t for t in tensors(nest) if _place_of(t, place, device) != place}
        if not away:
            return nest
        with self._lock:
            self.moves += len(away)
        copies = {key: t.to(device) for key, t in away.items()}
        if self.exact:
            for copy in copies.values():
                mark_move(copy, unit)
        return map_tensors(nest, lambda t: copies.get(id(t), t))


def _size(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"


class Splits:
    """The split models of a run. `devices`: for each thread replica its devices; `plan` gets a line for each model."""

    def __init__(self, devices: Sequence[Sequence[torch.device]], exact: bool, plan: list[str]) -> None:
        self._devices, self._exact, self._plan = devices, exact, plan
        self.of: dict[int, Split] = {}  # by the model's id

    def place(self, model: nn.Module, asked: Asked) -> None:
        """Puts a model on this process's device, or on several of them."""
        mine = self._devices[0]
        wanted = asked.devices if asked.devices is not None else mine if len(mine) > 1 else None
        if wanted is None:
            model.to(mine[0])
            return
        split = split_model(model, wanted, mine[0], self._exact, asked.example)
        if asked.devices is not None and len(self._devices) > 1 and any(d.type == "cuda" for d in split.devices):
            raise UsageError(
                "devices= says where one replica of the model lies, and there are several thread replicas",
                do="leave devices= out: --split with --thread-replicas gives each replica its own; or use processes",
            )
        self.of[id(model)] = split
        self._plan.append(split.said())

    def hook(self, model: nn.Module, copy: nn.Module, replica: int) -> None:
        """Has the copy of `model` of a thread replica move its activations."""
        split = self.of.get(id(model))
        if split is not None:
            there = self._devices[replica]
            split.hook(copy, there if len(there) == len(split.devices) else split.devices)


class _Hook:
    """A hook of a split model. A copy of the model has hooks that do nothing, until it is given its own."""

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing(_Hook):
    def __call__(self, *_: object) -> None:
        pass


class _Move(_Hook):
    """The arguments go to where the unit is."""

    def __init__(self, split: Split, place: int, device: torch.device, unit: str) -> None:
        self._split, self._place, self._device, self._unit = split, place, device, unit

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        moved: tuple[Any, Any] = self._split.moved((args, kwargs), self._place, self._device, self._unit)
        return moved


class _Mark(_Hook):
    """On the CPU no tensor knows which of its names it lies on, so what a unit returns is marked."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors(output):
            tensor._evenstep_place = self._place  # type: ignore[attr-defined]


class _Return(_Hook):
    """What the model returns comes back to the first device; an error that the split has made says so."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self._split, self._device = split, device

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if output is None:
            error = sys.exc_info()[1]  # hooks that are always called run while it is handled
            if isinstance(error, RuntimeError) and "on the same device" in str(error):
                error.add_note(
                    f"evenstep: {type(module).__name__} is {self._split.said()}. Its code puts together what units on "
                    "several devices return: put these on one, with run.prepare(model, devices={submodule: device})"
                )
            return None
        return self._split.moved(output, 0, self._device, "what the model returns")


def _place_of(tensor: Tensor, place: int, device: torch.device) -> int:
    """`place` where the tensor lies on `device`, else another number."""
    if device.type == "cpu":
        return int(getattr(tensor, "_evenstep_place", 0))
    return place if tensor.device == device else -1


def split_model(model: nn.Module, asked: Devices, home: torch.device, exact: bool, example: Any = None) -> Split:
    """Puts the parts of `model` on devices, and has it move its activations.

    `asked`: devices, over which the units are balanced in order by their sizes (with `example`, see `unit_sizes`,
    activations too), or {name of a submodule: device}; what is not named lies on `home`, the first device. UsageError,
    by name, for what cannot be placed.
    """
    compiled = [name for name, m in model.named_modules() if getattr(m, "_compiled_call_impl", None) is not None]
    if compiled or hasattr(model, "_orig_mod"):
        raise UsageError(
            f"{type(model).__name__} is compiled, and a split model moves activations between its units",
            do="leave out torch.compile, or the split",
        )
    if isinstance(asked, Mapping):
        devices, places = _by_hand(model, asked, home, exact)
    else:
        devices = [_device(name) for name in asked]
        if len(set(devices)) < len(devices) or len(devices) == 0:
            raise UsageError(f"devices={list(map(str, devices))}, expected one or more different devices")
        places = _balanced(model, len(devices), example)
    split = Split(devices, places, _put(model, devices, places), exact)
    split.hook(model, devices)
    return split


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{name!r} is no device: {error}", do='give names like "cuda:0" or "cpu:1"') from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"{device} was asked for, and {torch.cuda.device_count()} GPUs are visible")
    return torch.device(device.type, device.index or 0)


def _balanced(model: nn.Module, parts: int, example: Any) -> dict[str, int]:
    """Units in order, in parts of about equal size; those that share parameters together, where the first of them is,
    and with the first unit where the model uses them itself. An embedding lies where the unit before it does: what both
    return is usually added up."""
    sizes = unit_sizes(model, example)
    refuse_fewer(model, sizes, parts, "devices")
    owners = {id(p): 0 for p in _loose(model, [size.module for size in sizes])}
    leader: list[int] = []  # of each unit: the one whose device it lies on
    for k, size in enumerate(sizes):
        with_others = [owners[id(p)] for p in size.module.parameters() if id(p) in owners]
        if k > 0 and isinstance(size.module, (nn.Embedding, nn.EmbeddingBag)):
            with_others.append(leader[k - 1])
        leader.append(min(with_others, default=k))
        for p in size.module.parameters():
            owners.setdefault(id(p), leader[k])
    leaders = sorted(set(leader))
    if len(leaders) < parts:
        raise UsageError(
            f"{type(model).__name__} has {len(sizes)} units, of which only {len(leaders)} share no parameter with an "
            f"earlier one and are no further embeddings; {parts} devices were asked for",
            do="ask for fewer devices, untie the parameters, or give devices={name of a submodule: device}",
        )
    costs = dict.fromkeys(leaders, 0.0)
    for k, size in enumerate(sizes):
        costs[leader[k]] += size.cost
    place = {leaders[k]: number for number, part in enumerate(balance(list(costs.values()), parts)) for k in part}
    return {size.name: place[leader[k]] for k, size in enumerate(sizes)}


def _by_hand(
    model: nn.Module, asked: Mapping[str, str | torch.device], home: torch.device, exact: bool
) -> tuple[list[torch.device], dict[str, int]]:
    """The devices, `home` first, and the place of each part of the model that moves its arguments."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in asked:
        if name not in modules or not name:
            known = ", ".join(name for name, _ in model.named_children())
            raise UsageError(f"devices= names {name!r}, which is no submodule of the model", do=f"it has {known}")
    named = {name: _device(device) for name, device in asked.items()}
    devices = list(dict.fromkeys([_device(home), *named.values()]))
    places: dict[str, int] = {}

    def walk(name: str, module: nn.Module, place: int) -> None:
        place = devices.index(named[name]) if name in named else place
        if any(other.startswith(f"{name}." if name else "") for other in named if other != name):
            for child_name, child in module.named_children():
                walk(f"{name}.{child_name}".lstrip("."), child, place)
        elif name in named or any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            places[name] = place

    walk("", model, 0)
    _refuse_apart(model, places, devices)
    if exact and devices[0].type == "cuda":
        _refuse_inside_blocks(model, places)
    return devices, places


def _refuse_apart(model: nn.Module, places: Mapping[str, int], devices: Sequence[torch.device]) -> None:
    """UsageError for a parameter that would lie on two devices."""
    parts = {name: model.get_submodule(name) for name in places}
    where = {id(p): ("the model", 0) for p in _loose(model, list(parts.values()))}
    for name, part in parts.items():
        for inner, p in part.named_parameters(name):
            other, place = where.setdefault(id(p), (inner, places[name]))
            if place != places[name]:
                raise UsageError(
                    f"{inner} and {other} are one parameter, which cannot lie on both {devices[places[name]]} and "
                    f"{devices[place]}",
                    do=f"put {name} on {devices[place]} too",
                )


def _refuse_inside_blocks(model: nn.Module, places: Mapping[str, int]) -> None:
    """UsageError for a part that is inside a block: it would draw its random numbers from another GPU's generator."""
    for block, module in blocks(model):
        used = {place for name, place in places.items() if name.startswith(f"{block}.")}
        if len(used) > 1:
            raise UsageError(
                f"devices= cuts {block} (a {type(module).__name__}) apart: its random numbers would not be those of "
                "one device",
                do=f"name {block} as a whole, or start with exact=False",
            )


def _loose(model: nn.Module, parts: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Parameters that modules outside of `parts` hold themselves."""
    inside = {id(m) for part in parts for m in part.modules()}
    return [p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)]


def _put(model: nn.Module, devices: Sequence[torch.device], places: Mapping[str, int]) -> list[int]:
    """Moves parameters and buffers to their devices. Returns the bytes on each."""
    of = {id(m): place for name, place in places.items() for m in model.get_submodule(name).modules()}
    sizes = [0] * len(devices)
    seen: set[int] = set()
    for module in model.modules():
        place = of.get(id(module), 0)
        if devices[place].type != "cpu":
            module._apply(lambda t, device=devices[place]: t.to(device), recurse=False)
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                sizes[place] += tensor.numel() * tensor.element_size()
    return sizes
