"""Keyed randomness: every random number depends on what it is for, not on who draws it or when.

The global generators of torch (CPU and CUDA), numpy and random are set to a key before each piece of work: a sample,
a collate call, a micro-batch, and again on entry to and exit from each block of a model. A block is a place where a
model can be cut into stages, so what is drawn in it must not depend on what was drawn before it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from evenstep.errors import UsageError
from evenstep.train.generators import Own, cpu_generator, current, drawing_from

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def key(*parts: int | str) -> int:
    """A 63-bit number for `parts` (plain ints and strings), the same on every machine; other parts, another number."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Set the generators of torch (CPU, and CUDA if it is in use), random and numpy. `seed`: 0..2^63-1.

    In the thread of a replica: its own generators, and none that threads share."""
    own = current()
    if own is not None:
        own.seed(seed)
        return
    torch.default_generator.manual_seed(seed)  # torch.manual_seed costs 80 us more
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # the legacy generator takes 32 bits at a time; two words cost 4 times as much


@contextmanager
def kept_generators() -> Iterator[None]:
    """Whatever happens inside, the generators of torch, random and numpy afterwards stand where they stood before.

    In the thread of a replica: its own."""
    own = current()
    if own is not None:
        with own.kept():
            yield
        return
    cpu = torch.default_generator.get_state()
    cuda = [g.get_state() for g in torch.cuda.default_generators] if torch.cuda.is_initialized() else []
    python, legacy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        for generator, state in zip(torch.cuda.default_generators if cuda else (), cuda, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(legacy)


def generators_stand() -> tuple[object, ...]:
    """Where the generators of torch (on the CPU), random and numpy stand, to compare."""
    name, words, *rest = np.random.get_state()
    numpy = (name, np.asarray(words).tobytes(), *rest)
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), numpy


@dataclass
class _Keys:
    """Where the keyed randomness of a thread stands."""

    active: bool = False
    work: int = 0  # the key of the micro-batch, or whatever `begin` named
    calls: dict[str, int] = field(default_factory=dict)  # block -> calls of it so far in this micro-batch
    # (key of the generator on entry, block) -> key. Activation checkpointing runs a block again with the generator
    # put back, so the second run finds the first one's key here instead of counting a further call.
    known: dict[tuple[int, str], int] = field(default_factory=dict)


class Randomness:
    """The keyed randomness of one run: what the generators are set to, and when.

    Hooks of `key_blocks` work only inside `keyed()`; a model that is called elsewhere leaves the generators alone.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._main = _Keys()

    @contextmanager
    def keyed_replica(self, own: Own) -> Iterator[None]:
        """As `keyed`, for the thread that it is called in, which draws from `own`."""
        own.keys = _Keys(active=True)
        with drawing_from(own):
            yield

    def begin_step(self, step: int) -> None:
        """Key the generators for what the user's own loop draws in `step`: it is the same after a resume."""
        seed_generators(key(self.seed, "step", step))

    @contextmanager
    def keyed(self) -> Iterator[None]:
        """The work inside keys the generators; afterwards they stand where they stood before."""
        before, self._main = self._main, _Keys(active=True)
        with kept_generators():
            try:
                yield
            finally:
                self._main = before

    def begin_micro_batch(self, step: int, call: int, index: int) -> None:
        """Key the generators for micro-batch `index` in the `call`-th step.backward of `step` (inside `keyed()`)."""
        self.begin("micro-batch", step, call, index)

    def begin(self, *parts: int | str) -> None:
        """Key the generators for the work that `parts` name (inside `keyed()`); blocks count their calls anew."""
        keys = self._keys()
        keys.work = key(self.seed, *parts)
        keys.calls.clear()
        seed_generators(keys.work)

    def key_blocks(self, model: nn.Module, name: str) -> list[RemovableHandle]:
        """Key the generators on entry to and exit from each block of `model`. `name` tells models of a run apart."""
        handles = []
        for block_name, block in blocks(model):
            place = f"{name}.{block_name}"
            handles.append(block.register_forward_pre_hook(_Border(self, f"{place} in")))
            handles.append(block.register_forward_hook(_Border(self, f"{place} out")))
        return handles

    def cross(self, place: str) -> None:
        """A call of a block begins or ends at `place`."""
        keys = self._keys()
        if not keys.active:
            return
        known = cpu_generator().initial_seed(), place
        seed = keys.known.get(known)
        if seed is None:
            if in_backward():
                return  # a recomputation with other numbers: see `undrawn`
            nth = keys.calls.get(place, 0)
            keys.calls[place] = nth + 1
            seed = keys.known[known] = key(keys.work, place, nth)
        seed_generators(seed)

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """A backward pass. UsageError if it draws random numbers of its own: they would depend on what ran before."""
        generator = cpu_generator()
        before = generator.get_state()
        yield
        if not torch.equal(before, generator.get_state()):
            raise UsageError(
                "the backward pass draws random numbers: with preserve_rng_state=False activation checkpointing "
                "computes dropout again with others than the loss was computed with",
                do="leave out preserve_rng_state=False (of torch.utils.checkpoint or gradient_checkpointing_enable)",
            )

    def _keys(self) -> _Keys:
        own = current()
        keys: _Keys = self._main if own is None else own.keys
        return keys


def in_backward() -> bool:
    """Whether autograd runs on this thread: what is computed now is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)


class _Border:
    """The hook at one side of a block. A copy of the model, or one from a file, has hooks that do nothing."""

    for_copies = True  # those of thread replicas have this one

    def __init__(self, randomness: Randomness | None = None, place: str = "") -> None:
        self._randomness, self._place = randomness, place

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self._randomness is not None:
            self._randomness.cross(self._place)

    def __reduce__(self) -> tuple[type[_Border], tuple[()]]:
        return _Border, ()


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of `model` by name, in order: the places at which it can be cut.

    They are its children, where a Sequential, ModuleList or ModuleDict stands for its entries, and a child that has a
    ModuleList or ModuleDict somewhere inside (GPT-2's `transformer`) stands for its own blocks.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    _collect(model, "", found, seen)
    return found


def _collect(parent: nn.Module, prefix: str, found: list[tuple[str, nn.Module]], seen: set[int]) -> None:
    for name, child in parent.named_children():
        path = prefix + name
        is_list = isinstance(child, _LISTS)
        entry = isinstance(parent, _LISTS) and bool(prefix)  # entries of an outermost list are whole blocks
        never_called = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if never_called or (not entry and (is_list or _has_list(child))):
            _collect(child, path + ".", found, seen)
        elif id(child) not in seen:
            seen.add(id(child))
            found.append((path, child))


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(inner, (nn.ModuleList, nn.ModuleDict)) for inner in module.modules() if inner is not module)
