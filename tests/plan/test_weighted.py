"""Draws by weight: as often as the weights say, the same on every machine, and any part alone."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.errors import UsageError
from evenstep.plan.weighted import WithReplacement, _exponential, weighted
from tests.plan.test_order import Z, z_chi_square


def test_the_draws_are_the_same_on_every_machine_and_for_ever() -> None:
    assert weighted([1, 2, 3, 4], 4, 7).indices(3, 0, 4).tolist() == [2, 3, 3, 2]
    once = weighted([1, 2, 3, 4, 0, 5, 6], 7, 7, replacement=False)
    assert [once.indices(epoch, 0, 6).tolist() for epoch in (0, 1)] == [[6, 3, 2, 1, 5, 0], [2, 3, 6, 5, 0, 1]]
    large = weighted(1.0 + np.arange(10**5) % 7, 10**5, 7, 1000, replacement=False)
    assert large.indices(2, 996, 1000).tolist() == [6651, 91004, 3676, 9163]


@pytest.mark.parametrize("n", [3, 50, 3000])
def test_weights_are_how_often_an_index_is_drawn(n: int) -> None:
    weights = np.arange(1, n + 1, dtype=float) ** 1.5
    weights[n // 2] = 0
    order = weighted(weights.tolist(), n, seed=3, draws=20_000)
    drawn = np.concatenate([order.indices(epoch, 0, order.length) for epoch in range(10)])
    counts = np.bincount(drawn, minlength=n)
    assert counts[weights == 0].sum() == 0
    share = weights / weights.sum() * len(drawn)
    enough = share >= 5
    freedom = int(enough.sum()) - (1 if enough[weights > 0].all() else 0)
    assert abs(z_chi_square(counts[enough], share[enough], freedom)) < Z
    first = order.indices(0, 0, 20_000).astype(float)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < Z / math.sqrt(len(first))
    assert not np.array_equal(order.indices(0, 0, 99), order.indices(1, 0, 99))
    assert np.array_equal(order.indices(0, 50, 99), order.indices(0, 0, 99)[50:])


def test_without_replacement_each_draw_is_by_weight_among_what_is_left() -> None:
    """The probability of each whole sequence of draws, by definition, against how often it came in 20 000 epochs."""
    weights = [4.0, 1.0, 0.0, 2.0, 0.5]
    order = weighted(weights, 5, seed=1, draws=3, replacement=False)
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(20_000):
        drawn = tuple(order.indices(epoch, 0, 3).tolist())
        counts[drawn] = counts.get(drawn, 0) + 1
    expected = {}
    for drawn in itertools.permutations([0, 1, 3, 4], 3):
        left, probability = sum(weights), 1.0
        for index in drawn:
            probability *= weights[index] / left
            left -= weights[index]
        expected[drawn] = 20_000 * probability
    assert counts.keys() <= expected.keys()
    both = np.array([(counts.get(drawn, 0), often) for drawn, often in expected.items()])
    assert abs(z_chi_square(both[:, 0].astype(np.int64), both[:, 1], len(both) - 1)) < Z


@pytest.mark.parametrize("replacement", [True, False])
def test_very_small_weights_are_drawn_like_others(replacement: bool) -> None:
    weights = np.arange(1.0, 40)
    usual, small = (weighted(scale * weights, 39, 3, 30, replacement) for scale in (1.0, 2.0**-1060))
    assert all(usual.indices(e, 0, 30).tolist() == small.indices(e, 0, 30).tolist() for e in range(3))


@settings(max_examples=80)
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=40), st.integers(0, 99), st.booleans(), st.data())
def test_zero_weights_are_never_drawn_and_any_part_comes_alone(
    weights: list[float], seed: int, replacement: bool, data: st.DataObject
) -> None:
    if not 0 < sum(weights) < math.inf:
        return
    able = sum(weight > 0 for weight in weights)
    draws = data.draw(st.integers(1, 300 if replacement else able))
    order = weighted(weights, len(weights), seed, draws, replacement)
    drawn = order.indices(3, 0, draws)
    assert order.length == len(drawn) == draws
    assert drawn.dtype == np.int64
    assert drawn.min() >= 0
    assert all(weights[i] > 0 for i in drawn)
    assert replacement or len(set(drawn.tolist())) == draws
    start = data.draw(st.integers(0, draws))
    order.indices(4, 0, draws)
    assert np.array_equal(order.indices(3, start, draws), drawn[start:])
    again = pickle.loads(pickle.dumps(order))
    assert np.array_equal(again.indices(3, 0, draws), drawn)
    assert again.name == order.name


def test_how_many_are_drawn() -> None:
    weights = [1.0, 0.0, 2.0, 0.0]
    assert weighted(weights, 4, 0).length == 4
    assert weighted(weights, 4, 0, replacement=False).length == 2
    assert weighted(weights, 4, 0, draws=9).length == 9
    with pytest.raises(
        UsageError, match=r"num_samples=3 without replacement, but only 2 samples have a weight above 0"
    ):
        weighted(weights, 4, 0, draws=3, replacement=False)


def test_a_few_draws_are_the_first_of_many_also_where_times_are_equal() -> None:
    weights = np.full(3000, 1.0)
    weights[1000:] = 1e-320  # all of these after all others, in the order of their indices
    every = weighted(weights, 3000, 5, replacement=False).indices(0, 0, 3000)
    assert every[1000:].tolist() == list(range(1000, 3000))
    for draws in (1, 10, 1000, 1500):
        assert np.array_equal(weighted(weights, 3000, 5, draws, replacement=False).indices(0, 0, draws), every[:draws])


def test_weights_are_copied_and_name_the_order() -> None:
    weights = np.array([1.0, 2.0, 3.0])
    for replacement in (True, False):
        order = weighted(weights, 3, 0, replacement=replacement)
        before = order.indices(1, 0, 3).tolist()
        order.indices(2, 0, 3)  # one epoch is kept
        weights[:] = [1.0, 1e9, 3.0]
        assert order.indices(1, 0, 3).tolist() == before
        weights[:] = [1.0, 2.0, 3.0]
    names = {
        weighted(w, 3, 0, draws, replacement).name
        for w, draws, replacement in [
            ([1, 2, 3], None, True),
            ([1, 2, 4], None, True),
            ([1, 2, 3], 4, True),
            ([1, 2, 3], 3, False),
            ([1, 2, 4], 3, False),
        ]
    }
    assert len(names) == 5
    assert weighted(np.array([1, 2, 3], np.float32), 3, 0).name == weighted([1, 2, 3], 3, 9).name


def test_the_logarithm_is_one_to_the_last_bits() -> None:
    words = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64)
    words[:3] = [0, 2**64 - 1, 2**63]
    u = ((words >> np.uint64(12)) + 0.5) * 2.0**-52
    assert np.allclose(_exponential(words), -np.log(u), rtol=4e-15, atol=0)
    assert _exponential(words).min() > 0


def test_a_point_at_the_very_end_belongs_to_the_last_index_with_weight() -> None:
    order = weighted([1.0, 1.0 + 2**-52, 0.0, 0.0], 4, seed=0)
    assert isinstance(order, WithReplacement)
    points = np.array([order.bounds[-1], np.nextafter(order.bounds[-1], 0)])
    found = np.searchsorted(order.bounds, points, side="right")
    assert found.tolist() == [4, 1]  # so it has to be brought back, which indices() does
    assert np.searchsorted(order.bounds, order.bounds[-1], side="left") == 1
