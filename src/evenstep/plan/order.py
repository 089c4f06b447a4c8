"""The order in which an epoch visits samples: (epoch, position) -> index, with random access and no list.

An order is plain data. Every process computes what it needs; nothing is communicated.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evenstep.errors import UsageError

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 12  # 4, 6 and 8 rounds fail neighbour tests
SORTED = 1024  # up to here an epoch is sorted by keyed words: exactly uniform, and cheaper than the network
_CHUNK = 1 << 20  # numbers at a time


class Order(Protocol):
    """What steps need of an order: its length, and the indices of some positions of an epoch."""

    @property
    def length(self) -> int:
        """Positions in an epoch."""
        ...

    @property
    def name(self) -> str:
        """What it is, for people; two orders with one name, seed and length are the same in epoch 0."""
        ...

    def digest(self, epoch: int) -> str:
        """Of the indices of `epoch`, as hex; "" where they follow from the name, the seed and the epoch."""
        ...

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The data set's indices at the positions [start, stop) of `epoch`, 0 <= start <= stop <= length."""
        ...


@dataclass(frozen=True, slots=True)
class Natural:
    """0, 1, 2, ... in every epoch."""

    length: int

    @property
    def name(self) -> str:
        return "not shuffled"

    def digest(self, epoch: int) -> str:
        return ""

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Another permutation of 0..length-1 in every epoch, in memory that does not grow with length (up to 2^62)."""

    length: int
    seed: int

    @property
    def name(self) -> str:
        return "shuffled"

    def digest(self, epoch: int) -> str:
        return ""

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        if self.length <= SORTED:
            return sorted_permutation(self.length, self.seed, epoch, "sorted")[start:stop]
        return _feistel(np.arange(start, stop, dtype=np.uint64), self.length, keyed_words(ROUNDS, self.seed, epoch))


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """The same given indices in every epoch."""

    sequence: Indices

    @property
    def length(self) -> int:
        return len(self.sequence)

    @property
    def name(self) -> str:
        return f"order= {self.digest(0)}"

    def digest(self, epoch: int) -> str:
        return array_digest(self.sequence)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return self.sequence[start:stop]


def fixed(sequence: object, samples: int, name: str = "order=") -> Fixed:
    """An order that visits the indices in `sequence` (1-d integers within 0..samples-1, repeats allowed)."""
    values = np.asarray(sequence)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        if values.size == 0:
            raise UsageError(f"{name} is empty, expected at least one index", do="give the indices to visit")
        raise UsageError(
            f"{name} has shape {values.shape} and type {values.dtype}, expected a 1-d sequence of integers",
            do="give indices of the data set, for example numpy.flatnonzero(mask) for a mask",
        )
    if len(values) == 0:
        raise UsageError(f"{name} is empty, expected at least one index", do="give the indices to visit")
    bad = np.flatnonzero((values < 0) | (values >= samples))
    if len(bad):
        raise UsageError(
            f"{name} has index {values[bad[0]]} at position {bad[0]}, expected 0..{samples - 1}",
            do=f"the data set has {samples} samples; count from 0",
        )
    return Fixed(values.astype(np.int64))


def keyed_words(count: int, *parts: int | str) -> Words:
    """`count` keyed 64-bit words, the same on every machine."""
    digest = hashlib.shake_256(repr(("order", *parts)).encode()).digest(8 * count)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def mix(words: Words) -> Words:
    """splitmix64's finaliser: each bit of the result depends on each bit of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def sorted_permutation(length: int, *parts: int | str) -> Indices:
    """A keyed permutation of 0..length-1, exactly uniform, as a list."""
    return np.argsort(keyed_words(length, *parts), kind="stable").astype(np.int64)


def array_digest(values: NDArray[Any]) -> str:
    """Of numbers, as hex: one for equal integers, or equal floats, whatever their width and the machine."""
    kind = "<i8" if values.dtype.kind in "biu" else "<f8"
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(values), _CHUNK):
        digest.update(values[start : start + _CHUNK].astype(kind).tobytes())
    return digest.hexdigest()


def _feistel(positions: Words, length: int, keys: Words) -> Indices:
    """A keyed permutation of 0..length-1, evaluated at `positions`.

    A position is a pair (left, right) in a grid of rows x columns, a little larger than `length`. Each round moves one
    of the two by a keyed hash of the other, so a round can be undone and the whole is a permutation of the grid.
    What lands outside of 0..length-1 goes round again until it is inside (cycle walking).
    """
    columns = math.isqrt(length - 1) + 1
    rows = -(-length // columns)
    grid = (np.uint64(rows), np.uint64(columns))
    result = positions
    walking: Words | slice = slice(None)
    while True:
        left, right = np.divmod(result[walking], grid[1])
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + mix(right ^ key) % grid[0]) % grid[0]
            else:
                right = (right + mix(left ^ key) % grid[1]) % grid[1]
        result[walking] = left * grid[1] + right
        outside = result >= length
        if not outside.any():
            return result.astype(np.int64)
        walking = outside.nonzero()[0].astype(np.uint64)
