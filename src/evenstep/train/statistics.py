"""Running statistics of BatchNorm layers: once a step, from all micro-batches, the same on every layout.

In training a BatchNorm layer normalises over its micro-batch, as torch does. Its running statistics change when the
step commits, together with the gradients:

    new = (1 - momentum) * old + momentum * sum(n * mean) / sum(n)

and the variances likewise (the mean of the micro-batches' unbiased variances, not that of all values pooled). n is the
number of values per channel; the sums go over the micro-batches in the fixed tree of `plan.tree`. If a micro-batch
calls a layer several times, its k-th calls make the k-th update. Momentum None averages over the steps, and
`num_batches_tracked` counts steps (times calls).

So what plain accumulation and DDP do cannot happen: statistics of the last micro-batch or of rank 0 alone, several
updates a step, and further ones by the recomputation of activation checkpointing.

What a call sees is collected by hooks that swap zeros in for the running statistics, and momentum 1.0. Then torch
leaves the micro-batch's mean and variance there, and the output keeps its bits. Sums and updates are computed in
float64, whatever the dtype of the buffers, and rounded to it once a step.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from evenstep.errors import UsageError
from evenstep.plan.tree import Node, combine
from evenstep.train.meeting import Meeting
from evenstep.train.randomness import in_backward, kept_generators
from evenstep.train.synchronised import Synchronised

Key = tuple[str, int, int]  # layer, number of the call within a micro-batch, channels


@dataclass(frozen=True)
class Part:
    """What the layers saw in the micro-batches of one node of the tree: for each key n, n * means, n * variances."""

    keys: tuple[Key, ...]
    flat: Tensor  # float64, on the CPU

    def split(self) -> Iterator[tuple[Key, Tensor]]:
        pieces = self.flat.split([1 + 2 * channels for _, _, channels in self.keys])
        return zip(self.keys, pieces, strict=True)


Parts = dict[Node, Part]


@dataclass(frozen=True)
class Change:
    """One update of one layer: the mean and the variance of the whole step (float64, on the CPU)."""

    layer: str
    call: int
    mean: Tensor
    variance: Tensor


class Statistics:
    """Collects what the BatchNorm layers of one copy of the models see, and updates the running statistics from it.

    For each step.backward: `watch`; then, inside `active()`, `collect(i)` around the forward of each micro-batch of
    this process, in any order; after the last of them `exchange`, and when the step commits, `apply`. Each copy of a
    model (a thread replica) has a Statistics of its own, which may be active at the same time; what it has collected
    goes by `take` and `add` to the one that exchanges. `meeting` joins the processes that hold the same layers.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._layers: dict[str, _Layer] = {}
        self._active = False
        self._leaf: int | None = None
        self._seen: list[tuple[_Layer, int, Tensor]] = []
        self._parts: Parts = {}

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Hooks for the BatchNorm layers among `modules`, by name, once.

        Layers without memory here (on the meta device: they are another stage's) are left alone.
        """
        for name, module in modules:
            if isinstance(module, _BatchNorm) and not (module.running_mean is not None and module.running_mean.is_meta):
                self._hook(name, module)

    @contextmanager
    def active(self) -> Iterator[None]:
        """One step.backward: no forward inside changes running statistics; only those inside `collect` count."""
        self._parts.clear()
        self._active = True
        try:
            yield
        finally:
            self._active = False
            for layer in self._layers.values():
                layer.put_back()  # after Ctrl-C in the middle of a forward

    @contextmanager
    def collect(self, leaf: int) -> Iterator[None]:
        """The forward of micro-batch `leaf` counts. Nothing is kept of one that raises."""
        self._leaf = leaf
        self._seen.clear()
        try:
            yield
            _push(self._parts, Node(0, leaf), _part(self._seen))
        finally:
            self._leaf = None
            self._seen.clear()

    @property
    def collected(self) -> bool:
        """Whether any layer saw anything in this step."""
        return any(part.keys for part in self._parts.values())

    def take(self) -> Parts:
        """What was collected since `active` began, in whole subtrees, for another Statistics to `add`."""
        parts, self._parts = self._parts, {}
        return parts

    def add(self, parts: Parts) -> None:
        """What another copy of the models has collected of the same step."""
        for node, part in parts.items():
            _push(self._parts, node, part)

    def exchange(self, leaves: int, *, signature: str, site: str) -> list[Change]:
        """The updates that a step of micro-batches 0..leaves-1 makes, the same on every process of the meeting.

        All of them must call it together, also one that has computed nothing. Nothing is changed yet.
        """
        answers = self._meeting.exchange("running statistics", _encode(self._parts), signature=signature, site=site)
        parts: Parts = {}
        for answer in answers:
            parts.update(_decode(answer))
        total = combine(parts, leaves, _added)
        changes = [] if total is None else [_change(key, piece) for key, piece in total.split() if piece[0] > 0]
        for change in changes:
            if change.layer not in self._layers:
                raise UsageError(
                    f"{change.layer} is a BatchNorm layer on some processes only",
                    do="prepare the same model on every process",
                )
        return sorted(changes, key=lambda change: change.call)

    def apply(self, changes: Sequence[Change]) -> None:
        """Updates the running statistics in place. The step is certain now: call it where the gradients are set."""
        with torch.no_grad():
            for call in dict.fromkeys(change.call for change in changes):
                nth = [(self._layers[c.layer].module, c) for c in changes if c.call == call]
                for device in dict.fromkeys(_running(module)[0].device for module, _ in nth):
                    _update([(module, c) for module, c in nth if _running(module)[0].device == device])

    def close(self) -> None:
        """Removes the hooks."""
        for layer in self._layers.values():
            layer.remove()
        self._layers.clear()

    def _hook(self, name: str, module: _BatchNorm) -> None:
        known = self._layers.get(name)
        if known is not None and known.module is module:
            return
        if known is not None:
            known.remove()
        if all(layer.module is not module for layer in self._layers.values()):
            self._layers[name] = _Layer(self, name, module)

    # ---- for the hooks

    @property
    def swapping(self) -> bool:
        return self._active

    @property
    def counting(self) -> int | None:
        """The micro-batch whose forward runs; None outside one, and in what activation checkpointing recomputes, which
        may be inside one where the loss takes gradients itself."""
        return None if in_backward() else self._leaf

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        leaf, self._leaf = self._leaf, None
        try:
            yield
        finally:
            self._leaf = leaf

    def saw(self, layer: _Layer, n: int, found: Tensor) -> None:
        self._seen.append((layer, n, found))


class _Layer:
    """One watched layer."""

    def __init__(self, owner: Statistics, name: str, module: _BatchNorm) -> None:
        self.owner, self.name, self.module = owner, name, module
        self.found: Tensor | None = None  # (2, channels): what the running call leaves
        known = (_BatchNorm.forward, Synchronised.forward)
        self.checked = getattr(inspect.unwrap(module.forward), "__func__", None) in known
        self._kept: tuple[dict[str, Tensor | None], float | None] | None = None
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(_Hook(self.before), with_kwargs=True),
            module.register_forward_hook(_Hook(self.after), with_kwargs=True, always_call=True),
        ]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaf = self.owner.counting
        counts = leaf is not None
        if self.owner.swapping and (self.module.training or (counts and self.module.running_mean is None)):
            self._refuse_single(_values(self.module, args, kwargs), leaf)
            if counts and self.module.training and not self.checked:
                self._check(args, kwargs)
        if self.owner.swapping and self._tracks():
            self.swap(0.0)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found = self.found
        if found is None:
            return
        replaced = self.module.running_mean is None or self.module.running_mean.data_ptr() != found.data_ptr()
        self.put_back()
        if output is None or self.owner.counting is None:  # the call has failed, or does not count
            return
        if replaced:
            self._refuse_form("puts another tensor in the place of running_mean")
        self.owner.saw(self, _values(self.module, args, kwargs), found)

    def swap(self, fill: float | None) -> None:
        """Puts tensors full of `fill` in the place of the running statistics, and momentum 1.0. None: copies of them,
        and their momentum."""
        module = self.module
        (mean, variance), count = _running(module), module.num_batches_tracked
        kept = {"running_mean": mean, "running_var": variance, "num_batches_tracked": count}
        self._kept = kept, module.momentum
        if fill is None:
            self.found = torch.stack([mean, variance])
        else:
            # A new one for each call: autograd keeps it until the backward.
            self.found = torch.full((2, mean.numel()), fill, dtype=mean.dtype, device=mean.device)
            module.momentum = 1.0
        module._buffers["running_mean"], module._buffers["running_var"] = self.found.unbind()
        module._buffers["num_batches_tracked"] = None if count is None else count.clone()

    def put_back(self) -> None:
        if self._kept is not None:
            buffers, self.module.momentum = self._kept
            self.module._buffers.update(buffers)
            self._kept = self.found = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _tracks(self) -> bool:
        module = self.module
        return module.training and module.track_running_stats and module.running_mean is not None

    def _refuse_single(self, n: int, leaf: int | None) -> None:
        if n == 1 and not isinstance(self.module, Synchronised):
            where = "a micro-batch" if leaf is None else f"micro-batch {leaf}"
            raise UsageError(
                f"{where} gives {self.name or 'the model'} (a {type(self.module).__name__}) one value per channel, "
                "which has no variance (torch: Expected more than 1 value per channel when training)",
                do="choose a global batch and a micro-batch that leave no micro-batch of one sample; or leave out what "
                "does not fill a global batch, run.steps(..., drop_last=True) (in a stream: the last sample of a lane, "
                "in make(lane, lanes, epoch)); or take nn.GroupNorm",
            )

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward that is not torch's own: the same must come out whatever the running statistics were."""
        self.checked = True
        if not self._tracks():
            return
        outputs, found = [], []
        with self.owner.not_counting(), torch.no_grad():
            for fill in (None, 0.0, 1.0):
                with kept_generators():
                    self.swap(fill)
                    found.append(self.found)
                    try:
                        outputs.append(inspect.unwrap(self.module.forward)(*args, **kwargs))
                    finally:
                        self.put_back()
        if not _same(*found[1:]):
            self._refuse_form("does not update its running statistics by `momentum`")
        if not (_same(*outputs[:2]) and _same(*outputs[1:])):
            self._refuse_form("depends on its running statistics while it trains")

    def _refuse_form(self, what: str) -> None:
        raise UsageError(
            f"the forward of {self.name or 'the model'} (a {type(self.module).__name__}) {what}: its statistics cannot "
            "be updated once a step",
            do="use nn.BatchNorm1d, 2d or 3d, nn.GroupNorm or nn.LayerNorm, or put the layer into eval mode",
        )


class _Hook:
    """A hook of this process's own model. A copy of the model, or one from a file, has hooks that do nothing."""

    def __init__(self, act: Any = None) -> None:
        self._act = act

    def __call__(self, *about: Any) -> None:
        if self._act is not None:
            self._act(*about)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def mixes_samples(module: nn.Module) -> bool:
    """Whether the layer normalises over the samples of its batch in eval mode too: its loss is not additive there."""
    return isinstance(module, _BatchNorm) and module.running_mean is None and module.running_var is None


def needs_several(module: nn.Module) -> bool:
    """Whether the layer, in the mode that it is in, normalises over the samples of its batch."""
    return isinstance(module, _BatchNorm) and (module.training or mixes_samples(module))


# ---- what is refused


def refuse_statistics(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """UsageError for a layer in training mode whose statistics would depend on the layout, before anything is computed.

    `modules`: by name, parents before their children."""
    compiled: list[str] = []
    for name, module in modules:
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            compiled.append(f"{name}." if name else "")
        if isinstance(module, (_BatchNorm, _InstanceNorm)) and module.training:
            _refuse(name, module, f"{name}.".startswith(tuple(compiled)))


def _refuse(name: str, module: nn.Module, compiled: bool) -> None:
    kind = type(module).__name__
    name = name.replace("_orig_mod.", "").removesuffix("_orig_mod")
    shown, frozen = name or "the model", f"model.{name}.eval()" if name else "model.eval()"
    if isinstance(module, _InstanceNorm):
        if module.track_running_stats:
            raise UsageError(
                f"{shown} is a {kind} that tracks running statistics, which would depend on which process computes "
                "which micro-batch",
                do="use track_running_stats=False",
            )
    elif isinstance(module, nn.SyncBatchNorm):
        raise UsageError(
            f"{shown} is a SyncBatchNorm in training mode: it normalises over what the processes compute at the same "
            "time, which depends on how many there are",
            do='use nn.BatchNorm1d, 2d or 3d, which is exact here; batchnorm="sync" (--batchnorm sync) synchronises it',
        )
    elif compiled:
        raise UsageError(
            f"{shown} is a {kind} in training mode inside a compiled model, where its statistics cannot be collected "
            "for the whole step",
            do=f"compile the parts of the model that have no BatchNorm, freeze it with {frozen} before each step, or "
            "leave torch.compile out",
        )


# ---- one call


def _values(module: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Values per channel."""
    given = args[0] if args else next(iter(kwargs.values()), None)
    return given.numel() // module.num_features if isinstance(given, Tensor) else 0


def _running(module: _BatchNorm) -> tuple[Tensor, Tensor]:
    mean, variance = module.running_mean, module.running_var
    assert mean is not None
    assert variance is not None
    return mean, variance


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


# ---- sums over micro-batches


def _part(seen: Sequence[tuple[_Layer, int, Tensor]]) -> Part:
    """The leaf of one micro-batch, from its calls in order."""
    calls: dict[str, int] = {}
    keys: list[Key] = []
    for layer, _, found in seen:
        nth = calls.get(layer.name, 0)
        calls[layer.name] = nth + 1
        keys.append((layer.name, nth, found.shape[1]))
    pieces = []
    for (_, n, _), found in zip(seen, _on_cpu([found for _, _, found in seen]), strict=True):
        count = torch.tensor([float(n)], dtype=torch.float64)
        pieces += [count, found * float(n) if n else torch.zeros_like(found)]
    return Part(tuple(keys), torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float64))


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Flat, in float64, on the CPU; one transfer for each device."""
    moved: dict[int, Tensor] = {}
    for device in dict.fromkeys(t.device for t in tensors):
        here = [k for k, t in enumerate(tensors) if t.device == device]
        flat = torch.cat([tensors[k].detach().flatten() for k in here]).cpu().double()
        moved.update(zip(here, flat.split([tensors[k].numel() for k in here]), strict=True))
    return [moved[k] for k in range(len(tensors))]


def _push(parts: Parts, node: Node, part: Part) -> None:
    """Adds a node, and whatever it completes: siblings become their parent."""
    while (sibling := Node(node.level, node.index ^ 1)) in parts:
        other = parts.pop(sibling)
        part = _added(other, part) if node.index % 2 else _added(part, other)
        node = Node(node.level + 1, node.index >> 1)
    parts[node] = part


def _added(left: Part, right: Part) -> Part:
    """left + right; what only one side has passes through."""
    if left.keys == right.keys:
        return Part(left.keys, left.flat + right.flat)
    found = dict(left.split())
    for key, piece in right.split():
        found[key] = found[key] + piece if key in found else piece
    return Part(tuple(found), torch.cat(list(found.values())) if found else left.flat)


def _change(key: Key, piece: Tensor) -> Change:
    layer, call, channels = key
    mean, variance = (piece[1:] / piece[0]).split(channels)
    return Change(layer, call, mean, variance)


def _update(found: Sequence[tuple[_BatchNorm, Change]]) -> None:
    """One update of layers on one device, each with its momentum."""
    device = _running(found[0][0])[0].device
    counts = [module.num_batches_tracked for module, _ in found if module.num_batches_tracked is not None]
    if counts:
        torch._foreach_add_(counts, 1)
    flat = torch.cat([part for _, change in found for part in (change.mean, change.variance)]).to(device)
    buffers = [buffer for module, _ in found for buffer in _running(module)]
    momenta = [m for module, _ in found for m in [_momentum(module)] * 2]
    new = torch._foreach_mul(flat.split([buffer.numel() for buffer in buffers]), momenta)
    old = torch._foreach_mul([buffer.double() for buffer in buffers], [1.0 - m for m in momenta])
    torch._foreach_copy_(buffers, torch._foreach_add(old, new))


def _momentum(module: _BatchNorm) -> float:
    """How much this update counts; None: as much as each one before it."""
    if module.momentum is not None:
        return float(module.momentum)
    return 0.0 if module.num_batches_tracked is None else 1.0 / float(module.num_batches_tracked)


# ---- on the wire: a line of JSON that says what follows, then float64


def _encode(parts: Parts) -> bytes:
    if not any(part.keys for part in parts.values()):
        return b""
    layouts = list(dict.fromkeys(part.keys for part in parts.values()))
    nodes = [(node.level, node.index, layouts.index(part.keys)) for node, part in parts.items()]
    values = torch.cat([part.flat for part in parts.values()])
    return json.dumps({"nodes": nodes, "layouts": layouts}).encode() + b"\n" + values.numpy().tobytes()


def _decode(data: bytes) -> Parts:
    if not data:
        return {}
    line, _, raw = data.partition(b"\n")
    head = json.loads(line)
    layouts = [tuple((layer, call, channels) for layer, call, channels in layout) for layout in head["layouts"]]
    rest = torch.frombuffer(bytearray(raw), dtype=torch.float64) if raw else torch.empty(0, dtype=torch.float64)
    parts: Parts = {}
    for level, index, which in head["nodes"]:
        keys: tuple[Key, ...] = layouts[which]
        length = sum(1 + 2 * channels for _, _, channels in keys)
        parts[Node(level, index)] = Part(keys, rest[:length])
        rest = rest[length:]
    return parts
