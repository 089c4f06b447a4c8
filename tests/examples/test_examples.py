"""The examples as a user runs them, short: with plain python, and by the launcher on two processes.

examples/digits.py is what the demo runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.record.metrics import read_metrics
from evenstep.record.paths import RunPaths

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
SHORT = {"language": ["--steps", "6"], "gan": ["--epochs", "1"]}


def run(*command: str, cwd: Path) -> str:
    """Standard output of a Python command that must end well."""
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fingerprint(printed: str) -> str:
    """What the last line says."""
    found = re.fullmatch(r"fingerprint: ([0-9a-f]+)", printed.splitlines()[-1])
    assert found is not None, printed
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_one_and_two_processes_end_with_the_same_fingerprint(name: str, tmp_path: Path) -> None:
    script = [str(EXAMPLES / f"{name}.py"), *SHORT[name]]
    alone = run(*script, cwd=tmp_path)
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name.startswith(f"{name}-")
    launch = ["-m", "evenstep", "run", "--processes", "2", "--run", "two"]
    two = run(*launch, *script, "--loaders", "1", cwd=tmp_path)
    assert fingerprint(two) == fingerprint(alone)
    assert json.loads(RunPaths(tmp_path / "two").finished.read_text())["fingerprint"] == fingerprint(two)
    assert RunPaths(tmp_path / "two").model.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers_end_with_the_same_fingerprint_in_stages(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / "transformers_gpt2.py"
    assert len(script.read_text().splitlines()) <= 40
    alone = run(str(script), name, "4", cwd=tmp_path)
    launch = ["-m", "evenstep", "run", "--processes", "2", "--stages", "2"]
    assert fingerprint(run(*launch, str(script), name, "4", cwd=tmp_path)) == fingerprint(alone)


@pytest.mark.slow
def test_digits_is_right_on_97_percent_of_what_it_has_not_seen(tmp_path: Path) -> None:
    run("-m", "evenstep", "run", "--processes", "2", "--run", "run", str(EXAMPLES / "digits.py"), cwd=tmp_path)
    values = [row["values"] for row in read_metrics(RunPaths(tmp_path / "run").metrics_jsonl)]
    assert [value["accuracy"] for value in values if "accuracy" in value][-1] >= 0.97


@pytest.mark.slow
def test_the_demo_ends_well_and_shows_equal_fingerprints(tmp_path: Path) -> None:
    printed = run(str(ROOT / "demo" / "demo.py"), "--epochs", "2", cwd=tmp_path)
    assert "4 layouts, one fingerprint" in printed
    assert "kill -9 of a process" in printed
    assert "3 layouts, 3 fingerprints" in printed
