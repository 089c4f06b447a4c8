"""The helper that starts ranks: results, errors, signals, the deadline, and nobody left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import RanksFailed, run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def test_results_come_by_rank_with_the_environment_of_a_launcher() -> None:
    offset = 10

    def environment(factor: int) -> tuple[list[str], int, str | None]:
        return [os.environ[name] for name in NAMES], factor + offset, os.environ.get("EXTRA")

    results = run_ranks(environment, 2, 3, env={"EXTRA": "yes"})
    assert results == [(["0", "2", "0", "2", "127.0.0.1"], 13, "yes"), (["1", "2", "1", "2", "127.0.0.1"], 13, "yes")]


def test_ranks_can_form_a_process_group_after_a_backward_in_the_parent() -> None:
    weight = torch.ones(300, 300, requires_grad=True)
    (weight @ weight).sum().backward()

    def reduce() -> float:
        dist.init_process_group("gloo")
        local = torch.full((3,), float(dist.get_rank() + 1), requires_grad=True)
        (local * local).sum().backward()
        assert local.grad is not None
        dist.all_reduce(local.grad)
        dist.destroy_process_group()
        return float(local.grad.sum())

    assert run_ranks(reduce, 2) == [18.0, 18.0]


def test_a_large_result_arrives_whole() -> None:
    assert run_ranks(lambda: b"x" * 5_000_000, 1) == [b"x" * 5_000_000]


def fail_on_rank_1() -> None:
    print("about to look")
    if os.environ["RANK"] == "1":
        raise ValueError("wrong on one")


def test_the_exception_of_the_failing_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(ValueError, match="wrong on one") as raised:
        run_ranks(fail_on_rank_1, 2)
    cause = raised.value.__cause__
    assert isinstance(cause, RanksFailed)
    assert cause.ranks == [1]
    assert "rank 1 raised" in str(cause)
    assert "in fail_on_rank_1" in str(cause)
    assert "about to look" in str(cause)


def test_an_exception_that_cannot_be_pickled_still_tells_its_story() -> None:
    def fail() -> None:
        class Local(Exception):
            pass

        raise Local("no pickle")

    with pytest.raises(RanksFailed, match="no pickle"):
        run_ranks(fail, 1)


def test_a_rank_that_dies_by_a_signal_is_named_and_the_waiting_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.2)

    def die() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(RanksFailed, match="rank 1 was ended by SIGKILL") as raised:
        run_ranks(die, 2)
    assert raised.value.ranks == [1, 0]


def test_a_rank_that_leaves_is_named() -> None:
    with pytest.raises(RanksFailed, match="rank 0 left with exit code 3 before it returned"):
        run_ranks(lambda: os._exit(3), 1)


def wait_for_ever() -> None:
    signal.pause()


def test_at_the_deadline_every_stack_is_shown_and_all_are_killed() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as raised:
        run_ranks(wait_for_ever, 2, timeout=0.3)
    assert time.monotonic() - started < 10
    assert raised.value.ranks == [0, 1]
    assert str(raised.value).count("in wait_for_ever") == 2
    assert "deadline 0.3 s" in str(raised.value)


def test_what_a_rank_started_is_gone_too(tmp_path: Path) -> None:
    def leave_one_running() -> int:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        child.returncode = 0  # no complaint that it is still running
        return child.pid

    (pid,) = run_ranks(leave_one_running, 1)
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "still running"
        time.sleep(0.01)
