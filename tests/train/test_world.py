"""Where a training process stands: launchers, devices, and what must be the same on all processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import evenstep
from evenstep.environment import TORCH_RANGE
from evenstep.errors import MachineError, UsageError
from evenstep.train import world
from tests.ranks import run_ranks

NOT_GIVEN: dict[str, str | None] = dict.fromkeys(("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@pytest.mark.parametrize("launcher", ["mpirun", "mpich", "srun"])
def test_processes_that_are_given_no_address_find_each_other(launcher: str, tmp_path: Path) -> None:
    variables = {  # rank, size, local rank, local size
        "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
        "mpich": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
        "srun": "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE",
    }[launcher].split()

    def work() -> Any:
        rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
        os.environ.update(zip(variables, (rank, size, rank, size), strict=True))
        if launcher == "srun":
            os.environ.update(SLURM_JOB_ID="77", SLURM_STEP_ID="0", SLURM_NTASKS=size, SLURM_NNODES="1")
        with evenstep.start(global_batch=8, micro_batch=2, run=tmp_path / "run") as run:
            return run.rank, run.all_reduce(1)

    assert run_ranks(work, 3, env={**NOT_GIVEN, "TMPDIR": str(tmp_path)}) == [(0, 3), (1, 3), (2, 3)]
    assert not list(tmp_path.glob("evenstep-*")), "the file in which they met is gone"


def test_different_kinds_of_device_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = world.identity

    def work() -> None:
        if os.environ["RANK"] == "2":
            monkeypatch.setattr(
                "evenstep.train.start.identity", lambda device: {**real(device), "device": "NVIDIA H200"}
            )
        evenstep.start(global_batch=8, micro_batch=2, run=tmp_path / "run")

    with pytest.raises(UsageError, match=r"differ in device .ranks 0, 1: cpu; rank 2: NVIDIA H200"):
        run_ranks(work, 3)


def test_different_options_in_one_run(tmp_path: Path) -> None:
    def work() -> None:
        evenstep.start(global_batch=8, micro_batch=2, run=tmp_path / "run", seed=int(os.environ["RANK"]))

    with pytest.raises(UsageError, match=r"differ in seed .rank 0: 0; rank 1: 1"):
        run_ranks(work, 2)


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(UsageError, match=r"torch 2\.9\.1.* is installed; evenstep works with torch>=2\.13,<2\.15"):
        evenstep.start(global_batch=1)


def test_the_range_of_torch_is_that_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    low, high = (f"{a}.{b}" for a, b in TORCH_RANGE)
    assert f'"torch>={low},<{high}"' in text


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot make .*file/run(.|\n)*--run DIR"):
        evenstep.start(global_batch=1, run=tmp_path / "file" / "run")


def test_the_launcher_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_GLOBAL_BATCH", "12")
    monkeypatch.setenv("EVENSTEP_RUN", str(tmp_path / "other"))
    with evenstep.start(global_batch=8, micro_batch=2, run=tmp_path / "run") as run:
        assert run._options.global_batch == 12
        assert run.directory == tmp_path / "other"


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    with evenstep.start(global_batch=8, run=tmp_path / "run"):
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before
