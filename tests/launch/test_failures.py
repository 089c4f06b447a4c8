"""Which of several ends was the first, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.errors import MismatchError, PeerFailed
from evenstep.launch.failures import Exit, Failure, ended_before, first_failure, is_secondary
from evenstep.record.uncaught import Uncaught, read_uncaught, write_uncaught


def ended(rank: int, code: int, time: float, *, stopped: bool = False) -> Exit:
    return Exit(rank, code, stopped, time)


def raised(rank: int, time: float, *, type: str = "ValueError", secondary: bool = False, message: str = "") -> Uncaught:
    return Uncaught(rank, type, message or str(rank), "", secondary, 1, False, time)


def leader(exits: list[Exit], uncaught: list[Uncaught]) -> int | None:
    failure = first_failure(exits, uncaught)
    return None if failure is None else failure.exit.rank


def test_nobody_failed() -> None:
    assert leader([], []) is None
    assert leader([ended(0, 0, 1.0), ended(1, 0, 2.0)], []) is None


def test_who_raised_first_though_seen_later() -> None:
    exits = [ended(0, 1, 2.0), ended(1, 1, 2.1)]
    assert leader(exits, [raised(0, 1.5), raised(1, 1.0)]) == 1


def test_cause_before_consequence_before_our_own_doing() -> None:
    exits = [ended(0, 1, 1.0), ended(1, -9, 1.1), ended(2, -15, 1.05, stopped=True)]
    assert leader(exits, [raised(0, 0.9, secondary=True)]) == 1
    exits = [ended(2, -15, 1.05, stopped=True), ended(0, 1, 1.1)]
    assert leader(exits, [raised(0, 1.1, secondary=True)]) == 0


def test_raised_before_it_was_stopped_is_its_own() -> None:
    exits = [ended(0, 1, 1.0), ended(1, 1, 1.5, stopped=True)]
    assert leader(exits, [raised(0, 0.9, secondary=True), raised(1, 0.8)]) == 1


def test_exit_on_our_signal_is_no_cause() -> None:
    exits = [ended(1, 1, 1.0), ended(0, 1, 1.2, stopped=True)]
    said = [raised(1, 1.0, secondary=True), raised(0, 0.5, type="SystemExit")]
    assert leader(exits, said) == 1


def test_lowest_rank_when_all_fail_alike() -> None:
    exits = [ended(rank, 1, 1.0) for rank in (2, 0, 1)]
    said = [raised(rank, time, message="no such file") for rank, time in ((0, 0.9), (1, 0.8), (2, 0.7))]
    assert leader(exits, said) == 0


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (PeerFailed("rank 2 failed"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("NCCL error: ncclRemoteError: remote process exited or there was a network error"), True),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), True),
        (RuntimeError("CUDA out of memory"), False),
        (MismatchError("rank 0 calls reduce, rank 1 barrier"), False),
        (ConnectionResetError("[Errno 104] Connection reset by peer"), False),  # the user's own network traffic
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_consequences_are_known(error: Exception, secondary: bool) -> None:
    assert is_secondary(error) is secondary


def test_consequence_in_the_chain() -> None:
    error = ValueError("could not log")
    error.__context__ = ValueError("deeper")
    error.__context__.__cause__ = PeerFailed("rank 1 failed")
    assert is_secondary(error)
    error.__context__.__cause__ = error  # a circle ends
    assert not is_secondary(error)


def test_record_round_trip_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.error.json"
    assert read_uncaught(path) is None
    write_uncaught(path, raised(0, 1.5))
    assert read_uncaught(path) == raised(0, 1.5)
    path.write_text(path.read_text()[:20])
    assert read_uncaught(path) is None
    write_uncaught(tmp_path / "missing" / "x.json", raised(0, 1.5))  # no folder: no other error


def test_unknown_signal_has_its_number() -> None:
    assert "signal 63" in ended(0, -63, 1.0).describe()


def test_who_had_ended_before_a_consequence() -> None:
    exits = [ended(1, 0, 1.0), ended(0, 1, 2.0), ended(2, 0, 3.0)]
    assert ended_before(exits, Failure(exits[1], raised(0, 1.5, secondary=True))) == (
        "rank 1 had ended before, with exit code 0"
    )
    assert ended_before(exits, Failure(exits[1], raised(0, 1.5))) == ""
