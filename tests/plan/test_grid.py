"""Every micro-batch is computed once by each part of the model, whatever the grid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import UsageError
from evenstep.plan.grid import Grid, grid

GRIDS = st.builds(
    lambda replicas, stages, shards: Grid(replicas * stages * shards, stages, shards),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
)


@given(GRIDS)
def test_ranks_and_places_are_one_to_one(layout: Grid) -> None:
    places = [layout.place(rank) for rank in range(layout.processes)]
    assert len(set(places)) == layout.processes
    assert [layout.rank(place) for place in places] == list(range(layout.processes))
    assert {p.replica for p in places} == set(range(layout.replicas))


@given(GRIDS, st.integers(1, 40))
def test_each_stage_computes_each_micro_batch_once(layout: Grid, micro_batches: int) -> None:
    for stage in range(layout.stages):
        done = [i for rank in layout.ranks(stage=stage) for i in layout.leaves(micro_batches, rank)]
        assert sorted(done) == list(range(micro_batches))


@given(GRIDS, st.integers(1, 40))
def test_shards_of_a_replica_run_together(layout: Grid, micro_batches: int) -> None:
    for replica in range(layout.replicas):
        ranks = layout.ranks(replica=replica)
        rounds = {layout.rounds(micro_batches, rank) for rank in ranks}
        assert len(rounds) == 1
        for rank in ranks:
            leaves = layout.leaves(micro_batches, rank)
            assert len(leaves) <= layout.rounds(micro_batches, rank)


def test_rounds_come_in_the_order_of_the_micro_batches() -> None:
    layout = Grid(6, shards=3)  # two replicas of three shards
    assert [list(layout.leaves(7, rank)) for rank in range(6)] == [[0, 3], [1], [2], [4], [5], [6]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"processes": 3, "stages": 2}, "3 processes do not make pipelines of 2 stages"),
        ({"processes": 4, "stages": 2, "shard": True}, "not offered"),
        ({"processes": 4, "replicas": 2}, "goes with --shard"),
        ({"processes": 4, "shard": True, "replicas": 3}, "4 processes do not make 3 replicas"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        grid(**options)  # type: ignore[arg-type]


def test_options_that_fit() -> None:
    assert grid(4) == Grid(4, 1, 1)
    assert grid(4, stages=2) == Grid(4, 2, 1)
    assert grid(4, shard=True) == Grid(4, 1, 4)
    assert grid(4, shard=True, replicas=2).replicas == 2
