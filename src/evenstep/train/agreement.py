"""Whether processes hold the same, and the fingerprint of what they hold together.

Every process may hold all of the state, as replicas do, or parts of it: rows of tensors, or some of the tensors.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.train.fingerprint import (
    BLOCK,
    ELSEWHERE_NODE,
    Run,
    add,
    bits_of,
    described,
    fingerprint,
    hash_of,
    part_of,
    runs,
    tensor_key,
    to_hex,
    total,
)
from evenstep.train.pieces import Elsewhere, Piece, Span, holders, is_whole, piece
from evenstep.train.plain_values import join_path

_SHARE = 24  # bytes of a Share; what has parts says more
ELSEWHERE_MARK = "elsewhere"  # what `by_path` says of what lies on other processes
_PLACES = "\0"  # between a path and the places of elements


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
    text, tensors = described(tree, parts=True)
    whole = all(map(is_whole, tensors.values())) and json.dumps(ELSEWHERE_NODE).encode() not in text
    mine = _share_of(text, tensors, rank, world_size).to_bytes() if whole else _in_parts(text, tensors)
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
    return _share_of(*described(tree), rank, world_size)


def _share_of(text: bytes, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> Share:
    part = part_of(text, tensors, rank, world_size)
    if world_size == 1:
        return Share(part, part, 0)
    following = part_of(text, tensors, (rank + 1) % world_size, world_size)
    return Share(part, following, hash_of(text + bits_of({n: t for n, t in tensors.items() if 0 < t.numel() < BLOCK})))


def agree(shares: Sequence[Share]) -> bool:
    """Whether the processes hold the same tree, as far as their shares (by rank) tell.

    A process shows whose tree is another in the elements of its own part or the next one's, or in what every process
    reads whole: so does whoever trains apart from the others. A few elements of a large tensor may not show.
    """
    following = (*shares[1:], shares[0])
    return all(
        mine.next == other.part and mine.rest == other.rest for mine, other in zip(shares, following, strict=True)
    )


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
    known = [node for node in nodes if node != ELSEWHERE_NODE]
    if not known:
        return ELSEWHERE_NODE
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
        if item != ELSEWHERE_NODE:  # else nobody has any: a parameter that never got a gradient
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
    own: dict[tuple[int, ...], list[Run]] = {}
    following: dict[tuple[int, ...], list[Run]] = {}
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
            for sums, which in ((own, place), (following, (place + 1) % count)):
                if sums is following and count == 1:
                    continue
                low, high = _portion(first, last, which, count, number)
                sums.setdefault(ranks, []).extend(runs(key, flat[low - start : high - start], low))
            if count > 1 and last - first < BLOCK:
                rest.setdefault(ranks, {})[name] = flat[first - start : last - start]
    mine_all = add([total(sums) for sums in own.values()] + ([hash_of(found.text)] if rank == 0 else []))
    copies = [ranks for ranks in own if len(ranks) > 1]
    hashes = {ranks: hash_of(bits_of(rest.get(ranks, {}))) for ranks in copies}
    return [mine_all, [[ranks, total(own[ranks]), total(following[ranks]), hashes[ranks]] for ranks in copies]]


def _flat(mine: Piece) -> tuple[Tensor, int]:
    """The elements that are here in C order, and the place of the first."""
    assert mine.values is not None
    return mine.values.resolve_conj().resolve_neg().reshape(-1), mine.first


def _portion(first: int, last: int, which: int, count: int, number: int) -> tuple[int, int]:
    """Which of the elements from `first` to `last` process `which` of `count` adds; small tensors go to one."""
    if last - first < BLOCK:
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
    return add(part for part, _ in said)


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
                found[f"{path}{_PLACES}{here.span[0]}:{here.span[1]}"] = to_hex(total(runs(key, flat, first)))
        else:
            value_hash = fingerprint({path: value})
            found[path] = to_hex(value_hash + int(found.get(path, "0"), 16))  # two paths can be spelled alike
    return found


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
