"""Draws by weight: (epoch, position) -> index, the same on every machine, whoever asks.

Only operations that IEEE 754 rounds in one way are used (no logarithm of a library, no sum in an order of its own), and
sorts that keep ties in order, so that processors of different kinds draw alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.errors import UsageError
from evenstep.plan.order import Indices, Words, array_digest, keyed_words, mix

Numbers = NDArray[np.float64]

_SMALL = -256  # as an exponent of 2
_CHUNK = 1 << 20  # samples at a time: what is computed on the way takes little memory


@dataclass(frozen=True, slots=True, eq=False)
class WithReplacement:
    """Index i at a position with probability weights[i] / sum(weights): the running sums inverted at a keyed point."""

    bounds: Numbers  # running sums of the weights
    length: int
    seed: int
    weights: str  # their digest

    @property
    def name(self) -> str:
        return f"weights= {self.weights}, {self.length} draws with replacement"

    def digest(self, epoch: int) -> str:
        return ""

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        words = _hashed(np.arange(start, stop, dtype=np.uint64), keyed_words(2, self.seed, epoch, "weighted"))
        points = (words >> np.uint64(11)) * (self.bounds[-1] / 2.0**53)
        found = np.searchsorted(self.bounds, points, side="right")
        # A point can round up to the total; it belongs to the last index that has any weight.
        last = np.searchsorted(self.bounds, self.bounds[-1], side="left")
        drawn: Indices = np.minimum(found, last).astype(np.int64)
        return drawn


class WithoutReplacement:
    """Each index once at most; the next one is i with probability weights[i] / sum(weights of those not drawn yet).

    By exponential keys: the indices in order of E[i] / weights[i], E[i] keyed and exponentially distributed (Efraimidis
    and Spirakis, Weighted random sampling with a reservoir, 2006). An epoch is drawn as a whole, and one is kept.
    """

    def __init__(self, weights: Numbers, length: int, seed: int) -> None:
        """`weights` are positive or 0; an index with 0 is never drawn. `length`: at most how many are positive."""
        self.length, self._seed, self._weights = length, seed, _scaled(weights)
        self._digest = array_digest(weights)
        positive = weights > 0
        self._able = None if positive.all() else np.flatnonzero(positive)
        self._kept: tuple[int, Indices] | None = None

    @property
    def name(self) -> str:
        return f"weights= {self._digest}, {self.length} draws without replacement"

    def digest(self, epoch: int) -> str:
        return ""

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        if self._kept is None or self._kept[0] != epoch:
            self._kept = None  # before the next one takes memory
            self._kept = epoch, self._drawn(epoch)
        return self._kept[1][start:stop]

    def _drawn(self, epoch: int) -> Indices:
        times = self._times(keyed_words(2, self._seed, epoch, "without replacement"))
        if self.length < len(times):  # what a partition does with ties is its own affair: only its number is taken
            latest = np.partition(times, self.length - 1)[self.length - 1]
            early = np.flatnonzero(times <= latest)
            chosen = early[np.argsort(times[early], kind="stable")[: self.length]]
        else:
            chosen = np.argsort(times, kind="stable")
        return chosen if self._able is None else self._able[chosen]

    def _times(self, key: Words) -> Numbers:
        """E[i] / weights[i] for each i that can be drawn."""
        count = len(self._weights) if self._able is None else len(self._able)
        times = np.empty(count)
        for start in range(0, count, _CHUNK):
            part = slice(start, min(start + _CHUNK, count))
            able = np.arange(part.start, part.stop) if self._able is None else self._able[part]
            with np.errstate(over="ignore"):  # a weight of nearly 0: after all others
                times[part] = _exponential(_hashed(able.astype(np.uint64), key)) / self._weights[able]
        return times


def weighted(
    weights: object, samples: int, seed: int, draws: int | None = None, replacement: bool = True
) -> WithReplacement | WithoutReplacement:
    """An order that draws by `weights`: 1-d, one non-negative number a sample.

    `draws` positions an epoch, by default as many as there are samples (without replacement: that have a weight).
    """
    values = _checked(weights, samples)
    if not replacement:
        able = int(np.count_nonzero(values))
        if draws is not None and draws > able:
            raise UsageError(
                f"num_samples={draws} without replacement, but only {able} samples have a weight above 0",
                do=f"give num_samples={able} or less, or replacement=True",
            )
        return WithoutReplacement(values, able if draws is None else draws, seed)
    bounds = np.cumsum(_scaled(values))
    return WithReplacement(bounds, samples if draws is None else draws, seed, array_digest(values))


def _checked(weights: object, samples: int) -> Numbers:
    try:
        given = np.asarray(weights)
        if given.dtype.kind not in "biufO":
            raise TypeError(given.dtype)
        values = np.array(given, dtype=np.float64)  # a copy: the script may change its own
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"weights= is {type(weights).__name__}, expected numbers, one for each of {samples} samples",
            do="give a list, array or tensor of non-negative numbers",
        ) from error
    if values.shape != (samples,):
        raise UsageError(
            f"weights= has shape {values.shape}, expected ({samples},): one number for each sample",
            do="compute one weight for each index of the data set",
        )
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        raise UsageError(
            f"weights[{bad[0]}] is {values[bad[0]]}, expected a finite number of at least 0"
            + (f" ({len(bad)} such weights)" if len(bad) > 1 else ""),
            do="give a weight of 0 to samples that must not be drawn",
        )
    total = np.cumsum(values)[-1]
    if not 0 < total < math.inf:
        raise UsageError(
            f"the sum of weights= is {total}, expected a positive finite number",
            do="give at least one sample a weight above 0",
        )
    return values


def _scaled(weights: Numbers) -> Numbers:
    """Very small weights times a power of two, which changes no draw: quotients of them would be 0 or infinite."""
    exponent = int(np.frexp(weights.max())[1])
    return np.ldexp(weights, -exponent) if exponent < _SMALL else weights


def _hashed(numbers: Words, key: Words) -> Words:
    return mix(mix(numbers + key[0]) ^ key[1])


def _exponential(words: Words) -> Numbers:
    """-log(u), u = (the upper 52 bits + 1/2) / 2^52, from additions, multiplications and divisions alone.

    With u = m * 2^e, 1/sqrt(2) <= m < sqrt(2), and s = (m - 1) / (m + 1): log(m) = 2 (s + s^3/3 + s^5/5 + ...).
    """
    m, e = np.frexp(((words >> np.uint64(12)) + 0.5) * 2.0**-52)
    small = m < math.sqrt(0.5)
    m, e = np.where(small, 2 * m, m), e - small
    s = (m - 1) / (m + 1)
    square = s * s  # at most 0.0295
    series = np.full_like(s, 1 / 23)
    for odd in range(21, 0, -2):
        series = series * square + 1 / odd
    result: Numbers = -(e * math.log(2) + 2 * s * series)
    return result
