"""`evenstep prove` as a user runs it: the table, the exit codes, bad input, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import (
    Result,
    children,
    clean_environ,
    command,
    evenstep,
    eventually,
    is_alive,
    write_script,
)
from tests.prove.prover import MISTAKES

ROOT = Path(__file__).parent.parent.parent
ROW = re.compile(r"(\S.*?)  +(\d+|-)  +([0-9a-f]{16}|-)  +(\S.*)")


def rows(result: Result) -> dict[str, tuple[str, str, str]]:
    """The table: title -> (steps, fingerprint, verdict)."""
    found = [ROW.fullmatch(line) for line in result.out.splitlines()]
    return {match[1]: (match[2], match[3], match[4]) for match in found if match}


@pytest.mark.slow
def test_identical_layouts_end_with_zero_and_leave_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text((MISTAKES / "no_mistake.py").read_text() + "\nprint('after the loop')\nopen('end', 'w')\n")
    words = ("--layouts", "2,resumed", "--steps", "3", "--keep-runs", "kept", script)
    result = evenstep(tmp_path, "prove", *words)
    assert result.code == 0, result
    table = rows(result)
    assert list(table) == ["1 process", "2 processes", "1 process, resumed"]
    assert {(steps, fingerprint) for steps, fingerprint, _ in table.values()} == {("3", table["1 process"][1])}
    assert [verdict for *_, verdict in table.values()][1:] == ["identical", "identical"]
    assert result.out.splitlines()[-1] == "3 layouts, 3 steps: identical"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "train.py"]  # neither `runs` nor `end`
    assert (tmp_path / "kept" / "01-1-process" / "logs" / "rank-0.log").exists()
    assert not list((tmp_path / "kept").rglob("finished.json"))


@pytest.mark.slow
def test_nothing_wrong_is_said_about_an_example(tmp_path: Path) -> None:
    words = ("--layouts", "3,stages", "--steps", "2", ROOT / "examples" / "digits.py", "--epochs", "3")
    result = evenstep(tmp_path, "prove", *words)
    assert result.code == 0, result
    assert result.out.splitlines()[-1] == "3 layouts, 2 steps: identical"
    assert len(result.out.splitlines()) == 5


@pytest.mark.slow
def test_a_difference_ends_with_three_a_failure_with_one(tmp_path: Path) -> None:
    result = evenstep(tmp_path, "prove", "--layouts", "2", "--json", MISTAKES / "divided_by_processes.py")
    assert result.code == 3, result
    proof: dict[str, Any] = json.loads(result.out)
    assert [row["verdict"] for row in proof["layouts"]] == ["reference", "differs"]
    assert [finding["name"] for finding in proof["findings"]] == ["rank"]
    assert proof["summary"] == "2 layouts, 8 steps: 1 differs (rank)"
    begins = "import evenstep\nrun = evenstep.start(global_batch=4)\n"
    write_script(tmp_path, f"{begins}raise ValueError('no data')\n", "a.py")
    result = evenstep(tmp_path, "prove", "--layouts", "2", "a.py")
    assert result.code == 1, result
    assert "failed: ValueError: no data" in result.out
    assert 'a.py", line 3, in <module>' in result.out
    assert result.out.splitlines()[-1] == "1 process: the script fails, so nothing was compared"
    write_script(tmp_path, begins, "b.py")
    result = evenstep(tmp_path, "prove", "--layouts", "2", "b.py")
    assert result.code == 1, result
    assert "no step of run.steps" in result.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "b.py"]


@pytest.mark.slow
def test_what_a_layout_cannot_have_is_refused_and_no_failure(tmp_path: Path) -> None:
    text = (MISTAKES / "no_mistake.py").read_text().replace("micro_batch=3", "micro_batch=6")
    result = evenstep(tmp_path, "prove", "--layouts", "2,3", "--steps", "2", write_script(tmp_path, text))
    assert result.code == 0, result
    assert rows(result)["3 processes"][2].startswith("refused: 3 processes for 2 micro-batches")
    assert result.out.splitlines()[-1] == "2 layouts, 2 steps: identical; 1 refused"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prove"], "Missing argument 'SCRIPT'"),
        (["prove", "none.py"], "there is no script none.py"),
        (["prove", "--steps", "0", "a.py"], "--steps"),
        (["prove", "--layouts", "2,4", "a.py"], "'4' is unknown; there are 1, 2, 3, threads"),
        (["prove", "--keep-runs", ".", "a.py"], "is not empty"),
        (["prove", "--weights", "a", "b", "a.py"], "give --tolerance"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, words: list[str], says: str) -> None:
    write_script(tmp_path, "import evenstep", "a.py")
    result = evenstep(tmp_path, *words)
    assert result.code == 2, result
    assert says in result.err
    assert result.out == ""


def test_a_script_without_evenstep_is_refused(tmp_path: Path) -> None:
    result = evenstep(tmp_path, "prove", write_script(tmp_path, "print('plain')"))
    assert result.code == 2
    assert "does not use evenstep" in result.err
    assert "--tolerance" in result.err


def test_a_script_that_is_not_python_fails_with_its_error(tmp_path: Path) -> None:
    result = evenstep(tmp_path, "prove", write_script(tmp_path, "import evenstep\ndef f(:\n"))
    assert result.code == 1, result
    assert "failed: SyntaxError: invalid syntax" in result.out
    assert "    def f(:" in result.out
    assert "does not use evenstep" not in result.out + result.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    waits = "    open(f'here-{run.rank}', 'w').close()\n    import signal; signal.pause()\n    step.backward"
    text = (MISTAKES / "no_mistake.py").read_text().replace("    step.backward", waits)
    script = write_script(tmp_path, text)
    place = tmp_path / "temporary"
    place.mkdir()
    popen = subprocess.Popen(
        command("prove", "--layouts", "again,2", script),
        cwd=tmp_path,
        env=clean_environ({"TMPDIR": str(place)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert eventually((tmp_path / "here-0").exists)
        started = _descendants(popen.pid)
        assert len(started) >= 4  # two that have imported, a fork server, a training process
        popen.send_signal(number)
        popen.communicate(timeout=30)
        assert popen.returncode == 128 + number
        assert eventually(lambda: not any(map(is_alive, started)))
        assert not list(place.glob("evenstep-*"))
    finally:
        popen.kill()
        popen.communicate()


def _descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(below for child in found for below in _descendants(child))]


def test_help_says_what_it_does_not_touch(tmp_path: Path) -> None:
    text = evenstep(tmp_path, "prove", "--help").out
    for words in ("--layouts", "--keep-runs", "Its own run directory is not touched", "130: Ctrl-C", "threads, shard"):
        assert words in re.sub(r"\s+", " ", text)
    assert os.listdir(tmp_path) == []
