"""The shuffle: a permutation with random access in no memory, and as good as a fair one."""

from __future__ import annotations

import itertools
import math
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenstep.plan.order import SORTED, Fixed, Natural, Shuffled, fixed

# The tests of fairness are deterministic: the seeds are fixed. A fair shuffle is beyond z = 4.5 once in 150 000 times.
Z = 4.5
SIZES = [2, 3, 4, 5, 7, 8, 16, 31, 50, SORTED, SORTED + 1, 1500, 4096, 5003]


def permutations(n: int, count: int, seed: int = 0) -> NDArray[np.int64]:
    """`count` epochs of n samples, one a row."""
    return np.stack([Shuffled(n, seed).indices(epoch, 0, n) for epoch in range(count)])


def count_of(n: int) -> int:
    return max(min(60_000 // n, 4000), 40)


def z_chi_square(counts: NDArray[np.int64], expected: float | NDArray[np.float64], freedom: int) -> float:
    """How many standard deviations the statistic is from what is expected (Wilson and Hilferty)."""
    chi = float(((counts - expected) ** 2 / expected).sum())
    third = 2 / (9 * freedom)
    return float(((chi / freedom) ** (1 / 3) - (1 - third)) / math.sqrt(third))


@given(st.integers(1, 6000), st.integers(0, 2**63), st.integers(0, 10**6), st.data())
def test_every_index_once_and_any_part_alone(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    order = Shuffled(n, seed)
    whole = order.indices(epoch, 0, n)
    assert whole.dtype == np.int64
    assert np.array_equal(np.sort(whole), np.arange(n))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert np.array_equal(order.indices(epoch, start, stop), whole[start:stop])


def test_the_order_is_the_same_on_every_machine_and_for_ever() -> None:
    assert Shuffled(10, 0).indices(0, 0, 10).tolist() == [7, 6, 4, 0, 5, 1, 8, 2, 9, 3]
    assert Shuffled(10**9, 7).indices(3, 5, 9).tolist() == [544148673, 529343134, 71178863, 285221636]


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 10**9, 2**40 + 1, 2**53 + 1, 2**62])
def test_large_sets(n: int) -> None:
    order = Shuffled(n, 1)
    found = np.concatenate([order.indices(0, start, start + 500) for start in (0, n // 3, n - 500)])
    assert len(set(found.tolist())) == 1500
    assert found.min() >= 0
    assert found.max() < n
    assert abs(found.astype(float).mean() / n - 0.5) < Z * math.sqrt(1 / 12 / 1500)


def test_the_first_batch_of_a_billion_samples_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        Shuffled(10**9, 0).indices(0, 0, 256)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", SIZES)
def test_positions_are_uniform(n: int) -> None:
    """Each index is at each position equally often (in up to 32 bins of each)."""
    rows = permutations(n, count_of(n))
    bins = min(n, 32)
    position = np.broadcast_to(np.arange(n) * bins // n, rows.shape)
    cells = np.bincount((position * bins + rows * bins // n).ravel(), minlength=bins * bins)
    width = np.bincount(np.arange(n) * bins // n, minlength=bins)
    expected = (np.outer(width, width) * len(rows) / n).ravel()
    assert abs(z_chi_square(cells, expected, (bins - 1) ** 2)) < Z


@pytest.mark.parametrize("n", [3, 4, 5])
def test_every_permutation_of_a_small_set_is_as_likely(n: int) -> None:
    rows = permutations(n, 6000)
    _, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(counts) == math.factorial(n)
    assert abs(z_chi_square(counts, len(rows) / len(counts), len(counts) - 1)) < Z


@pytest.mark.parametrize("lag", [1, 2, 3, 16])
@pytest.mark.parametrize("n", [n for n in SIZES if n > 16])
def test_no_serial_correlation(n: int, lag: int) -> None:
    rows = permutations(n, count_of(n)).astype(float)
    centred = rows - (n - 1) / 2
    variance = (n * n - 1) / 12
    products = (centred[:, :-lag] * centred[:, lag:]).mean(axis=1) / variance + 1 / (n - 1)
    assert abs(products.mean() / (products.std() / math.sqrt(len(rows)))) < Z


@pytest.mark.parametrize("n", [n for n in SIZES if n > 3])
def test_neighbours_are_as_far_apart_as_any_two(n: int) -> None:
    """How often i and i+1 (round the end) follow each other: n in n(n-1) ordered pairs, n-1 times an epoch."""
    rows = permutations(n, count_of(n))
    for step in (1, -1, 2):
        followed = ((rows[:, 1:] - rows[:, :-1] - step) % n == 0).sum()
        expected = len(rows) * (n - 1) * (n / (n * (n - 1)))
        assert abs(followed - expected) / math.sqrt(expected) < Z


@pytest.mark.parametrize("n", SIZES)
def test_epochs_and_seeds_are_independent(n: int) -> None:
    """Two of them agree at as many positions as two fair shuffles do: 1 on average, with variance 1."""
    count = count_of(n)
    epochs = permutations(n, count)
    seeds = np.stack([Shuffled(n, seed).indices(0, 0, n) for seed in range(count)])
    for rows in (epochs, seeds):
        for apart in (1, 2):
            agree = (rows[apart:] == rows[:-apart]).sum(axis=1)
            assert abs(agree.mean() - 1) < Z * math.sqrt(1 / len(agree)) * 1.5
    if n > 3:  # what one epoch does to a position says nothing about what the next one does to it
        pairs = (epochs[:-1] - epochs[1:]) % n
        counts = np.bincount(pairs.ravel(), minlength=n)
        assert abs(z_chi_square(counts, pairs.size / n, n - 1)) < Z + 1.5
    for one, other in itertools.pairwise(range(20)):
        assert n < 6 or not np.array_equal(Shuffled(n, one).indices(other, 0, n), Shuffled(n, other).indices(one, 0, n))


@pytest.mark.parametrize("n", [64, 2000])
def test_runs_up_and_down_are_as_long_as_they_should_be(n: int) -> None:
    rows = permutations(n, 400)
    turns = ((rows[:, 1:-1] - rows[:, :-2]) * (rows[:, 2:] - rows[:, 1:-1]) < 0).sum(axis=1)
    mean, variance = 2 * (n - 2) / 3, (16 * n - 29) / 90
    assert abs(turns.mean() - mean) < Z * math.sqrt(variance / len(turns))


def test_a_batch_of_a_large_epoch_is_spread_over_all_of_it() -> None:
    n = 10**6
    rows = np.concatenate([Shuffled(n, seed).indices(0, 512 * seed, 512 * seed + 512) for seed in range(100)])
    counts = np.bincount(rows * 64 // n, minlength=64)
    assert abs(z_chi_square(counts, len(rows) / 64, 63)) < Z
    parity = np.bincount(rows % 64, minlength=64)
    assert abs(z_chi_square(parity, len(rows) / 64, 63)) < Z


def test_orders_are_plain_data() -> None:
    for order in (Natural(9), Shuffled(9, 1), Shuffled(9000, 1), fixed([3, 1, 2, 2], 9)):
        again = pickle.loads(pickle.dumps(order))
        assert np.array_equal(order.indices(2, 1, 4), again.indices(2, 1, 4))
        assert order.length == again.length
    assert isinstance(fixed(range(3), 3), Fixed)
    assert Natural(9).indices(4, 2, 5).tolist() == [2, 3, 4]
