"""What the README and docs/script.md show runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page import Page

ROOT = Path(__file__).parent.parent
((SCRIPT,), (API,)) = ([b.text for b in Page(ROOT / name).blocks] for name in ("README.md", "docs/script.md"))


def command(*words: str, cwd: Path) -> list[str]:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_script_gives_one_fingerprint_by_every_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    alone = command(sys.executable, "train.py", cwd=tmp_path)
    assert re.fullmatch(r"fingerprint: [0-9a-f]{16}", alone[-1])
    assert alone[3].startswith("epoch 3: 0.9"), alone
    launcher = [sys.executable, "-m", "evenstep", "run", "--processes", "3"]
    assert command(*launcher, "train.py", cwd=tmp_path) == alone
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert command(*torchrun, "train.py", cwd=tmp_path) == alone


@pytest.mark.slow
def test_the_api_is_as_shown(tmp_path: Path) -> None:
    before, loop = SCRIPT.split("run = evenstep.start(")
    start = "run = evenstep.start(" + loop.split("steps = run.steps(")[0]
    shown = API.replace("run.steps(data, epochs=3)", "steps = run.steps(data, epochs=3)")
    said = "data = test_set\nfn = correct_fn\nx = torch.ones(2)\n"
    said += shown.replace("run.predict(data, fn)", "run.predict(data, lambda model, batch: model(batch[0]))")
    (tmp_path / "api.py").write_text(before + start + said + "assert len(steps) == 15\n")
    command(sys.executable, "-m", "evenstep", "run", "--processes", "2", "api.py", cwd=tmp_path)
