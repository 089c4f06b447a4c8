"""Which micro-batch sizes a global batch can be cut into, and the search for the largest that fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence


def micro_batch_sizes(batch: int, workers: int, *, several: bool = False, last: int = 0) -> list[int]:
    """The sizes that cut `batch` evenly into at least `workers` micro-batches, from small to large.

    For each number V of micro-batches the smallest size that makes V of them, so only the last one is smaller, by as
    little as can be. `workers` sets the largest size and nothing else. Empty where there are more workers than samples.
    With `several` no micro-batch has a single sample, if that can be had, nor one of a last step of `last` samples.
    """
    sizes = set()
    parts = 1
    while parts <= batch:
        size = -(-batch // parts)
        if -(-batch // size) >= workers:
            sizes.add(size)
        # The next number of parts that gives a smaller size.
        parts = max(parts + 1, -(-batch // (size - 1))) if size > 1 else batch + 1
    if several:
        sizes = {size for size in sizes if size > 1 and 1 not in (batch % size, last % size)} or sizes
    return sorted(sizes)


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of `sizes` (from small to large) that fits, or None. A larger one must fit in no case that a smaller
    one does not. Never tries one of more than twice the largest that has fitted, unless it is the next of all."""
    best, at, above = -1, 0, len(sizes)
    while best + 1 < above:
        if fits(sizes[at]):
            best = at
        else:
            above = at
        at = max(best + 1, bisect_right(sizes, 2 * sizes[best]) - 1) if above == len(sizes) else (best + above) // 2
    return None if best < 0 else sizes[best]
