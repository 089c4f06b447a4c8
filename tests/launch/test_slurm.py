"""Slurm on two nodes: inside an allocation, and as a job that is submitted, requeued and resumed."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstep.record.events import read_events
from tests.hosts import Command, needs_hosts
from tests.launch.launching import command, evenstep, eventually, training, write_script
from tests.slurm import Cluster, cluster, needs_slurm

pytestmark = pytest.mark.slow

SCRIPT = training(epochs="8", stepped="time.sleep(float(sys.argv[1]))")
PLAIN = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
    print(dist.get_rank(), os.uname().nodename, model.module.weight.grad.tolist(), flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    needs_hosts()
    needs_slurm()
    with cluster(2, tmp_path_factory.mktemp("slurm") / "c") as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of one process."""
    folder = tmp_path_factory.mktemp("alone")
    write_script(folder, SCRIPT)
    return evenstep(folder, "run", "script.py", 0).out.splitlines()[-1]


def submitted(two: Cluster, folder: Path, *words: object) -> Command:
    return two.start(*command("run"), "--slurm", "--nodes", 2, "--run", "run", "--time", "10", *words, folder=folder)


def job_of(two: Cluster) -> str:
    return two.run("squeue", "-h", "-o", "%i").out.strip()


def steps_done(folder: Path) -> int:
    path = folder / "run" / "events" / "rank-0.jsonl"
    return sum(event["kind"] == "step" for event in read_events(path)) if path.exists() else 0


def test_srun_on_two_nodes(two: Cluster, tmp_path: Path, alone: str) -> None:
    write_script(tmp_path, SCRIPT)
    done = two.start("srun", "-N", 2, "-n", 2, sys.executable, "script.py", 0, folder=tmp_path).wait()
    assert done.code == 0, done
    assert "2 processes" in done.err
    assert done.out.splitlines()[-1] == alone


def test_an_allocation_runs_a_plain_script_too(two: Cluster, tmp_path: Path) -> None:
    """From where users log in, which is no node of it."""
    write_script(tmp_path, PLAIN)
    done = two.start(
        "salloc", "-N", 2, "-n", 3, *command("run", "--output", "all", "script.py"), folder=tmp_path
    ).wait()
    assert done.code == 0, done
    said = re.findall(r"(\d) (host\d) (\[.*)", done.out)
    assert sorted(said) == [(str(rank), f"host{1 + (rank == 2)}", "[[1.0, 1.0]]") for rank in range(3)]
    assert not list((tmp_path / "runs").glob("*/probe-*"))


def test_near_its_time_limit_a_job_is_requeued_and_resumed(two: Cluster, tmp_path: Path, alone: str) -> None:
    write_script(tmp_path, SCRIPT)
    following = submitted(two, tmp_path, "--processes", 1, "script.py", 0.05)
    assert eventually(lambda: steps_done(tmp_path) > 4)
    job = job_of(two)
    two.run("scancel", "--signal=USR1", job)
    done = following.wait()
    assert done.code == 0, done
    step = re.search(rf"job {job} is requeued, to go on from step (\d+)", done.out)
    assert step is not None, done
    assert f"stopped by SIGUSR1 at the end of step {step[1]}" in done.out
    assert f"goes on after step {step[1]} " in done.out
    assert done.out.splitlines()[-1] == alone
    assert f"job {job} is done" in done.err
    assert two.state(job) == "COMPLETED"


def test_a_lost_node(tmp_path: Path, alone: str) -> None:
    needs_hosts()
    needs_slurm()
    write_script(tmp_path, SCRIPT)
    with cluster(2, tmp_path / "c") as two:
        following = submitted(two, tmp_path, "--processes", 1, "script.py", 0.05)
        assert eventually(lambda: steps_done(tmp_path) > 4)
        job = job_of(two)
        two.hosts.power_off(2)
        assert eventually(lambda: f"job {job} is requeued" in (tmp_path / "run" / f"slurm-{job}.log").read_text())
        two.hosts.join(2)
        two.start_node(2)
        done = following.wait(100)
    assert done.code == 0, done
    assert "the run failed on host2 (node 1)" in done.out
    assert re.search(r"goes on after step \d+ ", done.out)
    assert done.out.splitlines()[-1] == alone


def test_the_job_outlives_who_follows_it(two: Cluster, tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    following = submitted(two, tmp_path, "script.py", 0.3)
    assert eventually(lambda: steps_done(tmp_path) > 0)
    job = job_of(two)
    for pid in two.hosts.find(two.login, "evenstep run --slurm")[-1:]:
        os.kill(pid, signal.SIGINT)
    done = following.wait()
    assert done.code == 130
    assert f"to cancel it: scancel {job}" in done.err
    assert two.state(job) == "RUNNING"
    two.run("scancel", job)
    assert eventually(lambda: two.state(job) == "CANCELLED")  # it is not requeued
    log = (tmp_path / "run" / f"slurm-{job}.log").read_text()
    assert "stopped by SIGTERM at the end of step" in log
    assert "requeued" not in log
