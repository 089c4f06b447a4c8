"""A 64-bit hash of parameters, buffers and optimizer state that processes compute in parts and add up.

The sum, modulo 2^64, of every element times an odd number that follows from its tensor's name, dtype and shape and from
its position. So it does not matter who adds which elements, and a single changed bit always shows. An element of 64
bits counts as two of 32: else two flipped sign bits would cancel, whatever the odd numbers are.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.train.leaves import encode_leaf, join_path
from evenstep.train.pieces import Elsewhere, Piece, Span, holders, is_whole, piece
from evenstep.train.state import check_tensor

_Words = np.ndarray[Any, np.dtype[np.uint64]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 4096  # words that share a row of multipliers; times a multiplier of their block
_CHUNK = 16 * _BLOCK  # words that are multiplied at a time: they stay in the cache
_ELSEWHERE = {"elsewhere": True}


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
    return _share(*_described(tree), rank, world_size)


def _share(text: bytes, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> Share:
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


def by_path(tree: object, *, parts: bool = False) -> dict[str, str]:
    """The fingerprint of every tensor and plain value of `tree` by its path: to find what differs between two trees.

    With `parts`, of DTensors and meta tensors too: that of a tensor's type and shape is under its path, that of the
    elements which are here under the path and their places, behind a zero byte.
    """
    found: dict[str, str] = {}
    for path, value in _leaves_of(tree, ""):
        if parts and isinstance(value, Elsewhere):
            found[path] = ELSEWHERE_MARK
        elif parts and isinstance(value, Tensor):
            here = piece(value, path)
            key = tensor_key(path, here.dtype, here.shape)
            found[path] = to_hex(key)
            if here.span is not None:
                flat, first = _flat(here)
                found[f"{path}{_PLACES}{here.span[0]}:{here.span[1]}"] = to_hex(_total(_runs(key, flat, first)))
        else:
            value_hash = fingerprint({path: value})
            found[path] = to_hex(value_hash + int(found.get(path, "0"), 16))  # two paths can be spelled alike
    return found


ELSEWHERE_MARK = "elsewhere"
_PLACES = "\0"  # between a path and the places of elements


def differing(said: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """The paths at which processes say different things `by_path`, and which ranks say what ('': nothing)."""
    elsewhere = [tuple(path for path, value in one.items() if value == ELSEWHERE_MARK) for one in said]
    for path in dict.fromkeys(path for one in said for path in one):
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(said):
            value = one.get(path, "")
            if value == ELSEWHERE_MARK or (not value and (_PLACES in path or path.startswith(elsewhere[rank]))):
                continue
            by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            yield path.partition(_PLACES)[0], by_value


def _leaves_of(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves_of(item, join_path(path, key))
    elif isinstance(value, (list, tuple)) and value and not isinstance(value, torch.Size):
        for i, item in enumerate(value):
            yield from _leaves_of(item, f"{path}[{i}]")
    else:
        yield path, value


class Agreed(NamedTuple):
    """What all processes found together."""

    value: int | None  # the fingerprint; None: they hold different things
    split: bool  # whether some of them have a part of the state alone


def agreed(tree: object, rank: int, world_size: int, exchange: Callable[[bytes], list[bytes]]) -> Agreed:
    """The fingerprint of what processes hold together. All call it.

    Tensors may be DTensors and meta tensors, and what one process cannot know may be ELSEWHERE: the value is that of a
    process which has all of it. Every element counts once; those that several processes have are compared as `agree`
    does. `exchange` gives each process's bytes, by rank; it is called once, or, where some hold parts alone, two or
    three times. UsageError on every process for values that none has.
    """
    text, tensors = _described(tree, parts=True)
    whole = all(map(is_whole, tensors.values())) and json.dumps(_ELSEWHERE).encode() not in text
    mine = _share(text, tensors, rank, world_size).to_bytes() if whole else _in_parts(text, tensors)
    answers = exchange(mine)
    if all(len(answer) == _SHARE for answer in answers):
        shares = [Share.from_bytes(answer) for answer in answers]
        return Agreed(add(one.part for one in shares) if agree(shares) else None, False)
    if any(len(answer) == _SHARE for answer in answers):
        answers = exchange(_in_parts(text, tensors))
    found = _together(answers)
    if found is None:
        return Agreed(None, True)
    claims = json.dumps(_claims(found, tensors, rank)).encode()
    return Agreed(_settled([json.loads(answer) for answer in exchange(claims)]), True)


_SHARE = 24  # bytes of a Share; what has parts says more


class _Together(NamedTuple):
    """What the processes that hold parts hold together."""

    text: bytes  # as a process that has all of it describes it
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    spans: dict[str, tuple[Span, ...]]  # which elements each rank has


class _ApartError(Exception):
    """Processes describe something differently."""


def _in_parts(text: bytes, tensors: Mapping[str, Tensor]) -> bytes:
    """What a process says of itself where some hold parts: the description, and its elements of each tensor."""
    short = zlib.compress(text)
    spans = [piece(tensors[name], name).span for name in sorted(tensors)]
    return len(short).to_bytes(_SHARE + 1, "little") + short + zlib.compress(json.dumps(spans).encode())


def _together(answers: Sequence[bytes]) -> _Together | None:
    """None where the processes' descriptions do not fit together."""
    texts: dict[bytes, tuple[Any, list[str]]] = {}  # what most processes say alike is read once
    here: list[dict[str, Span]] = []
    for answer in answers:
        end = _SHARE + 1 + int.from_bytes(answer[: _SHARE + 1], "little")
        short = answer[_SHARE + 1 : end]
        if short not in texts:
            node = json.loads(zlib.decompress(short))
            texts[short] = node, sorted(name for name, _, _ in _tensors_in(node))
        spans = json.loads(zlib.decompress(answer[end:]))
        here.append({n: (s[0], s[1]) if s else None for n, s in zip(texts[short][1], spans, strict=True)})
    try:
        node = _merged([node for node, _ in texts.values()])
    except _ApartError:
        return None
    tensors = {
        name: (getattr(torch, dtype.removeprefix("torch.")), tuple(shape)) for name, dtype, shape in _tensors_in(node)
    }
    spans = {name: tuple(one.get(name) for one in here) for name in tensors}
    return _Together(json.dumps(node).encode(), tensors, spans)


