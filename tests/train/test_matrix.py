"""The promise: the same bits after every step, on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.train.scripts import OPTIMIZERS, TRAININGS

_alone: dict[tuple[str, str], list[str]] = {}


def alone(training: str, optimizer: str, directory: Path) -> list[str]:
    """On one process, without loader processes."""
    if (training, optimizer) not in _alone:
        _alone[training, optimizer] = TRAININGS[training](directory, OPTIMIZERS[optimizer], 0)
    return _alone[training, optimizer]


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("training", list(TRAININGS))
def test_every_step_has_the_same_fingerprint(
    training: str, optimizer: str, world_size: int, loaders: int, tmp_path: Path
) -> None:
    expected = alone(training, optimizer, tmp_path / "alone")
    assert len(set(expected)) == len(expected) > 5, "every step changes the model"
    several = run_ranks(TRAININGS[training], world_size, tmp_path / "run", OPTIMIZERS[optimizer], loaders)
    for rank, found in enumerate(several):
        assert found == expected, f"rank {rank} of {world_size}"
