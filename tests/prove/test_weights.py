"""`evenstep prove --tolerance`: two commands that know nothing of evenstep, and the weights that they write."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.launch.launching import clean_environ, command, evenstep, eventually, is_alive

WEIGHTS = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.tensor([1.0, -2.0])}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with weights, and some that are like them."""
    torch.save(WEIGHTS, tmp_path / "x.pt")
    near = {"module." + name: t * (1 + 1e-6) for name, t in WEIGHTS.items()}
    torch.save({"model": near, "epoch": 1}, tmp_path / "y.pt")
    torch.save({**WEIGHTS, "layer.bias": torch.tensor([1.0, -2.5])}, tmp_path / "z.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "tolerance", "code", "says"),
    [
        ("x", "0", 0, "2 commands, 2 tensors: identical"),
        ("y", "1e-4", 0, "2 commands, 2 tensors: equal within 0.0001 (the largest difference is"),
        ("z", "1e-4", 3, "2 commands, 2 tensors: 1 differs"),
    ],
)
def test_two_commands_are_compared(stored: Path, source: str, tolerance: str, code: int, says: str) -> None:
    words = ("--tolerance", tolerance, "cp x.pt a.pt", f"cp {source}.pt b.pt", "--weights", "a.pt", "b.pt")
    result = evenstep(stored, "prove", *words)
    assert result.code == code, result
    assert result.out.splitlines()[-1].startswith(says)
    if source == "z":
        assert "the first that differs: layer.bias: by up to 0.5, 0.2 of its largest value" in result.out
        found = json.loads(evenstep(stored, "prove", "--json", *words).out)
        assert (found["first"]["name"], found["equal"]) == ("layer.bias", False)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["true", "true"], 2, "--weights names none"),
        (["true", "--weights", "a.pt", "b.pt"], 2, "got 1 command, expected 2"),
        (["true", "true", "--weights", "a.pt"], 2, "takes two files"),
        (["true", "true", "--weights", "a.pt", "./a.pt"], 2, "twice"),
        (["true", "cp x.pt b.pt", "--weights", "a.pt", "b.pt"], 2, "command A ended well and has not written a.pt"),
        (["true", "cp x.pt b.pt", "--weights", "x.pt", "b.pt"], 2, "has not written x.pt"),
        (["cp x.pt a.pt", "cp z.pt a.pt; cp z.pt b.pt", "--weights", "a.pt", "b.pt"], 2, "has written a.pt too"),
        (["echo why it failed; false", "true", "--weights", "a.pt", "b.pt"], 1, "command A ended with exit code 1"),
    ],
)
def test_bad_input_and_failures(stored: Path, words: list[str], code: int, says: str) -> None:
    result = evenstep(stored, "prove", "--tolerance", "1e-3", *words)
    assert result.code == code, result
    assert says in result.err
    assert ("  why it failed" in result.err) == (code == 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_too(tmp_path: Path, number: signal.Signals) -> None:
    words = ("--tolerance", "1", "--weights", "a", "b", "echo $$ > pid.tmp; mv pid.tmp pid; sleep 100", "true")
    popen = subprocess.Popen(command("prove", *words), cwd=tmp_path, env=clean_environ(), stderr=subprocess.PIPE)
    try:
        assert eventually((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        popen.send_signal(number)
        popen.communicate(timeout=30)
        assert popen.returncode == 128 + number
        assert eventually(lambda: not is_alive(pid))
    finally:
        popen.kill()
        popen.communicate()
