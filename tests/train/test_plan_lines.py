from __future__ import annotations

import pytest

from evenstep.plan.schedule import Schedule
from evenstep.train.plan_lines import batch_line, shares_line


def plan(world_size: int, global_batch: int = 256, micro_batch: int = 32, samples: int = 1000) -> list[str]:
    schedule = Schedule(samples, global_batch, micro_batch, epochs=3)
    return [batch_line(schedule), shares_line(schedule.step(0).micro_batches, world_size)]


@pytest.mark.parametrize(
    ("world_size", "line"),
    [
        (1, "1 process computes all of them"),
        (2, "2 processes: each computes 4 micro-batches; none is idle"),
        (3, "3 processes: ranks 0-1 compute 3 each, rank 2 computes 2; 11 % idle (none with 2 or 4 processes)"),
        (
            5,
            "5 processes: ranks 0-2 compute 2 each, ranks 3-4 compute 1 each; "
            "20 % idle (none with 2, 4 or 8 processes)",
        ),
        (8, "8 processes: each computes 1 micro-batch; none is idle"),
    ],
)
def test_the_plan_says_who_computes_what(world_size: int, line: str) -> None:
    assert plan(world_size) == ["global batch 256: 8 micro-batches of 32; 12 steps, 4 an epoch", line]


def test_the_plan_of_batches_that_do_not_divide() -> None:
    assert plan(3, 250)[0] == "global batch 250: 7 micro-batches of 32 and one of 26; 12 steps, 4 an epoch"
    assert plan(2, 224) == [
        "global batch 224: 7 micro-batches of 32; 15 steps, 5 an epoch",
        "2 processes: rank 0 computes 4, rank 1 computes 3; 12 % idle",
    ]
    assert batch_line(Schedule(100, 256, 32, steps=1)) == (
        "global batch 100: 3 micro-batches of 32 and one of 4; 1 step"  # an epoch has no more
    )


def test_the_plan_says_where() -> None:
    assert shares_line(8, 2, device="cuda:0", backend="nccl", exact=False) == (
        "2 processes on cuda over nccl, equal to rounding: each computes 4 micro-batches; none is idle"
    )
    assert shares_line(8, 1, device="cpu") == "1 process on cpu computes all of them"


def test_the_plan_of_pipelines() -> None:
    pipelines, waiting = "2 pipelines of 2 stages", "stages wait for {} % of a step, while it fills and empties"
    one = f"1 pipeline of 2 stages: it computes all 8 micro-batches; {waiting.format(11)}"
    assert shares_line(8, 2, stages=2) == one
    assert shares_line(8, 4, stages=2) == f"{pipelines}: each computes 4 micro-batches; {waiting.format(20)}"
    said = "pipeline 0 computes 4, pipeline 1 computes 3; 12 % idle"
    assert shares_line(7, 4, stages=2) == f"{pipelines}: {said}; {waiting.format(20)}"
