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

from evenstep.train.leaves import encode_leaf, join_path
from evenstep.train.state import check_tensor

_Words = np.ndarray[Any, np.dtype[np.uint64]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 4096  # words that share a row of multipliers; times a multiplier of their block
_CHUNK = 16 * _BLOCK  # words that are multiplied at a time: they stay in the cache


def fingerprint(tree: object, rank: int = 0, world_size: int = 1) -> int:
    """The part of process `rank` in the fingerprint of `tree`, which every process holds.

    `tree` is a nest of dicts, lists and tuples of tensors and of values that `save_tree` takes, for example
    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}. The tensors' elements are divided evenly among
    the processes; all else counts for rank 0. `add` joins the parts. The order of keys and how tensors lie in
    memory do not count; names, types, dtypes, shapes and bits do. UsageError for what cannot be hashed, by its path.
    """
    text, tensors = _described(tree)
    return _part(text, tensors, rank, world_size)


class Share(NamedTuple):
    """What one process says about a tree, so that all learn its fingerprint and whether they hold the same tree.

    The parts alone would not tell: two processes with different trees still add up to one number.
    """

    part: int  # its own part
    next: int  # the part of the process after it (of rank 0 after the last), as its own tree has it
    rest: int  # a hash of what every process reads whole: names, types, shapes, plain values, small tensors

    def to_bytes(self) -> bytes:
        return b"".join(number.to_bytes(8, "little") for number in self)

    @staticmethod
    def from_bytes(data: bytes) -> Share:
        return Share(*(int.from_bytes(data[i : i + 8], "little") for i in (0, 8, 16)))


def share(tree: object, rank: int, world_size: int) -> Share:
    """What process `rank` says about `tree`. It reads two parts; where it is alone, the only one once."""
    text, tensors = _described(tree)
    part = _part(text, tensors, rank, world_size)
    if world_size == 1:
        return Share(part, part, 0)
    following = _part(text, tensors, (rank + 1) % world_size, world_size)
    return Share(part, following, _hash(text + _bits({n: t for n, t in tensors.items() if 0 < t.numel() < _BLOCK})))


def agree(shares: Sequence[Share]) -> bool:
    """Whether the processes hold the same tree, as far as their shares (by rank) tell.

    A process shows whose tree is another in the elements of its own part or the next one's, or in what every process
    reads whole: so does whoever trains apart from the others. A few elements of a large tensor may not show.
    """
    following = (*shares[1:], shares[0])
    return all(
        mine.next == other.part and mine.rest == other.rest for mine, other in zip(shares, following, strict=True)
    )


def by_path(tree: object) -> dict[str, str]:
    """The fingerprint of every tensor and plain value of `tree` by its path: to find what differs between two trees."""
    found: dict[str, int] = {}
    _by_path(tree, "", found)
    return {path: to_hex(value) for path, value in found.items()}


def _by_path(value: object, path: str, found: dict[str, int]) -> None:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            _by_path(item, join_path(path, key), found)
    elif isinstance(value, (list, tuple)) and value and not isinstance(value, torch.Size):
        for i, item in enumerate(value):
            _by_path(item, f"{path}[{i}]", found)
    else:
        found[path] = add((found.get(path, 0), fingerprint({path: value})))  # two paths can be spelled alike


def _described(tree: object) -> tuple[bytes, dict[str, Tensor]]:
    """All of `tree` but the tensors' bits, as JSON, and the tensors by path."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_describe(tree, "", tensors)).encode()
    return text, tensors


def _part(text: bytes, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> int:
    """The part of process `rank`: an even share of the tensors' elements, and on rank 0 all else.

    It reads some of every large tensor, so that `agree` notices a change of any one. The small ones are shared out
    among the processes: a tensor costs time however little of it is read.
    """
    parts = [_hash(text)] if rank == 0 else []
    small = sum(tensor.numel() for tensor in tensors.values() if tensor.numel() < _BLOCK)
    start, stop = (small * r // world_size for r in (rank, rank + 1))
    base = 0  # of the tensor, among the elements of small ones
    runs: list[_Run] = []
    for name in sorted(tensors):
        tensor = tensors[name]
        size = tensor.numel()
        if size < _BLOCK:
            first, last = max(start - base, 0), min(stop - base, size)
            base += size
        else:
            first, last = (size * r // world_size for r in (rank, rank + 1))
        if first < last:
            flat = tensor.detach().reshape(-1)
            runs += _runs(tensor_key(name, tensor.dtype, tensor.shape), flat[first:last], first)
    return add([*parts, _total(runs)])


def _bits(tensors: Mapping[str, Tensor]) -> bytes:
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
    return _hash(f"{name}\0{dtype}\0{list(shape)}".encode())


def tensor_part(key: int, part: Tensor, start: int) -> int:
    """The part that the elements from `start` on, in C order, have in a tensor's fingerprint; `part` holds them."""
    return _total(_runs(key, part.detach().reshape(-1), start))


def add(parts: Iterable[int]) -> int:
    """The fingerprint whose parts these are."""
    return sum(parts) & _MASK


def to_hex(value: int) -> str:
    """A fingerprint as people see it: 16 hexadecimal digits."""
    return f"{value & _MASK:016x}"


def _describe(value: object, path: str, tensors: dict[str, Tensor]) -> object:
    """`value` as JSON that depends on all but the tensors' bits; the tensors themselves go into `tensors` by path."""
    if isinstance(value, Tensor):
        check_tensor(value, path)
        name, n = path, 1
        while name in tensors:  # two paths can be spelled alike: a.b of {"a.b": ..., "a": {"b": ...}}
            name, n = f"{path}#{n}", n + 1
        tensors[name] = value.resolve_conj().resolve_neg()
        return {"tensor": [name, str(value.dtype), list(value.shape)]}
    if isinstance(value, np.ndarray):
        data = hashlib.blake2b(value.tobytes()).hexdigest() if not value.dtype.hasobject else encode_leaf(value, path)
        return {"array": [value.dtype.str, list(value.shape), data]}
    if isinstance(value, Mapping):
        items = sorted(((_leaf_text(key, path), key) for key in value), key=lambda item: item[0])
        return {"dict": [[text, _describe(value[key], join_path(path, key), tensors)] for text, key in items]}
    if isinstance(value, Set):
        return {"set": sorted(_leaf_text(item, path) for item in value)}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        described = [_describe(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": described}
    return encode_leaf(value, path)


def _leaf_text(value: object, path: str) -> str:
    """A key as text that tells 1, True and "1" apart."""
    return json.dumps(_describe(value, path, {}))


class _Run(NamedTuple):
    """Sums over neighbouring blocks of a tensor, before they are multiplied by the blocks' multipliers."""

    key: int
    first_block: int
    sums: Tensor  # int64, wrapping; one for each block


def _runs(key: int, flat: Tensor, start: int) -> Iterator[_Run]:
    """The sums of words times multipliers, for the elements from `start` on."""
    if not flat.numel():
        return
    words = _words(flat)
    row = _row(flat.device)
    scratch: Tensor | None = None
    at = start * (words.numel() // flat.numel())  # the place of the first of `words` in the tensor
    while count := words.numel():
        first = at % _BLOCK
        if first or count < _BLOCK:  # within one block
            taken = min(_BLOCK - first, count)
            sums = words[:taken].long().mul_(row[first : first + taken]).sum(0, keepdim=True)
        else:  # whole blocks
            taken = min(_CHUNK, count // _BLOCK * _BLOCK)
            some = words[:taken].view(-1, _BLOCK)
            if scratch is None:
                scratch = torch.empty_like(some, dtype=torch.int64)  # one for all: fresh memory costs more than the sum
            sums = scratch[: some.shape[0]].copy_(some).mul_(row).sum(1)
        yield _Run(key, at // _BLOCK, sums)
        words = words[taken:]
        at += taken


def _total(runs: list[_Run] | Iterator[_Run]) -> int:
    """The sum of all blocks times their multipliers, modulo 2^64. One transfer for each device."""
    by_device: dict[torch.device, list[_Run]] = {}
    for run in runs:
        by_device.setdefault(run.sums.device, []).append(run)
    total = 0
    for some in by_device.values():
        sums = torch.cat([run.sums for run in some]).cpu().numpy().view(np.uint64)
        total += int((sums * _block_multipliers(some)).sum())
    return total & _MASK


def _block_multipliers(runs: list[_Run]) -> _Words:
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
    numbers = _mix(np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


def _mix(numbers: _Words) -> _Words:
    """splitmix64: neighbouring numbers come out unrelated."""
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
