"""Pipeline stages over processes: the same bits as one process, and what cannot be cut is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.train.scripts import TRAININGS


@pytest.mark.parametrize("training", ["transformer", "cnn"])
def test_every_step_has_the_fingerprint_of_one_process(training: str, tmp_path: Path) -> None:
    """The transformer's head is tied to its embedding, over every cut; micro-batches differ in length and number."""
    expected = TRAININGS[training](tmp_path / "alone")
    assert len(set(expected)) == len(expected) > 5
    for processes, stages in ((2, 2), (3, 3), (4, 2)):

        def train(stages: int = stages, processes: int = processes) -> list[str]:
            return TRAININGS[training](tmp_path / f"{processes}-{stages}", stages=stages)

        for rank, found in enumerate(run_ranks(train, processes)):
            assert found == expected, f"rank {rank} of {processes} in {stages} stages"
