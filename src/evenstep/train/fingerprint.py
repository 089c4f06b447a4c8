"""A 64-bit hash of parameters, buffers and optimizer state that processes compute in parts and add up.

The sum, modulo 2^64, of every element times an odd number that follows from its tensor's name, dtype and shape and from
its position. So it does not matter who adds which elements, and a single changed bit always shows. An element of 64
bits counts as two of 32: else two flipped sign bits would cancel, whatever the odd numbers are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenstep.train.pieces import Elsewhere, is_whole
from evenstep.train.plain_values import encode_leaf, join_path
from evenstep.train.state import check_tensor

_Words = np.ndarray[Any, np.dtype[np.uint64]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 4096  # words that share a row of multipliers; times a multiplier of their block
_CHUNK = 16 * BLOCK  # words that are multiplied at a time: they stay in the cache
ELSEWHERE_NODE = {"elsewhere": True}  # what ELSEWHERE is in a description


def fingerprint(tree: object, rank: int = 0, world_size: int = 1) -> int:
    """The part of process `rank` in the fingerprint of `tree`, which every process holds.

    `tree` is a nest of dicts, lists and tuples of tensors and of values that `save_tree` takes, for example
    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}. The tensors' elements are divided evenly among
    the processes; all else counts for rank 0. `add` joins the parts. The order of keys and how tensors lie in
    memory do not count; names, types, dtypes, shapes and bits do. UsageError for what cannot be hashed, by its path.
    """
    text, tensors = described(tree)
    return part_of(text, tensors, rank, world_size)


def described(tree: object, *, parts: bool = False) -> tuple[bytes, dict[str, Tensor]]:
    """All of `tree` but the tensors' bits, as JSON, and the tensors by path. With `parts` they may be DTensors and meta
    tensors, and something ELSEWHERE."""
    describer = _Describer(parts)
    text = json.dumps(describer.describe(tree, "")).encode()
    return text, describer.tensors


def part_of(text: bytes, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> int:
    """The part of process `rank`: an even share of the tensors' elements, and on rank 0 all else.

    It reads some of every large tensor, so that `agree` notices a change of any one. The small ones are shared out
    among the processes: a tensor costs time however little of it is read.
    """
    parts = [hash_of(text)] if rank == 0 else []
    small = sum(tensor.numel() for tensor in tensors.values() if tensor.numel() < BLOCK)
    start, stop = (small * r // world_size for r in (rank, rank + 1))
    base = 0  # of the tensor, among the elements of small ones
    found: list[Run] = []
    for name in sorted(tensors):
        tensor = tensors[name]
        size = tensor.numel()
        if size < BLOCK:
            first, last = max(start - base, 0), min(stop - base, size)
            base += size
        else:
            first, last = (size * r // world_size for r in (rank, rank + 1))
        if first < last:
            flat = tensor.detach().reshape(-1)
            found += runs(tensor_key(name, tensor.dtype, tensor.shape), flat[first:last], first)
    return add([*parts, total(found)])


def bits_of(tensors: Mapping[str, Tensor]) -> bytes:
    """The bits of small tensors, in the order of their names. One transfer for each device."""
    by_device: dict[torch.device, list[str]] = {}
    for name in tensors:
        by_device.setdefault(tensors[name].device, []).append(name)
    found: dict[str, bytes] = {}
    for names in by_device.values():
        flat = [_words(tensors[name].detach().reshape(-1)).view(torch.uint8) for name in names]
        data, at = torch.cat(flat).cpu().numpy().tobytes(), 0
        for name, bits in zip(names, flat, strict=True):
            found[name] = data[at : (at := at + bits.numel())]
    return b"".join(found[name] for name in sorted(found))


def tensor_key(name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """What the multipliers of a whole tensor follow from."""
    return hash_of(f"{name}\0{dtype}\0{list(shape)}".encode())


def add(parts: Iterable[int]) -> int:
    """The fingerprint whose parts these are."""
    return sum(parts) & _MASK


def to_hex(value: int) -> str:
    """A fingerprint as people see it: 16 hexadecimal digits."""
    return f"{value & _MASK:016x}"


class _Describer:
    """Turns a tree into JSON that depends on all but the tensors' bits, and collects the tensors by path."""

    def __init__(self, parts: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._parts = parts

    def describe(self, value: object, path: str) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            plain = not value.dtype.hasobject
            data = hashlib.blake2b(value.tobytes()).hexdigest() if plain else encode_leaf(value, path)
            return {"array": [value.dtype.str, list(value.shape), data]}
        if isinstance(value, Mapping):
            items = sorted(((_leaf_text(key, path), key) for key in value), key=lambda item: item[0])
            return {"dict": [[text, self.describe(value[key], join_path(path, key))] for text, key in items]}
        if isinstance(value, Set):
            return {"set": sorted(_leaf_text(item, path) for item in value)}
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            described = [self.describe(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": described}
        if self._parts and isinstance(value, Elsewhere):
            return ELSEWHERE_NODE
        return encode_leaf(value, path)

    def _tensor(self, value: Tensor, path: str) -> object:
        check_tensor(value, path, parts=self._parts)
        name, n = path, 1
        while name in self.tensors:  # two paths can be spelled alike: a.b of {"a.b": ..., "a": {"b": ...}}
            name, n = f"{path}#{n}", n + 1
        self.tensors[name] = value.resolve_conj().resolve_neg() if is_whole(value) else value
        return {"tensor": [name, str(value.dtype), list(value.shape)]}


def _leaf_text(value: object, path: str) -> str:
    """A key as text that tells 1, True and "1" apart."""
    return json.dumps(_Describer(parts=False).describe(value, path))


class Run(NamedTuple):
    """Sums over neighbouring blocks of a tensor, before they are multiplied by the blocks' multipliers."""

    key: int
    first_block: int
    sums: Tensor  # int64, wrapping; one for each block


def runs(key: int, flat: Tensor, start: int) -> Iterator[Run]:
    """The sums of words times multipliers, for the elements from `start` on."""
    if not flat.numel():
        return
    words = _words(flat)
    row = _row(flat.device)
    scratch: Tensor | None = None
    at = start * (words.numel() // flat.numel())  # the place of the first of `words` in the tensor
    while count := words.numel():
        first = at % BLOCK
        if first or count < BLOCK:  # within one block
            taken = min(BLOCK - first, count)
            sums = words[:taken].long().mul_(row[first : first + taken]).sum(0, keepdim=True)
        else:  # whole blocks
            taken = min(_CHUNK, count // BLOCK * BLOCK)
            some = words[:taken].view(-1, BLOCK)
            if scratch is None:
                scratch = torch.empty_like(some, dtype=torch.int64)  # one for all: fresh memory costs more than the sum
            sums = scratch[: some.shape[0]].copy_(some).mul_(row).sum(1)
        yield Run(key, at // BLOCK, sums)
        words = words[taken:]
        at += taken


def total(sums_of: list[Run] | Iterator[Run]) -> int:
    """The sum of all blocks times their multipliers, modulo 2^64. One transfer for each device."""
    by_device: dict[torch.device, list[Run]] = {}
    for run in sums_of:
        by_device.setdefault(run.sums.device, []).append(run)
    result = 0
    for some in by_device.values():
        sums = torch.cat([run.sums for run in some]).cpu().numpy().view(np.uint64)
        result += int((sums * _block_multipliers(some)).sum())
    return result & _MASK


def _block_multipliers(runs: list[Run]) -> _Words:
    """The odd number of each block, from its tensor's key and its place."""
    counts = np.array([run.sums.numel() for run in runs])
    keys = np.array([run.key for run in runs], dtype=np.uint64)
    # 1, 2, ... from each run's first block on
    firsts = np.array([run.first_block for run in runs]) - np.cumsum(counts) + counts
    blocks = np.repeat(firsts, counts) + np.arange(1, counts.sum() + 1)
    return _mix(np.repeat(keys, counts) + blocks.astype(np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)


def _words(flat: Tensor) -> Tensor:
    """The bits of the elements as integers of at most 32 bits; those of wider elements in parts."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.contiguous()
    return flat.view({1: torch.int8, 2: torch.int16}.get(flat.element_size(), torch.int32))


@cache
def _row(device: torch.device) -> Tensor:
    """The multipliers of the words of a block, the same for every block: odd numbers."""
    numbers = _mix(np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


def _mix(numbers: _Words) -> _Words:
    """splitmix64: neighbouring numbers come out unrelated."""
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


def hash_of(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
