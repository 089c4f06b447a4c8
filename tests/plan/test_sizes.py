"""Micro-batch sizes, and the search for the largest that fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstep.plan.sizes import largest_that_fits, micro_batch_sizes


def test_some_sizes() -> None:
    assert micro_batch_sizes(16, 1) == [1, 2, 3, 4, 6, 8, 16]
    assert micro_batch_sizes(16, 3) == [1, 2, 3, 4, 6]
    assert micro_batch_sizes(9, 4) == [1, 2]  # of 3 there would be three
    assert micro_batch_sizes(3, 4) == []
    assert micro_batch_sizes(1, 1) == [1]


def test_sizes_that_leave_no_sample_alone() -> None:
    """For layers that compare the samples of a micro-batch."""
    assert micro_batch_sizes(16, 1, several=True) == [2, 4, 6, 8, 16]
    assert micro_batch_sizes(16, 1, several=True, last=9) == [6, 16]
    assert micro_batch_sizes(3, 3, several=True) == [1], "there is no other"


@given(st.integers(1, 3000), st.integers(1, 40))
def test_every_number_of_micro_batches_has_its_smallest_size(batch: int, workers: int) -> None:
    sizes = micro_batch_sizes(batch, workers)
    expected = {-(-batch // parts) for parts in range(1, batch + 1)}
    assert sizes == sorted(size for size in expected if -(-batch // size) >= workers)
    assert set(sizes) <= set(micro_batch_sizes(batch, 1)), "workers set the largest size and nothing else"
    assert not sizes or len(sizes) <= 2 * batch**0.5 + 1


@given(st.integers(1, 5000), st.integers(1, 8), st.integers(0, 6000))
def test_the_largest_that_fits_is_found_without_trying_much_larger_ones(batch: int, workers: int, limit: int) -> None:
    sizes = micro_batch_sizes(batch, workers)
    tried: list[int] = []

    def fits(size: int) -> bool:
        fitted = max([t for t in tried if t <= limit], default=0)
        assert size <= 2 * fitted or size == min(s for s in sizes if s > fitted)
        assert size not in tried
        tried.append(size)
        return size <= limit

    assert largest_that_fits(sizes, fits) == max([s for s in sizes if s <= limit], default=None)
    assert len(tried) <= 26
