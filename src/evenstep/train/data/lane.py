"""One lane of a stream: its records in keyed blocks, from any place on.

A block of records is read and permuted, so there is no buffer that a kill could lose: the place in a lane is how many
samples were taken of it. Where a source can say its state, the state at the beginning of a block is a mark to go on
from; else the lane is read again up to there.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from evenstep.errors import DataError, UsageError
from evenstep.plan.lanes import block_order
from evenstep.train.data.samples import digest
from evenstep.train.data.stream import Stream
from evenstep.train.randomness import generators_stand, key, seed_generators
from evenstep.train.state import decode_tree, encode_tree

BEGINNING = 16  # records of an epoch's beginning in a lane that are hashed
_HASHED = 4  # records at the beginning of any other block
_AT_ONCE = 32  # records, between two words about where a lane stands
_END, _NONE = object(), object()  # the end of a source; no record
_SAME = (
    "make(lane, lanes, epoch) must give the same samples whenever it is called: sort what it lists, draw from the "
    "global generators (which are keyed) or seed others from `epoch`, and read nothing that changes meanwhile"
)


@dataclass(frozen=True)
class Mark:
    """The beginning of a block: a hash of its first records ("": of a type unknown), and the source's state (None:
    it has none). `alike`: its records are all the same."""

    block: int
    hash: str
    state: str | None
    alike: bool = False

    def said(self) -> list[Any]:
        """In plain values."""
        return [self.block, self.hash, self.state, self.alike]


@dataclass(frozen=True)
class Again:
    """What it took to come to a place: records that were read again, and seconds."""

    records: int
    seconds: float


class Lane:
    """Lane `lane` of `lanes`, in one epoch, from sample number `start` on. `mark`: one to go on from, before `start`.

    DataError where the source does not give what it gave when `mark` was made, or raises.
    """

    def __init__(
        self,
        stream: Stream,
        lane: int,
        lanes: int,
        epoch: int,
        *,
        seed: int,
        shuffle: bool,
        start: int = 0,
        mark: Mark | None = None,
        at: MutableSequence[int] | None = None,
    ) -> None:
        """`at[0]` becomes -2 - n while record n is read, or one of the next few."""
        self._stream, self._lane, self._lanes, self._epoch = stream, lane, lanes, epoch
        self._seed, self._shuffle = seed, shuffle
        self._at: MutableSequence[int] = [-1] if at is None else at
        self._keyed = not stream.source.draws_nothing
        self._stood: object = None  # where the generators stood when they were keyed, while it is looked for draws
        self._watches = stream.source.reads_ahead
        self._drew = False  # for records that may be asked for later
        self._ahead: Any = _NONE  # the next record, where it was read to know whether there is one
        self._state: str | None = None  # of the source, at the beginning of the block that it is in
        self._first = 0  # the number of this block's first record
        self._records: list[Any] = []  # of this block; None: taken
        self._order: list[int] = []
        self._taken = 0  # of this block
        self.mark: Mark | None = None  # of this block
        self.beginning: Mark | None = None  # of block 0, if that was read
        self.again: Again | None = None
        known = mark if mark is not None and mark.block <= start // stream.block else None
        self._open(known)
        if start:
            began, read = time.monotonic(), self._read
            self._skip(start, known)
            self.again = Again(self._read - read, time.monotonic() - began)

    @property
    def position(self) -> int:
        """How many samples were taken."""
        return self._first + self._taken

    def take(self, count: int) -> Iterator[Any]:
        """The next samples, at most `count`."""
        while count:
            offset = self._at[0]  # of the sample
            if not self.more():
                return
            if self._taken == len(self._order):
                self._next_block()
            self._at[0] = offset
            places = self._order[self._taken : self._taken + count]
            count -= len(places)
            for place in places:
                record, self._records[place] = self._records[place], None
                self._taken += 1
                yield self._sample(record, self._first + place)

    def more(self) -> bool:
        """Whether there is another sample. It may have to read a record for that."""
        return self._taken < len(self._order) or self._peek() is not _END

    def close(self) -> None:
        """Close what the source has open."""
        for opened in (self._iterator, self._made):
            close = getattr(opened, "close", None)
            if callable(close):
                close()

    # ---- blocks

    def _next_block(self) -> None:
        """Reads the block at whose beginning the source stands."""
        self._first, size = self._next, self._stream.block
        records: list[Any] = []
        digests: list[str] = []
        while len(records) < min(size, _hashed(self._first)) and self._peek() is not _END:
            records.append(self._pop())
            digests.append(digest(records[-1]))
        if self._ahead is _NONE:
            self._read_on(records, size)
        self._refuse_same_object(records[: len(digests)], digests)
        self.mark = _mark(self._first // size, digests, self._state)
        if not self._first:
            self.beginning = self.mark
        self._records, self._taken = records, 0
        if self._shuffle:
            block = self._first // size
            order = block_order(len(records), seed=self._seed, epoch=self._epoch, lane=self._lane, block=block)
            self._order = order.tolist()
        else:
            self._order = list(range(len(records)))

    def _read_on(self, records: list[Any], size: int) -> None:
        """Reads records, up to `size` of them: what `_peek` and `_pop` would do, faster."""
        while (before := len(records)) < size:
            wanted = min(size - before, _AT_ONCE)
            self._at[0] = -2 - self._read
            try:
                records.extend(islice(self._iterator, wanted))
                self._notice_draws()
            finally:
                self._read += len(records) - before
                self._at[0] = -2 - self._read
            if len(records) - before < wanted:
                self._ahead = _END
                return

    def _skip(self, start: int, mark: Mark | None) -> None:
        """From where the source stands to sample number `start`, and a look at what is there where `mark` was made."""
        size = self._stream.block
        digests: list[str] = []
        while self._next < start // size * size and self._peek() is not _END:
            block, within = divmod(self._next, size)
            record = self._pop()
            if mark is not None and block == mark.block and within < _hashed(block):
                digests.append(digest(record))
        if digests and mark is not None:
            self._compare(mark, _mark(mark.block, digests, None))
        self._first = self._next
        if start % size and self._peek() is not _END:
            self._next_block()
            if mark is not None and self.mark is not None and self.mark.block == mark.block:
                self._compare(mark, self.mark)
            self._taken = min(start - self._first, len(self._order))
            for place in self._order[: self._taken]:
                self._records[place] = None
        if self.position < start:
            raise DataError(
                f"lane {self._lane} of the stream has only {self.position} samples in epoch {self._epoch}, and {start} "
                "of it were taken before",
                do=_SAME,
            )

    def _compare(self, before: Mark, now: Mark) -> None:
        if before.hash and now.hash and before.hash != now.hash:
            raise DataError(
                f"lane {self._lane} of the stream does not give the same samples again: block {now.block} of epoch "
                f"{self._epoch} has the hash {now.hash}, and had {before.hash}",
                do=_SAME,
            )

    def _sample(self, record: Any, number: int) -> Any:
        if self._stream.transform is None:
            return record
        seed_generators(key(self._seed, "sample", self._epoch, self._lane, number))
        return self._stream.transform(record)

    def _refuse_same_object(self, records: list[Any], digests: list[str]) -> None:
        if len(records) > 1 and len(set(map(id, records))) < len(records) and digests[0] != digest(records[0]):
            raise UsageError(
                f"lane {self._lane} of the stream hands out one object again and again, and changes it in between",
                do="yield a new object for each record: records are kept until their block is shuffled",
            )

    # ---- the source

    @property
    def _next(self) -> int:
        """The number of the next record."""
        return self._read - (self._ahead is not _NONE and self._ahead is not _END)

    def _open(self, mark: Mark | None) -> None:
        """The source, at the beginning or at a mark."""
        seed_generators(key(self._seed, "make", self._epoch))  # alike in all lanes: it may shuffle a list of files
        made: Any = self._stream.source.open(self._lane, self._lanes, self._epoch)
        self._seeks = all(callable(getattr(made, name, None)) for name in ("state_dict", "load_state_dict"))
        self._read = 0  # records
        if self._seeks and mark is not None and mark.state is not None:
            made.load_state_dict(decode_tree(base64.b64decode(mark.state)))
            self._read, self._state = mark.block * self._stream.block, mark.state
        try:
            if isinstance(made, (str, bytes)):
                raise TypeError("its letters are no records")
            self._iterator = iter(made)
        except TypeError as error:
            raise UsageError(
                f"make(lane, lanes, epoch) returned {type(made).__name__}, expected an iterator over records",
                do="return a generator, or iter(...) of what holds the records",
            ) from error
        self._made, self._opened_at = made, self._read

    def _peek(self) -> Any:
        """The next record, which stays the next; _END at the end."""
        if self._ahead is _NONE:
            if self._read % self._stream.block == 0 and self._read != self._opened_at:
                self._state = self._said_state()
            if self._keyed:
                self._key_generators(*divmod(self._read, self._stream.block))
            self._at[0] = -2 - self._read
            self._ahead = next(self._iterator, _END)
            self._notice_draws()
            self._read += self._ahead is not _END
        return self._ahead

    def _key_generators(self, block: int, within: int) -> None:
        """Before a record is read. A block is read in one go, but for its first record: that one may be read before
        others want to know whether there is more."""
        if block == within == 0:
            # Alike in all lanes: the beginning of a generator, which runs now, may shuffle a list of files.
            seed_generators(key(self._seed, "record", self._epoch))
        elif within < 2:
            seed_generators(key(self._seed, "record", self._epoch, self._lane, block, within))
        if self._watches and not self._drew and within < 2:
            self._stood = generators_stand()

    def _notice_draws(self) -> None:
        if self._watches and not self._drew:
            self._drew = generators_stand() != self._stood

    def _pop(self) -> Any:
        record, self._ahead = self._ahead, _NONE
        return record

    def _said_state(self) -> str | None:
        if not self._seeks or self._drew:
            return None
        try:
            return base64.b64encode(encode_tree(self._made.state_dict())).decode()
        except UsageError:
            return None  # of types that cannot be kept: the lane is read again


def _hashed(first: int) -> int:
    """How many records of a block are hashed."""
    return _HASHED if first else BEGINNING


def _mark(block: int, digests: list[str], state: str | None) -> Mark:
    known = all(digests)
    found = hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest() if known else ""
    return Mark(block, found, state, len(set(digests)) < 2)
