"""What happens in one step, hashed, so that `evenstep prove` can say where two layouts part.

Only where EVENSTEP_TRACE_STEP names a step are there hooks, and only in that step. Every process writes what it sees to
`trace/rank-N.jsonl` in the run directory, in the order in which it happens:

    begin      threads of torch; whether the run is exact; where the user's code lies
    state      hashes of all that the fingerprint is of, before the step and after it, and plain values by name
    batch      of a micro-batch, as it was read
    forward    a call of a module: hashes of what it got and gave, in the order in which calls end
    loss       of a micro-batch; what computing it changed beside
    backward   a call of a module: the hash of the gradient of what it gave
    gradients  of the parameters, after a step.backward
    optimizer  gradients and hyperparameters as an optimizer's step finds them
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenstep.record.events import EventWriter
from evenstep.record.paths import RunPaths
from evenstep.train.agreement import by_path
from evenstep.train.batch import tensors
from evenstep.train.data.samples import digest
from evenstep.train.data.stream import Stream
from evenstep.train.loss import Leaf
from evenstep.train.models import Models
from evenstep.train.snapshot import INSTALLED, OURS, Changed, said, users_frame, values_of

NOT_HERE = "not here"
"""In place of the hash of a tensor that is not whole in this process: another stage's, or a shard."""


class Trace:
    """The trace of one step of this process. Made where the step begins; `end` takes its hooks away."""

    def __init__(
        self, paths: RunPaths, rank: int, models: Models, data: Any, hashes: Callable[[], dict[str, str]]
    ) -> None:
        """`hashes` gives those of all that the fingerprint is of, by path."""
        self._events = EventWriter(paths.trace(rank), rank)
        self._models, self._data, self._hashes = models, data, hashes
        self._named = {
            id(m): f"{name}.{inner}".strip(".") for name, model in models.named() for inner, m in _inner(model)
        }
        self._parameters = {id(p): name for name, p in models.parameters()}
        self._here = threading.local()  # threads may compute micro-batches side by side
        self._handles: list[Any] = []

    def begin(self, step: int, exact: bool) -> None:
        """The loop's turn for `step` begins; called from the loop's iterator."""
        frame = users_frame()
        loop = None if frame is None else [frame.f_code.co_filename, frame.f_lineno, frame.f_lineno]
        code = {"loop": loop, "data": _data_lines(self._data)}
        stream = isinstance(self._data, Stream)
        self._events.emit("begin", step=step, threads=torch.get_num_threads(), exact=exact, code=code, stream=stream)
        variables = values_of(frame, self._models.all, self._data)
        self._events.emit("state", when="before", hashes=self._hashes(), values=variables)
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True),
            register_optimizer_step_pre_hook(self._optimizer),
        ]

    def end(self) -> None:
        """The loop's body is done."""
        self._events.emit("state", when="after", hashes=self._hashes(), values={})
        self.close()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._events.close()

    # ---- step.backward

    @contextmanager
    def micro_batch(self, call: int, index: int, loss_fn: Any, batch: Any) -> Iterator[Callable[[Leaf], None]]:
        """While the loss of a micro-batch is computed, in the `call`-th step.backward; gives what takes the result."""
        about = {"call": call, "micro_batch": index}
        self._events.emit("batch", **about, hash=digest(batch), threads=torch.get_num_threads())
        self._here.about, self._here.stack, self._here.counts = about, [], {}
        changed = Changed(loss_fn, self._models.all)

        def tell(found: Leaf) -> None:
            value = f"{found.value!r} / {found.weight!r}"
            lines = _users_lines(getattr(inspect.unwrap(loss_fn), "__code__", None))
            self._events.emit("loss", **about, hash=value, changed=changed.now(), lines=lines)

        try:
            yield tell
        finally:
            self._here.about = None

    def gradients(self, call: int) -> None:
        """After the `call`-th step.backward."""
        self._events.emit("gradients", call=call, hashes=self._gradients())

    def _gradients(self) -> dict[str, str]:
        """By name, and for what is not whole here by name and places, as `by_path` tells parts."""
        found: dict[str, str] = {}
        for name, p in self._models.parameters():
            found.update({name: NOT_HERE if p.is_meta else "none"} if p.grad is None else _parts(name, p.grad))
        return found

    def _optimizer(self, optimizer: Optimizer, *_: object) -> None:
        name = type(optimizer).__name__
        values = {
            f"{name}.param_groups[{k}].{key}": text
            for k, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params" and (text := said(value)) is not None
        }
        mine = {self._parameters.get(id(p), "") for group in optimizer.param_groups for p in group["params"]}
        found = self._gradients()
        hashes = {key: value for key, value in found.items() if key.partition("\0")[0] in mine}
        self._events.emit("optimizer", name=name, hashes=hashes, values=values)

    # ---- modules

    def _enter(self, module: nn.Module, args: Any) -> None:
        here = self._here
        if getattr(here, "about", None) is None:
            return
        name = self._name(module)
        nth = here.counts.get(name, 0)
        here.counts[name] = nth + 1
        parent = here.stack[-1][0] if here.stack else None
        here.stack.append((name, nth, parent, hash_of(args)))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        here = self._here
        if getattr(here, "about", None) is None or not here.stack:
            return
        name, nth, parent, got = here.stack.pop()
        call = {**here.about, "module": name, "nth": nth}
        self._events.emit(
            "forward",
            **call,
            kind_of_module=_class(module).__name__,
            parent=parent,
            got=f"{got} {hash_of(kwargs)}" if kwargs else got,
            hash=hash_of(output),
            lines=_class_lines(_class(module)),
        )
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward(call))

    def _backward(self, call: Mapping[str, Any]) -> Callable[[Tensor], None]:
        def tell(gradient: Tensor) -> None:
            self._events.emit("backward", **call, hash=hash_of(gradient))

        return tell

    def _name(self, module: nn.Module) -> str:
        found = self._named.get(id(module))
        if found is None:  # a replica's, which has the names of what it is a copy of
            for inner, m in _inner(module):
                self._named.setdefault(id(m), inner)
            found = self._named[id(module)]
        return found


