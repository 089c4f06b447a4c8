"""Tensors that lie on several processes, brought to rank 0 one part at a time: nobody ever holds them all."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.train.meeting import Meeting, lost_contact
from evenstep.train.pieces import Piece, Span, holders, piece
from evenstep.train.state import ELSEWHERE_NODE
from evenstep.train.tensor_file import Entry, in_file_order, part_sizes, raw_parts

_MISSING = object()

T = TypeVar("T")


class Gather:
    """The tensors of a file, and which process has which elements of each. All processes make it together."""

    def __init__(self, meeting: Meeting, tensors: Mapping[str, Tensor], said: list[dict[str, list[Any]]]) -> None:
        """`tensors`: those of this process, by name; `said`: what each process has `listed`, by rank."""
        self._meeting, self._tensors = meeting, tensors
        self.entries: dict[str, Entry] = {}
        self._whole: dict[str, tuple[int, int]] = {}  # elements, bytes of one
        self._spans: dict[str, tuple[Span, ...]] = {}
        for listing in said:
            for name, (dtype, shape, numel, size, _) in listing.items():
                self.entries.setdefault(name, Entry(getattr(torch, dtype), tuple(shape)))
                self._whole.setdefault(name, (numel, size))
        for name in self.entries:
            self._spans[name] = tuple(_span(listing.get(name), self._whole[name]) for listing in said)

    def data(self, names: Iterable[str]) -> Iterator[memoryview]:
        """The bytes of the tensors `names` as a file has them, on rank 0; the others send what they have of them and
        get nothing. Rank 0 must take them all, whatever becomes of them, or the others wait for ever. UsageError on
        every process, before anything is sent, for a tensor that none has."""
        wanted = in_file_order({name: self.entries[name] for name in names})
        for name in wanted:
            for _, _, ranks in self._parts(name):
                if not ranks:
                    raise UsageError(
                        f"no process has the values of {name}: it lies on the meta device",
                        do="give it values (to_empty, load_state_dict) before run.prepare",
                    )
        return self._data(wanted)

    def _data(self, names: list[str]) -> Iterator[memoryview]:
        for name in names:
            mine: Piece | None = None
            for first, last, ranks in self._parts(name):
                source = ranks[0]
                if source == self._meeting.rank:
                    mine = mine or piece(self._tensors[name])
                    yield from self._mine(mine, first, last)
                elif self._meeting.rank == 0:
                    yield from self._received(last - first, self._whole[name][1], source)

    def _parts(self, name: str) -> list[tuple[int, int, tuple[int, ...]]]:
        return holders(self._whole[name][0], self._spans[name])

    def _mine(self, mine: Piece, first: int, last: int) -> Iterator[memoryview]:
        assert mine.values is not None
        for part in raw_parts(mine.values, first - mine.first, last - mine.first):
            if self._meeting.rank == 0:
                yield part
            else:
                with self._contact():
                    dist.send(torch.frombuffer(part, dtype=torch.uint8), group=self._meeting.group, group_dst=0)

    def _received(self, elements: int, size: int, source: int) -> Iterator[memoryview]:
        for count in part_sizes(elements, size):
            buffer = torch.empty(count * size, dtype=torch.uint8)
            with self._contact():
                dist.recv(buffer, group=self._meeting.group, group_src=source)
            data: Any = buffer.numpy()
            yield memoryview(data)

    @contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise lost_contact(self._meeting.rank, error, "while tensors were sent to rank 0") from error


def meet(meeting: Meeting, when: str, text: bytes, tensors: Mapping[str, Tensor]) -> tuple[bytes, Gather]:
    """What all processes' JSON texts (see `encode_parts`) come to, and their tensors.

    The text is rank 0's, with what it does not know from the first that does. The same on every process."""
    listing = {name: _listed(tensor, name) for name, tensor in tensors.items()}
    short = zlib.compress(text)
    said = zlib.compress(json.dumps(listing).encode())
    answers = meeting.exchange(when, len(short).to_bytes(8, "little") + short + said, site="")
    texts: dict[bytes, None] = {}
    listings = []
    for answer in answers:
        end = 8 + int.from_bytes(answer[:8], "little")
        texts[answer[8:end]] = None  # what most processes say alike is read once
        listings.append(json.loads(zlib.decompress(answer[end:])))
    documents = [json.loads(zlib.decompress(one)) for one in texts]
    return json.dumps(merged(documents), separators=(",", ":")).encode(), Gather(meeting, tensors, listings)


def on_rank_0(meeting: Meeting, data: Iterator[memoryview], write: Callable[[Iterator[memoryview]], T]) -> T | None:
    """`write(data)` on rank 0, where `data` is what `Gather.data` gives; the others send. None on them.

    An error of `write`, such as a full disk, is raised when all has been sent."""
    try:
        return write(data) if meeting.rank == 0 else None
    finally:
        for _ in data:
            pass


def merged(nodes: list[Any]) -> Any:
    """One JSON tree of `encode_parts` from those of several processes: the first that knows is right."""
    found = _merged(nodes)
    return None if found is _MISSING else found


def _merged(nodes: list[Any]) -> Any:
    known = [node for node in nodes if node is not _MISSING and node != ELSEWHERE_NODE]
    if not known:
        return _MISSING
    base = known[0]
    if isinstance(base, list):
        lists = [node for node in known if isinstance(node, list) and len(node) == len(base)]
        return [_or_none(_merged([node[i] for node in lists])) for i in range(len(base))]
    if not isinstance(base, dict):
        return base
    alike = [node for node in known if isinstance(node, dict) and node.keys() == base.keys()]
    return {tag: _content(tag, [node[tag] for node in alike]) for tag in base}


def _content(tag: str, contents: list[Any]) -> Any:
    """What is under the tag of a container, from several processes."""
    base = contents[0]
    if tag in ("v", "tree", "tuple", "metadata"):
        return _or_none(_merged(contents))
    if tag == "dict":
        return _present({key: [content.get(key, _MISSING) for content in contents] for key in base})
    if tag in ("items", "ordered"):
        by_key = [{json.dumps(key): item for key, item in content} for content in contents]
        keys = {json.dumps(key): key for key, _ in base}
        found = _present({text: [content.get(text, _MISSING) for content in by_key] for text in keys})
        return [[keys[text], item] for text, item in found.items()]
    return base


def _present(items: dict[str, list[Any]]) -> dict[str, Any]:
    found = {key: _merged(nodes) for key, nodes in items.items()}
    return {key: item for key, item in found.items() if item is not _MISSING}


def _or_none(node: Any) -> Any:
    return None if node is _MISSING else node


def names_in(node: Any) -> Iterator[str]:
    """The names of the tensors and arrays that a JSON tree speaks of."""
    if isinstance(node, list):
        for item in node:
            yield from names_in(item)
    elif isinstance(node, dict):
        tag = next(iter(node), "")
        if tag in ("tensor", "array"):
            yield node[tag]
        elif tag == "dict":
            for item in node[tag].values():
                yield from names_in(item)
        else:
            for item in node.values():
                yield from names_in(item)


def _listed(tensor: Tensor, name: str) -> list[Any]:
    """What the others need to know of a tensor: how it is written, elements, bytes of one, which of them are here."""
    entry, here = Entry.of(tensor), piece(tensor, name)
    size = tensor.dtype.itemsize
    return [str(entry.dtype).removeprefix("torch."), entry.shape, tensor.numel(), size, here.span]


def _span(listed: list[Any] | None, whole: tuple[int, int]) -> Span:
    if listed is None or listed[4] is None or tuple(listed[2:4]) != whole:
        return None
    first, last = listed[4]
    return first, last
