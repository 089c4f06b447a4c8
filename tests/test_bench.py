"""The benchmarks run; what they measure is for a quiet machine (`make bench`), not for a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


def printed(*command: str, cwd: Path) -> dict[str, object]:
    """The line of JSON on standard output."""
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


@pytest.mark.slow
def test_step_gives_a_ratio_for_each_pair_of_turns(tmp_path: Path) -> None:
    launch = ["-m", "evenstep", "run", "--processes", "2", "--no-exact", "--run", "run"]
    found = printed(*launch, str(BENCH / "step.py"), "mlp", "--turns", "2", "--steps", "1", cwd=tmp_path)
    ratios = found["ratios"]
    assert isinstance(ratios, list)
    assert len(ratios) == 2
    assert all(ratio > 0 for ratio in ratios)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["evenstep", "ddp"])
def test_memory_gives_a_peak_that_holds_at_least_parameters_and_gradients(side: str, tmp_path: Path) -> None:
    launch = ["-m", "evenstep", "run", "--processes", "2", "--run", "run"]
    found = printed(*launch, str(BENCH / "memory.py"), side, cwd=tmp_path)
    peak, gradients = found["peak"], found["gradients"]
    assert isinstance(peak, int)
    assert isinstance(gradients, int)
    assert peak > 2 * gradients > 0


@pytest.mark.slow
def test_threads_give_a_ratio_for_each_pair_of_turns(tmp_path: Path) -> None:
    found = printed(str(BENCH / "threads.py"), "mlp", "--turns", "2", cwd=tmp_path)
    ratios = found["ratios"]
    assert isinstance(ratios, list)
    assert len(ratios) == 2
    assert all(ratio > 0 for ratio in ratios)


@pytest.mark.slow
def test_stages_give_a_ratio_for_each_pair_of_turns(tmp_path: Path) -> None:
    launch = ["-m", "evenstep", "run", "--processes", "2", "--run", "run"]
    found = printed(*launch, str(BENCH / "stages.py"), "--turns", "2", cwd=tmp_path)
    ratios = found["ratios"]
    assert isinstance(ratios, list)
    assert len(ratios) == 2
    assert all(ratio > 0 for ratio in ratios)


@pytest.mark.slow
def test_shards_give_ratios_and_memory(tmp_path: Path) -> None:
    launch = ["-m", "evenstep", "run", "--processes", "2", "--shard", "--run"]
    small = ["--turns", "2", "--depth", "1"]
    ratios = printed(*launch, "time", str(BENCH / "shard.py"), "time", *small, cwd=tmp_path)["ratios"]
    assert isinstance(ratios, list)
    assert len(ratios) == 2
    assert all(ratio > 0 for ratio in ratios)
    found = printed(*launch, "memory", str(BENCH / "shard.py"), "memory", "--depth", "1", cwd=tmp_path)
    peak, parameters = found["peak"], found["parameters"]
    assert isinstance(peak, int)
    assert isinstance(parameters, int)
    assert peak > parameters > 0
