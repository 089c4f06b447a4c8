"""An IterableDataset of Hugging Face's `datasets` as a stream: its shards are what files are elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from evenstep.errors import UsageError
from evenstep.plan.lanes import pieces
from evenstep.train.data.stream_files import share_out

_BY_LANE = {
    "TakeExamplesIterable": ".take()",
    "SkipExamplesIterable": ".skip()",
    "CyclingMultiSourcesExamplesIterable": "interleave_datasets",
    "RandomlyCyclingMultiSourcesExamplesIterable": "interleave_datasets",
}


@dataclass(frozen=True)
class HuggingFace:
    """`data` in shards: a lane reads some of them, or where there are fewer, every k-th record of one."""

    data: Any
    share: bool
    draws_nothing = False

    def __post_init__(self) -> None:
        if self.data._distributed is not None:
            raise UsageError(
                "the data set is split by node (split_dataset_by_node): this process has a part of it only",
                do="leave that out, and give every process the whole: evenstep chooses what each one reads",
            )

    def about(self) -> str:
        columns = self.data.column_names
        named = "" if columns is None else f", columns {', '.join(columns)}"
        return f"Hugging Face data set of {self.data.num_shards} shards{named}"

    def parts(self) -> list[str]:
        return []

    @property
    def reads_ahead(self) -> bool:
        return any(getattr(step, "batched", False) for step in _chain(self.data._ex_iterable))

    def notes(self, lanes: int) -> list[str]:
        said = share_out(self.data.num_shards, lanes, self.share, "shards")
        own = sorted(
            {_BY_LANE[kind] for step in _chain(self.data._ex_iterable) if (kind := type(step).__name__) in _BY_LANE}
        )
        if own:
            said.append(
                f"each lane does {' and '.join(own)} by itself, over its shards, with its part of the number: other "
                "records than those of the data set as one"
            )
        if _has_buffer(self.data._ex_iterable):
            said.append(
                "the data set has a shuffle buffer, which cannot be sought: a resume reads each lane again from the "
                "beginning of the epoch. Without .shuffle() it goes on at once; evenstep shuffles in blocks itself"
            )
        return said

    def open(self, lane: int, lanes: int, epoch: int) -> Iterable[Any]:
        self.notes(lanes)
        shards = self.data.num_shards
        if shards >= lanes:
            mine, part, parts = self.data.shard(num_shards=lanes, index=lane, contiguous=False), 0, 1
        else:
            (piece,) = pieces(shards, lanes, lane)
            mine, part, parts = self.data.shard(num_shards=shards, index=piece.file), piece.part, piece.parts
        mine.set_epoch(epoch)
        if _has_buffer(mine._ex_iterable):
            return _every(mine, part, parts)
        return mine if parts == 1 else Every(mine, part, parts)


def _every(records: Iterable[Any], part: int, parts: int) -> Iterator[Any]:
    return (record for number, record in enumerate(records) if number % parts == part)


class Every(Iterator[Any]):
    """Record number `part`, part + `parts`, ... of a data set; goes on from its state."""

    def __init__(self, data: Any, part: int, parts: int) -> None:
        self._data, self._part, self._parts = data, part, parts
        self._number = 0
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._data)
        while True:
            record = next(self._iterator)
            self._number += 1
            if (self._number - 1) % self._parts == self._part:
                return record

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number, "data": self._data.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._number = state["number"]
        self._data.load_state_dict(state["data"])
        self._iterator = None


def _has_buffer(examples: Any) -> bool:
    """Whether a shuffle buffer is anywhere in the chain of what makes the examples."""
    return any(type(step).__name__ == "BufferShuffledExamplesIterable" for step in _chain(examples))


def _chain(examples: Any) -> Iterator[Any]:
    """All that makes the examples, step by step."""
    yield examples
    for inner in (getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())):
        if inner is not None:
            yield from _chain(inner)
