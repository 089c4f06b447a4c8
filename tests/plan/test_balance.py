"""Neighbouring parts of about equal cost."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import UsageError
from evenstep.plan.balance import balance


def cost_of(costs: list[float], parts: list[range]) -> tuple[float, float]:
    """(the largest part's cost, the sum of squares)."""
    sums = [sum(costs[unit] for unit in part) for part in parts]
    return max(sums), sum(s * s for s in sums)


def every_cut(units: int, parts: int) -> list[list[range]]:
    return [
        [range(a, b) for a, b in itertools.pairwise((0, *inner, units))]
        for inner in itertools.combinations(range(1, units), parts - 1)
    ]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_cut_is_better(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    found = balance(costs, parts)
    assert len(found) == parts
    assert all(found)
    assert [unit for part in found for unit in part] == list(range(len(costs)))
    assert cost_of(costs, found) == min(cost_of(costs, cut) for cut in every_cut(len(costs), parts))


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=9), st.data())
def test_costs_that_are_no_whole_numbers(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    found = balance(costs, parts)
    assert [unit for part in found for unit in part] == list(range(len(costs)))
    assert all(found)
    best = min(cost_of(costs, cut)[0] for cut in every_cut(len(costs), parts))
    assert cost_of(costs, found)[0] <= best * (1 + 1e-9) + 1e-3  # prefix sums round
    assert balance(costs, parts) == found


def test_examples() -> None:
    assert balance([1, 1, 1, 1], 2) == [range(2), range(2, 4)]
    assert balance([10, 1, 1, 1, 1], 3) == [range(1), range(1, 3), range(3, 5)]
    assert balance([0, 0, 0], 3) == [range(1), range(1, 2), range(2, 3)]


def test_many_units() -> None:
    began = time.process_time()
    found = balance([1.0 + unit % 7 for unit in range(2000)], 16)
    assert time.process_time() - began < 5
    assert max(map(len, found)) - min(map(len, found)) < 5


def test_refused() -> None:
    with pytest.raises(UsageError, match="2 units cannot be cut into 3 parts"):
        balance([1, 2], 3)
    with pytest.raises(UsageError, match="0 parts"):
        balance([1, 2], 0)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="unit 1 has the cost"):
            balance([1, bad], 1)
