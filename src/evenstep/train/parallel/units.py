"""The units of a model on one pipeline stage, and what becomes of a call of the model there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointFunction

from evenstep.errors import UsageError
from evenstep.train.batch import map_tensors, tensors
from evenstep.train.lockstep import HANDED_OVER
from evenstep.train.parallel.attributes import changes, form, kept, set_attribute
from evenstep.train.parallel.cut import BY_HAND, Cut
from evenstep.train.parallel.flight import Flight, Slot
from evenstep.train.parallel.ghost import (
    Ghost,
    blank,
    find,
    function_name,
    is_question,
    put_together,
    take_apart,
)
from evenstep.train.parallel.pipe import Message
from evenstep.train.randomness import blocks, kept_generators


class Units:
    """This stage's part of the model, and ghosts for the other stages'."""

    def __init__(self, model: nn.Module, cut: Cut, stage: int, elsewhere: dict[int, str], device: torch.device) -> None:
        """`elsewhere`: the names of the model's tensors that lie on other stages alone, by id."""
        self.cut, self.stage, self.elsewhere, self.device = cut, stage, elsewhere, device
        self.part = cut.parts[stage]
        self.flight: Flight | None = None
        self._watch = _Watch(self)
        self._with_grad = False  # gradients are wanted of the function that runs
        self._looked: set[int] = set()  # the units that were watched
        self.inside = False  # a unit of this stage runs
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        numbers = {id(unit): k for k, (_, unit) in enumerate(cut.units)}
        for name, unit in blocks(model):
            if id(unit) in numbers:
                unit.forward = _Unit(functools.partial(self._call, numbers[id(unit)]), unit.forward)
            elif type(unit).__module__.startswith("torch.nn.modules"):
                unit.forward = _Unit(functools.partial(_call_stateless, name), unit.forward)

    @contextmanager
    def flying(self, flight: Flight) -> Iterator[None]:
        """The model is called for a micro-batch."""
        self.flight = flight
        try:
            yield
        finally:
            self.flight = None

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)`, in which the model is called, as far as it goes here: HANDED_OVER, or on the last stage what it
        returned. UsageError, by name, for a model or function that cannot be run in stages."""
        flight = self.flight
        assert flight is not None
        self._with_grad = torch.is_grad_enabled()
        try:
            with self._watch:
                returned = fn(*args)
        except _NextStage:
            return HANDED_OVER
        if flight.handed is not None:
            raise UsageError("the function went on although a stage had ended", do="catch Exception, not BaseException")
        if self.stage < len(self.cut.parts) - 1:
            raise UsageError(
                f"the function returned on stage {self.stage}, which has {self._units(self.part)}, without calling a "
                "unit of a later stage",
                do=f"call the model once, whole, for every micro-batch; or {BY_HAND}",
            )
        self.refuse_ghosts(returned)
        if self.stage and flight.entry is None:
            raise UsageError(f"no unit of stage {self.stage} ({self._units(self.part)}) was called", do=BY_HAND)
        return returned

    def refuse_ghosts(self, returned: Any) -> None:
        """UsageError where what a function of the model returned depends on what lies elsewhere."""
        ghost = find(returned)
        if ghost is not None:
            raise UsageError(
                f"what the function returned depends on {ghost.source}, which lies on another stage",
                do="return what the model's last units compute; intermediate outputs (hidden states, auxiliary "
                "losses) stay on their stages, so start without --stages for such a loss",
            )

    @contextmanager
    def recomputed(self, flight: Flight) -> Iterator[None]:
        """The backward of a micro-batch, in which activation checkpointing may call units again."""
        self.flight, flight.recomputing = flight, True
        try:
            yield
        finally:
            self.flight, flight.recomputing = None, False

    # ---- a call of a unit

    def _call(self, k: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flight, name = self.flight, self.cut.units[k][0]
        if flight is None:
            raise UsageError(
                f"the model is called, and its parts lie on {len(self.cut.parts)} stages",
                do="call it inside the function that is given to step.backward, run.evaluate or run.predict",
            )
        if not flight.recomputing:
            if k in flight.called:
                raise UsageError(
                    f"{name} is called a second time for one micro-batch: with stages a function calls the model once, "
                    "and the model each of its units once",
                    do="start without --stages, or put what is called twice into one module",
                )
            flight.called.add(k)
        if self._with_grad and not torch.is_grad_enabled():
            self._refuse_reentrant(name)
        if k < self.part.start:
            return self._ghost(flight, k)
        if k >= self.part.stop:
            self._hand_over(flight, k, *_first(args, kwargs, name))
        if self.stage and flight.entry is None:
            flight.entry = k
            self._check_entry(flight, name, _first(args, kwargs, name)[0])
        if k == flight.entry:
            args, kwargs = self._arrived(flight, args, kwargs)
        self._refuse_elsewhere(name, (args, kwargs))
        if self.part.stop == len(self.cut.units) or flight.recomputing:
            return self._computed(k, forward, args, kwargs)
        unit = self.cut.units[k][1]
        before = kept(unit)
        result = self._computed(k, forward, args, kwargs)
        made: list[Tensor] = []
        structure = take_apart(result, made, f"the output of {name}")
        flight.made[name] = [structure, [form(t) for t in made], changes(unit, before)]
        return result

    def _computed(self, k: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a unit of this stage returns. Its first call is watched for uses of what lies elsewhere."""
        if _get_current_function_mode() is not self._watch:
            return forward(*args, **kwargs)
        if k not in self._looked:
            self._looked.add(k)
            if self._with_grad:
                with self._inside():
                    return forward(*args, **kwargs)
            # In eval mode some modules of torch take another way where functions are watched: that is one call more.
            given, named = map_tensors((args, kwargs), torch.clone)
            with kept_generators(), self._inside():
                forward(*given, **named)
        with _pop_mode_temporarily():
            return forward(*args, **kwargs)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def _ghost(self, flight: Flight, k: int) -> Any:
        """What a unit of an earlier stage has returned there, without the values. So is what it has kept."""
        assert flight.received is not None
        name, unit = self.cut.units[k]
        if name not in flight.received.said["made"]:
            raise UsageError(
                f"{name} is called on stage {self.stage}, and was not on its own: the model calls its units in another "
                "order than that in which they are defined, or chooses by something that the stages do not share",
                do="define modules in the order in which forward calls them; let what they do depend on the batch, and "
                "on random numbers of torch, numpy and random, alone",
            )
        structure, forms, changed = flight.received.said["made"][name]

        def ghost(source: str, shape: list[int], dtype: str) -> Ghost:
            return Ghost.of(source, self.device, lambda: blank(shape, getattr(torch, dtype), self.device))

        for path, attribute, inside, of_each in changed:
            source = ".".join(part for part in (name, path, attribute) if part)
            set_attribute(unit, path, attribute, put_together(inside, [ghost(source, *each) for each in of_each]))
        return put_together(structure, [ghost(f"the output of {name}", *each) for each in forms])

    def _hand_over(self, flight: Flight, k: int, first: Any, rest: Any) -> NoReturn:
        name = self.cut.units[k][0]
        if flight.recomputing:
            raise UsageError(
                f"activation checkpointing runs {name}, of a later stage, again",
                do=f"checkpoint each module by itself, or {BY_HAND}",
            )
        if not any(own in flight.called for own in self.part):
            raise UsageError(
                f"{name}, of a later stage, is called before any of {self._units(self.part)}, which stage {self.stage} "
                "has",
                do="define modules in the order in which forward calls them; where some are not called for every "
                f"micro-batch, leave one that is on each stage: {BY_HAND}",
            )
        ghost = find(first)
        if ghost is not None:
            self._refuse_skip(name, ghost)
        structure = take_apart(first, flight.outputs, f"the first argument of {name}")
        wanted = [t.requires_grad for t in flight.outputs]
        made = {} if flight.received is None else flight.received.said["made"]
        said = {"unit": name, "structure": structure, "wanted": wanted, "made": {**made, **flight.made}}
        flight.handed = Message(said, list(flight.outputs))
        raise _NextStage

    def _check_entry(self, flight: Flight, name: str, first: Any) -> None:
        assert flight.received is not None
        sent = flight.received.said["unit"]
        if sent != name:
            raise UsageError(
                f"stage {self.stage - 1} ended where {sent} was called, and stage {self.stage} begins with {name}: "
                "what the model does differs between processes",
                do="let it depend on the batch, and on random numbers of torch, numpy and random, alone",
            )
        if find(first) is None:
            raise UsageError(
                f"{name}, with which stage {self.stage} begins, does not take the output of an earlier unit as its "
                "first argument",
                do=BY_HAND,
            )

    def _arrived(
        self, flight: Flight, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with what was received as the first one."""
        received = flight.received
        assert received is not None
        if not flight.slots:
            wanted = received.said["wanted"]
            flight.slots = [Slot(t) if w else None for t, w in zip(_whole(received.tensors), wanted, strict=True)]
        values = [
            value if slot is None or not torch.is_grad_enabled() else slot.arrive(self._anchor)
            for value, slot in zip(received.tensors, flight.slots, strict=True)
        ]
        first = put_together(received.said["structure"], values)
        if args:
            return (first, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): first}

    def _refuse_elsewhere(self, name: str, given: Any) -> None:
        ghost = find(given)
        if ghost is not None:
            self._refuse_skip(name, ghost)
        for tensor in tensors(given):
            if id(tensor) in self.elsewhere:
                self.refuse_use(self.elsewhere[id(tensor)])

    def _refuse_reentrant(self, name: str) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is CheckpointFunction.forward.__code__:
                raise UsageError(
                    f"{name} runs under reentrant activation checkpointing, which loses gradients where a stage begins",
                    do="use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
                )
            frame = frame.f_back

    def _refuse_skip(self, name: str, ghost: Ghost) -> NoReturn:
        raise UsageError(
            f"an argument of {name} depends on {ghost.source}, which lies on another stage: only the "
            "first argument of the first unit of a stage goes from one stage to the next",
            do="where a sum like `x + block(x)` stands between units, put it into the block's own forward; or "
            f"{BY_HAND}, so that both lie on one stage; or start without --stages",
        )

    def ghost_of(self, tensor: Tensor) -> Tensor:
        """What stands for it in code between units: a ghost for a parameter or buffer of another stage."""
        name = self.elsewhere.get(id(tensor))
        if name is None:
            return tensor
        shape, dtype = tensor.shape, tensor.dtype
        return Ghost.of(name, self.device, lambda: blank(shape, dtype, self.device))

    def refuse_use(self, tensor: str) -> NoReturn:
        raise UsageError(
            f"{tensor} lies on another stage, and code outside its own module uses it on stage {self.stage}",
            do=f"use it in its own module's forward alone; for tied weights give both modules the same parameter "
            f"(head.weight = embed.weight); or {BY_HAND}",
        )

    def _units(self, part: range) -> str:
        names = [self.cut.units[k][0] for k in part]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


class _Unit:
    """Stands for the forward of a unit."""

    def __init__(self, call: Callable[..., Any], forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)  # its signature
        self._call, self._forward = call, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._forward, args, kwargs)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a model that lies on several stages cannot be copied or pickled",
            do="copy it before run.prepare; its weights are in the run directory's checkpoints and model.safetensors",
        )


class _NextStage(BaseException):
    """Ends a call of the model where the next stage begins. No `except Exception` stops it."""


class _Watch(TorchFunctionMode):
    """Looks for uses of tensors that lie on another stage: some kernels take them and return nonsense."""

    def __init__(self, units: Units) -> None:
        super().__init__()
        self._units = units

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        elsewhere = self._units.elsewhere
        used = next((id(tensor) for tensor in tensors((args, kwargs)) if id(tensor) in elsewhere), None)
        if used is None or is_question(func):
            at_device = used is not None and function_name(func) == "device"
            return self._units.device if at_device else func(*args, **kwargs)
        if self._units.inside:
            self._units.refuse_use(elsewhere[used])
        return func(*map_tensors(args, self._units.ghost_of), **map_tensors(kwargs, self._units.ghost_of))


def _call_stateless(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module of torch's without parameters (an activation, pooling, dropout): on a ghost it does nothing."""
    ghost = args[0] if args and isinstance(args[0], Ghost) and not kwargs else None
    if ghost is None or getattr(forward.__self__, "return_indices", False):  # type: ignore[attr-defined]
        return forward(*args, **kwargs)
    return Ghost.of(
        ghost.source, ghost.place, lambda: forward(*(a.stand_in() if isinstance(a, Ghost) else a for a in args))
    )


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[Any, Any]:
    """The first argument of a call, and the rest."""
    if args:
        return args[0], (args[1:], kwargs)
    if not kwargs:
        raise UsageError(f"{name} is called without arguments: no activation can be handed to it", do=BY_HAND)
    first, *rest = kwargs
    return kwargs[first], [kwargs[key] for key in rest]


def _whole(tensors: list[Tensor | None]) -> list[Tensor]:
    assert all(t is not None for t in tensors)
    return [t for t in tensors if t is not None]
