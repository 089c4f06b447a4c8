"""A random generator of its own for each thread replica.

torch has one default generator on the CPU, which all threads draw from, in whatever order they come. While `installed`,
a random operation that names no generator draws, in a thread inside `drawing_from(own)`, from that thread's own: the
CPU kernels of all operations that take a generator are overridden, and `torch.get_rng_state`, `manual_seed` and their
kin (which activation checkpointing calls) see it too. A GPU has a default generator of its own, so it needs none of
this: a replica must only be alone on its devices.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from evenstep.errors import UsageError


class Own:
    """The generators of one replica: one for the CPU, and the default ones of its GPUs. `keys` is the state of the
    keyed randomness in its thread."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self.cpu = torch.Generator()
        self.gpus = sorted({d.index or 0 for d in devices if d.type == "cuda"})
        self.keys: Any = None

    def seed(self, seed: int) -> None:
        """As `randomness.seed_generators`, for what this replica draws from."""
        self.cpu.manual_seed(seed)
        for gpu in self.gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """As `randomness.kept_generators`."""
        generators = [self.cpu, *(torch.cuda.default_generators[gpu] for gpu in self.gpus)]
        states = [g.get_state() for g in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


_thread = threading.local()
_by_gpu: dict[int, Own] = {}  # autograd runs the backward on a thread of its own for each GPU


def current() -> Own | None:
    """The generators that this thread draws from; None: the default ones."""
    own: Own | None = getattr(_thread, "own", None)
    if own is None and _by_gpu and threading.current_thread() is not threading.main_thread():
        own = _by_gpu.get(torch.cuda.current_device())
    return own


def cpu_generator() -> torch.Generator:
    """The generator of this thread's random operations on the CPU."""
    own = current()
    return torch.default_generator if own is None else own.cpu


@contextmanager
def drawing_from(own: Own) -> Iterator[None]:
    """This thread, and the backward on this replica's GPUs, draw from `own` (inside `installed()`)."""
    before = getattr(_thread, "own", None)
    _thread.own = own
    _by_gpu.update(dict.fromkeys(own.gpus, own))
    try:
        yield
    finally:
        _thread.own = before
        for gpu in own.gpus:
            _by_gpu.pop(gpu, None)


@contextmanager
def installed() -> Iterator[None]:
    """Inside, threads can have generators of their own. One at a time; costs nothing before and afterwards."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*other operators may also be overridden")
            for operation in operations():
                _override(library, operation)
        vars(torch.random)["default_generator"] = _ThreadsGenerator()
        yield
    finally:
        vars(torch.random)["default_generator"] = torch.default_generator
        library._destroy()


@contextmanager
def shared_left_alone() -> Iterator[None]:
    """UsageError, by name, if a generator that threads share was used inside."""
    before = _shared()
    yield
    drawn = [name for name, state in _shared().items() if state != before[name]]
    if drawn:
        raise UsageError(
            f"the loss draws from {' and '.join(drawn)}, which all thread replicas share, so what each one gets would "
            "depend on their speed",
            do="draw with torch's functions (torch.rand, torch.randperm, ...), draw in the data set or in collate, or "
            "use processes instead of thread replicas",
        )


def _shared() -> dict[str, object]:
    legacy: Any = np.random.get_state()
    return {
        "Python's random module": random.getstate(),
        "numpy's global generator": (legacy[1].tobytes(), *legacy[2:]),
        "torch.default_generator": torch.default_generator.get_state().numpy().tobytes(),
    }


def operations() -> list[str]:
    """Every operation with a CPU kernel that takes a generator. All random operations on the CPU end in these."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and any("Generator" in str(a.type) for a in schema.arguments):
            name = f"{schema.name}.{schema.overload_name}".rstrip(".")
            if _has_cpu_kernel(name):
                found.append(name)
    return sorted(found)


def _has_cpu_kernel(name: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    except RuntimeError:  # of TorchScript alone
        return False


def _override(library: torch.library.Library, operation: str) -> None:
    call = torch.library.get_kernel(operation, "CPU").call_boxed
    _, _, name = operation.partition("::")
    packet, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
    places = {a.name: k for k, a in enumerate(schema.arguments) if not a.kwarg_only}
    library.impl(name, _kernel(call, places.get("generator")), "CPU", with_keyset=True, allow_override=True)


def _kernel(call: Callable[..., Any], place: int | None) -> Callable[..., Any]:
    """The kernel `call` with the thread's own generator where none, or the default one, is named.

    `place`: of the generator among the arguments, if it is not given by keyword alone."""

    def kernel(keys: Any, *given: Any, **named: Any) -> Any:
        own = current()
        if own is None:
            return call(keys, *given, **named)
        if place is not None and len(given) > place:
            if _is_default(given[place]):
                given = (*given[:place], own.cpu, *given[place + 1 :])
        elif _is_default(named.get("generator")):
            named["generator"] = own.cpu
        return call(keys, *given, **named)

    return kernel


def _is_default(generator: torch.Generator | None) -> bool:
    return generator is None or generator._cdata == torch.default_generator._cdata  # type: ignore[attr-defined]


class _ThreadsGenerator:
    """What the functions of torch.random use as the default generator: the thread's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu_generator(), name)
