"""The promise on GPUs: for machines that have one (the NCCL test: two)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.train.scripts import TRAININGS

COUNT = torch.cuda.device_count()  # asks the driver; CUDA stays uninitialised, so that ranks can be forked
needs_one = pytest.mark.skipif(COUNT < 1, reason="this machine has no GPU that torch can use")
needs_two = pytest.mark.skipif(COUNT < 2, reason="this machine has fewer than two GPUs that torch can use")


@needs_one
@pytest.mark.parametrize("training", list(TRAININGS))
def test_the_same_bits_twice_on_one_gpu(training: str, tmp_path: Path) -> None:
    first = run_ranks(TRAININGS[training], 1, tmp_path / "first")
    assert run_ranks(TRAININGS[training], 1, tmp_path / "second") == first


@needs_two
@pytest.mark.parametrize("training", list(TRAININGS))
def test_the_same_bits_on_one_gpu_and_on_several(training: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(TRAININGS[training], 1, tmp_path / "alone")
    for found in run_ranks(TRAININGS[training], min(COUNT, 4), tmp_path / "run"):
        assert found == alone
