"""Where a process stands, read from the variables of each launcher."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from evenstep.environment import (
    ALONE,
    Settings,
    World,
    first_node,
    memory_size,
    read_settings,
    read_world,
    write_settings,
    write_world,
)
from evenstep.errors import UsageError

BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
SBATCH_SCRIPT = {  # what sbatch -n 4 sets in its script, and salloc -n 4 in its shell
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4",
}
SRUN = SBATCH_SCRIPT | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "34567",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "99",
    "OMPI_MCA_orte_hnp_uri": "99.0;tcp://10.0.0.1:45678",
}


def test_nothing_set_is_alone() -> None:
    assert read_world({}) == ALONE
    assert read_world({"WORLD_SIZE": "1", "HOME": "/root"}) == ALONE


@pytest.mark.parametrize("master", [(None, None), ("127.0.0.1", 40123)])
def test_what_the_launcher_writes_is_read_back(master: tuple[str | None, int | None]) -> None:
    for world_size in (1, 3):
        for rank in range(world_size):
            world = World(rank, world_size, rank, world_size, "evenstep", *master, "tag")
            assert read_world(write_world(world)) == world


def test_settings_round_trip() -> None:
    full = Settings(
        run="runs/a b",
        global_batch=256,
        micro_batch=32,
        seed=0,
        exact=False,
        backend="gloo",
        threads=2,
        checkpoint_every=100,
        keep=3,
        fingerprints=True,
        allow_other_identity=False,
        loaders=0,
        stop_after=8,
        trace_step=0,
        launch="tag",
        stages=2,
        shard=True,
        replicas=2,
        thread_replicas=4,
        split=2,
        batchnorm="sync",
        precision="bf16",
        memory=2**31,
    )
    assert all(getattr(full, field.name) is not None for field in dataclasses.fields(Settings))
    assert read_settings(write_settings(full)) == full
    assert read_settings({}) == Settings()
    assert write_settings(Settings()) == {}


def test_by_hand() -> None:
    assert read_world(BY_HAND) == World(1, 2, 1, 2, "environment", "127.0.0.1", 1234, None)
    assert read_world({"RANK": "0", "WORLD_SIZE": "1"}) == World(0, 1, 0, 1, "environment", None, None, None)


def test_torchrun() -> None:
    environ = BY_HAND | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    world = read_world(environ)
    assert (world.launcher, world.rank, world.local_world_size) == ("torchrun", 1, 2)
    assert world.job == read_world(environ | {"RANK": "0", "LOCAL_RANK": "0"}).job
    assert world.job != read_world(environ | {"MASTER_PORT": "1235"}).job


def test_torchrun_inside_a_slurm_step_is_torchrun() -> None:
    assert read_world(SRUN | BY_HAND | {"TORCHELASTIC_RUN_ID": "x"}).launcher == "torchrun"


def test_srun() -> None:
    assert read_world(SRUN) == World(2, 4, 2, 3, "slurm", None, None, "slurm-7.0.0.34567")
    last = read_world(SRUN | {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"})
    assert (last.rank, last.local_rank, last.local_world_size, last.job) == (3, 0, 1, "slurm-7.0.0.34567")
    assert read_world(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"}).local_world_size == 3
    assert read_world(SRUN | {"MASTER_ADDR": "h", "MASTER_PORT": "9"}).master_port == 9


def test_srun_on_several_hosts() -> None:
    step = SRUN | {"SLURM_STEP_NODELIST": "gpu[003-005,9],login"}
    assert read_world(step).master_addr == "gpu003"
    assert read_world(step | {"MASTER_PORT": "9"}).master_port is None  # without an address: the batch script's habit
    assert read_world(step | {"MASTER_ADDR": "h", "MASTER_PORT": "9"}).master_addr == "h"
    assert read_world(step | {"SLURM_STEP_TASKS_PER_NODE": "4"}).master_addr is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("a[1-3]", "a1"), ("a[07,9]x,b", "a07x"), ("r[0-1]n[4-9]", "r0n4"), ("", "")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_requeued_slurm_job_is_another_start() -> None:
    assert read_world(SRUN).job != read_world(SRUN | {"SLURM_RESTART_COUNT": "1"}).job


def test_srun_takes_world_size_that_the_batch_script_exported() -> None:
    assert read_world(SRUN | {"WORLD_SIZE": "4"}).launcher == "slurm"


def test_python_in_a_batch_script_or_an_interactive_shell_is_alone() -> None:
    assert read_world(SBATCH_SCRIPT) == ALONE
    interactive = SBATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    assert read_world(interactive) == ALONE


def test_srun_with_pmi_is_slurm() -> None:
    assert read_world(SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}).launcher == "slurm"


def test_open_mpi() -> None:
    world = read_world(OPEN_MPI)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 1, 2)
    assert (world.launcher, world.master_addr) == ("mpi", None)
    assert world.job == read_world(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}).job
    assert world.job != read_world(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "99.0;tcp://10.0.0.1:45679"}).job


def test_mpich_under_srun_is_mpi() -> None:
    one_proxy_a_host = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert read_world(one_proxy_a_host | mpich) == World(1, 4, 1, 2, "mpi", None, None, None)


def test_processes_of_one_mpirun_share_a_job_through_wrappers() -> None:
    """Each rank is started by this process, one directly, one through a shell; another start has another name."""
    code = "import os; from evenstep.environment import read_world; print(read_world(os.environ).job)"
    mpich = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}

    def job(rank: int, command: list[str]) -> str:
        environ = os.environ | mpich | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.strip()

    python = [sys.executable, "-c", code]
    direct = job(0, python)
    assert direct.startswith("parent-")
    assert job(1, ["sh", "-c", '"$@"; true', "sh", *python]) == direct


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=-1"),
        ({"RANK": "zero", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='zero'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
        (BY_HAND | {"MASTER_PORT": "http"}, "MASTER_PORT"),
        (BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID"),
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_half_set_and_nonsense_is_refused_by_name(environ: dict[str, str], names: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_world(environ)
    assert names in caught.value.message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("EVENSTEP_GLOBAL_BATCH", "0"),
        ("EVENSTEP_MICRO_BATCH", "many"),
        ("EVENSTEP_SEED", "-1"),
        ("EVENSTEP_EXACT", "maybe"),
        ("EVENSTEP_KEEP", "0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings({variable: value})
    assert variable in caught.value.message


def test_a_micro_batch_may_be_auto_and_memory_has_units() -> None:
    assert read_settings({"EVENSTEP_MICRO_BATCH": "auto", "EVENSTEP_MEMORY": "2GiB"}) == Settings(
        micro_batch="auto", memory=2**31
    )
    sizes = ["7", "7 b", "1.5KiB", "2k", "500MB", "1g", "1TiB"]
    assert [memory_size(text, "memory") for text in sizes] == [7, 7, 1536, 2000, 500 * 10**6, 10**9, 2**40]
    for wrong in ("", "many", "-1", "0", "2 XB", True):
        with pytest.raises(UsageError, match=r"--memory=.* is no amount of memory"):
            memory_size(wrong, "--memory")
