"""Neighbouring units in parts of about equal cost: which layers of a model lie on which device, or in which stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from evenstep.errors import UsageError


def balance(costs: Sequence[float], parts: int) -> list[range]:
    """Cuts units 0..len(costs)-1 into `parts` neighbouring ranges, none empty, with the smallest maximal cost.

    Of several such cuts it is one with the smallest sum of squared costs, so the other parts are even too. UsageError
    for fewer units than parts, and for a cost that is negative or not finite.
    """
    units = len(costs)
    if parts < 1:
        raise UsageError(f"got {parts} parts, expected 1 or more")
    if units < parts:
        raise UsageError(f"{units} units cannot be cut into {parts} parts", do=f"ask for at most {units} parts")
    for unit, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise UsageError(f"unit {unit} has the cost {cost}, expected a finite number that is not negative")
    before = [0, *itertools.accumulate(costs)]  # the cost of all units before a place
    limit = _smallest_maximum(before, parts)
    return _evenest(before, parts, limit)


def _smallest_maximum(before: Sequence[float], parts: int) -> float:
    """The smallest cost that the largest of `parts` parts can have."""
    units = len(before) - 1
    largest = list(before)  # largest[stop]: of units 0..stop-1 in one part, then in two, ...
    for part in range(2, parts + 1):
        row = [math.inf] * (units + 1)
        cut = part - 1
        for stop in range(part, units + 1):
            # A later cut makes the parts before it larger and the last one smaller; where they cross moves forward.
            while cut + 1 < stop and max(largest[cut + 1], before[stop] - before[cut + 1]) <= max(
                largest[cut], before[stop] - before[cut]
            ):
                cut += 1
            row[stop] = max(largest[cut], before[stop] - before[cut])
        largest = row
    return largest[units]


def _evenest(before: Sequence[float], parts: int, limit: float) -> list[range]:
    """The cut with the smallest sum of squares in which no part costs more than `limit`."""
    units = len(before) - 1
    squares = [0.0] + [math.inf] * units  # squares[stop]: the least for units 0..stop-1 in the parts so far
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        row, chosen = [math.inf] * (units + 1), [part - 1] * (units + 1)
        for stop in range(part, units + 1):
            for start in range(stop - 1, part - 2, -1):
                cost = before[stop] - before[start]
                if cost > limit:
                    break
                if squares[start] + cost * cost < row[stop]:
                    row[stop], chosen[stop] = squares[start] + cost * cost, start
        squares = row
        cuts.append(chosen)
    ranges = []
    stop = units
    for chosen in reversed(cuts):
        ranges.append(range(chosen[stop], stop))
        stop = chosen[stop]
    return ranges[::-1]