@contextmanager
def traced(trace: Trace | None, call: int, index: int, loss_fn: Any, batch: Any) -> Iterator[Callable[[Leaf], None]]:
    """`trace.micro_batch`, where there is a trace."""
    if trace is None:
        yield lambda _: None
    else:
        with trace.micro_batch(call, index, loss_fn, batch) as tell:
            yield tell


def hash_of(nest: Any) -> str:
    """Of the tensors in `nest`, with their dtypes and shapes: 16 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors(nest):
        if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            return NOT_HERE
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        hashed.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        if plain.numel():
            hashed.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _inner(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        yield name or _class(model).__name__, module


def _class(module: nn.Module) -> type:
    """The user's class: sharding puts one of its own in front of it (FSDPNet)."""
    kinds = [kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP")]
    return kinds[0] if len(kinds) < len(type(module).__mro__) - 1 else type(module)


def _parts(name: str, gradient: Tensor) -> dict[str, str]:
    if gradient.layout != torch.strided:
        return {name: hash_of(gradient.to_dense())}
    found = by_path({"": gradient}, parts=True)
    return {name + path[path.find("\0") :] if "\0" in path else name: value for path, value in found.items()}


def _data_lines(data: Any) -> list[Any] | None:
    """Where the code of a data set lies, or that of the function which makes a stream's lanes."""
    if not isinstance(data, Stream):
        return _class_lines(type(data))
    make = getattr(data.source, "make", data.source)
    return _users_lines(make.__code__) if inspect.isfunction(make) else _class_lines(type(make))


def _users_lines(code: CodeType | None) -> list[Any] | None:
    """Where a function's code lies; None where that is in an installed package or in evenstep."""
    return None if code is None or code.co_filename.startswith((OURS, *INSTALLED)) else _lines(code)


def _lines(code: CodeType) -> list[Any]:
    """Where a function's code lies: [file, first line, last line]."""
    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    return [code.co_filename, code.co_firstlineno, last]


def _class_lines(kind: type) -> list[Any] | None:
    """Where the methods of a user's class lie; None for one of an installed package."""
    codes = [inspect.unwrap(f).__code__ for f in vars(kind).values() if inspect.isfunction(f)]
    codes = [code for code in codes if not code.co_filename.startswith(INSTALLED)]
    if not codes:
        return None
    places = [_lines(code) for code in codes]
    return [places[0][0], min(first for _, first, _ in places), max(last for _, _, last in places)]