def _merged(nodes: list[Any]) -> Any:
    """One description from several: what is elsewhere for one is as the others have it. Raises _ApartError."""
    known = [node for node in nodes if node != _ELSEWHERE]
    if not known:
        return _ELSEWHERE
    base = known[0]
    if all(node == base for node in known):
        return base
    if any(not isinstance(node, dict) or node.keys() != base.keys() for node in known):
        raise _ApartError
    if "dict" in base:
        return {"dict": _merged_items([dict(node["dict"]) for node in known])}
    tag = next(iter(base))
    if tag not in ("list", "tuple") or any(len(node[tag]) != len(base[tag]) for node in known):
        raise _ApartError
    return {tag: [_merged([node[tag][i] for node in known]) for i in range(len(base[tag]))]}


def _merged_items(contents: list[dict[str, Any]]) -> list[list[Any]]:
    items = []
    for key in sorted({key for content in contents for key in content}):
        item = _merged([content[key] for content in contents if key in content])
        if item != _ELSEWHERE:  # that of a parameter without any state is elsewhere for all but those who know better
            if any(key not in content for content in contents):
                raise _ApartError
            items.append([key, item])
    return items


def _tensors_in(node: Any) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each tensor that a description speaks of."""
    if not isinstance(node, dict):
        return
    if "tensor" in node:
        name, dtype, shape = node["tensor"]
        yield name, dtype, shape
    for _, item in node.get("dict", ()):
        yield from _tensors_in(item)
    for tag in ("list", "tuple"):
        for item in node.get(tag, ()):
            yield from _tensors_in(item)


def _claims(found: _Together, tensors: Mapping[str, Tensor], rank: int) -> list[Any]:
    """What process `rank` says of the elements it has: [its part, [[ranks that have copies, own, next, rest], ...]].

    The processes that have copies share the elements out among them. As in a Share, each says the part of the one
    after it too, and a hash of what all of them read whole.
    """
    own: dict[tuple[int, ...], list[_Run]] = {}
    following: dict[tuple[int, ...], list[_Run]] = {}
    rest: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for number, name in enumerate(sorted(found.tensors)):
        dtype, shape = found.tensors[name]
        key = tensor_key(name, dtype, shape)
        mine = None
        for first, last, ranks in holders(int(np.prod(shape)), found.spans[name]):
            if not ranks:
                raise UsageError(
                    f"no process has the values of {name}: it lies on the meta device",
                    do="give it values (to_empty, load_state_dict) before run.prepare",
                )
            if rank not in ranks:
                continue
            mine = mine or _flat(piece(tensors[name], name))
            flat, start = mine
            count, place = len(ranks), ranks.index(rank)
            for runs, which in ((own, place), (following, (place + 1) % count)):
                if runs is following and count == 1:
                    continue
                low, high = _portion(first, last, which, count, number)
                runs.setdefault(ranks, []).extend(_runs(key, flat[low - start : high - start], low))
            if count > 1 and last - first < _BLOCK:
                rest.setdefault(ranks, {})[name] = flat[first - start : last - start]
    total = add([_total(runs) for runs in own.values()] + ([_hash(found.text)] if rank == 0 else []))
    copies = [ranks for ranks in own if len(ranks) > 1]
    hashes = {ranks: _hash(_bits(rest.get(ranks, {}))) for ranks in copies}
    return [total, [[ranks, _total(own[ranks]), _total(following[ranks]), hashes[ranks]] for ranks in copies]]


def _flat(mine: Piece) -> tuple[Tensor, int]:
    """The elements that are here in C order, and the place of the first."""
    assert mine.values is not None
    return mine.values.resolve_conj().resolve_neg().reshape(-1), mine.first


def _portion(first: int, last: int, which: int, count: int, number: int) -> tuple[int, int]:
    """Which of the elements from `first` to `last` process `which` of `count` adds; small tensors go to one."""
    if last - first < _BLOCK:
        return (first, last) if number % count == which else (first, first)
    size = last - first
    return first + size * which // count, first + size * (which + 1) // count


def _settled(said: list[Any]) -> int | None:
    """The fingerprint from all processes' claims; None where copies differ."""
    copies: dict[tuple[int, ...], dict[int, tuple[int, int, int]]] = {}
    for rank, (_, claims) in enumerate(said):
        for ranks, own, following, rest in claims:
            copies.setdefault(tuple(ranks), {})[rank] = own, following, rest
    for ranks, by_rank in copies.items():
        for mine, other in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
            if by_rank[mine][1] != by_rank[other][0] or by_rank[mine][2] != by_rank[other][2]:
                return None
    return add(total for total, _ in said)


def _described(tree: object, parts: bool = False) -> tuple[bytes, dict[str, Tensor]]:
    """All of `tree` but the tensors' bits, as JSON, and the tensors by path."""
    describer = _Describer(parts)
    text = json.dumps(describer.describe(tree, "")).encode()
    return text, describer.tensors


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
            return _ELSEWHERE
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
