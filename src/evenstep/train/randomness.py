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

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def key(*parts: int | str) -> int:
    """A 63-bit number for `parts` (plain ints and strings), the same on every machine; other parts, another number."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Set the generators of torch (CPU, and CUDA if it is in use), random and numpy. `seed`: 0..2^63-1."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed costs 80 us more
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # the legacy generator takes 32 bits at a time; two words cost 4 times as much


@contextmanager
def kept_generators() -> Iterator[None]:
    """Whatever happens inside, the generators of torch, random and numpy afterwards stand where they stood before."""
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


class Randomness:
    """The keyed randomness of one run: what the generators are set to, and when.

    Hooks of `key_blocks` work only inside `keyed()`; a model that is called elsewhere leaves the generators alone.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._active = False
        self._work = 0  # the key of the micro-batch, or whatever `begin` named
        self._calls: dict[str, int] = {}  # block -> calls of it so far in this micro-batch
        # (key of the generator on entry, block) -> key. Activation checkpointing runs a block again with the generator
        # put back, so the second run finds the first one's key here instead of counting a further call.
        self._known: dict[tuple[int, str], int] = {}

    def begin_step(self, step: int) -> None:
        """Key the generators for what the user's own loop draws in `step`: it is the same after a resume."""
        seed_generators(key(self.seed, "step", step))

    @contextmanager
    def keyed(self) -> Iterator[None]:
        """The work inside keys the generators; afterwards they stand where they stood before."""
        before = self._active, self._work, self._calls, self._known
        with kept_generators():
            self._active, self._calls, self._known = True, {}, {}
            try:
                yield
            finally:
                self._active, self._work, self._calls, self._known = before

    def begin_micro_batch(self, step: int, call: int, index: int) -> None:
        """Key the generators for micro-batch `index` in the `call`-th step.backward of `step` (inside `keyed()`)."""
        self.begin("micro-batch", step, call, index)

    def begin(self, *parts: int | str) -> None:
        """Key the generators for the work that `parts` name (inside `keyed()`); blocks count their calls anew."""
        self._work = key(self.seed, *parts)
        self._calls.clear()
        seed_generators(self._work)

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
        if not self._active:
            return
        known = torch.default_generator.initial_seed(), place
        seed = self._known.get(known)
        if seed is None:
            nth = self._calls.get(place, 0)
            self._calls[place] = nth + 1
            seed = self._known[known] = key(self._work, place, nth)
        seed_generators(seed)


class _Border:
    """The hook at one side of a block. A copy of the model, or one from a file, has hooks that do nothing."""

    def __init__(self, randomness: Randomness | None = None, place: str = "") -> None:
        self._randomness, self._place = randomness, place

    def __call__(self, *_: object) -> None:
        if self._randomness is not None:
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
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if not compiled:  # hooks inside a compiled model would break its graph at every block
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
