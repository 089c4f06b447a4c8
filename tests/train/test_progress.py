from __future__ import annotations

import io
import os
import pty
import sys
import threading
import time

import pytest
from rich.console import Console

from evenstep.train.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_every_so_often() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress(400, steps_per_epoch=100, stream=out, clock=clock)
    for step in range(1, 401):
        clock.now += 0.5
        progress.update(step, (step - 1) // 100, 1 / step, 16)
    progress.note("a note")
    progress.close()
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 1/400, epoch 1/4, loss 1, 32 samples/s, 3:20 left"
    assert lines[1] == "step 21/400, epoch 1/4, loss 0.04762, 32 samples/s, 3:10 left"
    assert lines[-2:] == ["a note", "step 400/400, epoch 4/4, loss 0.0025, 32 samples/s, 3:20"]
    assert 15 < len(lines) < 23


def test_lines_become_rarer_but_no_more_than_a_minute_apart() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress(10**6, stream=out, clock=clock)
    for step in range(1, 36_001):
        clock.now += 1
        progress.update(step, 0, None, 1)
    progress.close()
    lines = out.getvalue().splitlines()
    assert 600 < len(lines) < 650  # ten hours
    assert lines[-1] == "step 36000/1000000, epoch 1, 1 samples/s, 267:46:40 left"


def test_the_speed_is_that_of_the_last_half_minute() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress(1000, stream=out, clock=clock)
    for step in range(1, 301):
        clock.now += 1 if step <= 200 else 0.5
        progress.update(step, 0, None, 8)
    progress.close()
    assert "8 samples/s" in out.getvalue().splitlines()[5]
    assert "16 samples/s" in out.getvalue().splitlines()[-1]


def test_a_run_that_goes_on_does_not_count_what_was_done_before() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress(100, start=90, stream=out, clock=clock)
    clock.now += 2
    progress.update(91, 0, None, 4)
    progress.close()
    assert out.getvalue() == "step 91/100, epoch 1, 2 samples/s, 0:18 left\n"


def test_a_loss_that_has_to_be_waited_for_is_asked_only_when_it_is_shown() -> None:
    clock, out = Clock(), io.StringIO()
    asked: list[int] = []

    def loss() -> float:
        asked.append(1)
        return 0.25

    progress = Progress(1000, stream=out, clock=clock)
    for step in range(1, 101):
        clock.now += 0.5
        progress.update(step, 0, loss, 1)
    assert len(asked) == len(out.getvalue().splitlines()) < 10
    progress.close()


def terminal(out: io.StringIO, width: int = 100) -> Console:
    return Console(file=out, force_terminal=True, width=width, color_system=None)


def test_a_bar_on_a_terminal_at_most_four_times_a_second() -> None:
    clock, out = Clock(), io.StringIO()
    before = threading.active_count()
    progress = Progress(1000, steps_per_epoch=100, clock=clock, console=terminal(out))
    for step in range(1, 501):
        clock.now += 0.01  # 5 s in all
        progress.update(step, step // 100, 0.5, 2)
        assert threading.active_count() == before
    assert 15 <= out.getvalue().count("loss 0.5") <= 22
    progress.note("[not markup] " + "long " * 40)
    progress.close()
    assert threading.active_count() == before
    text = out.getvalue()
    assert "[not markup] long" in text
    assert text.rstrip("\n\x1b[?25h").splitlines()[-1].count("━") == 40
    assert "epoch 6/10" in text
    assert "500/1000  loss 0.5  200 samples/s  0:05 left" in text
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("width", [20, 60, 300])
def test_the_bar_stays_on_one_line(width: int) -> None:
    out = io.StringIO()
    progress = Progress(10, steps_per_epoch=4, clock=Clock(), console=terminal(out, width))
    progress.update(5, 1, 0.1234567, 8)
    progress.close()
    assert out.getvalue().count("\n") == 1


def test_a_terminal_is_known_and_prints_into_a_file_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with open(slave, "w") as stream:
        plain = io.StringIO()
        monkeypatch.setattr(sys, "stdout", plain)
        monkeypatch.delenv("TERM", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        progress = Progress(10, stream=stream, clock=Clock())
        progress.update(1, 0, 0.5, 1)
        assert sys.stdout is plain
        print("result")
        progress.close()
        stream.flush()
        shown = os.read(master, 10_000).decode()
    os.close(master)
    assert "1/10" in shown
    assert "result" not in shown
    assert plain.getvalue() == "result\n"


def test_a_stream_that_takes_no_more_does_not_stop_training() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    closed = io.StringIO()
    closed.close()
    for stream in (Full(), closed):
        for console in (None, Console(file=stream, force_terminal=True, width=80)):
            progress = Progress(2, stream=stream, console=console)
            progress.update(1, 0, 0.5, 1)
            progress.note("x")
            progress.update(2, 0, 0.5, 1)
            progress.close()


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_step_costs_little(on_terminal: bool) -> None:
    """About 0.3 us a step, and 155 us each time the bar is drawn: at 100 steps a second 7 us a step."""
    clock, out = Clock(), io.StringIO()
    progress = Progress(10**6, clock=clock, stream=out, console=terminal(out) if on_terminal else None)
    start = time.thread_time()
    for step in range(1000):
        clock.now += 0.01
        progress.update(step, 0, 0.5, 8)
    spent = time.thread_time() - start
    progress.close()
    assert spent / 1000 < 50e-6
