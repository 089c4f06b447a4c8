"""A disk that is really full: a file system of one megabyte, in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from evenstep.record.checkpoints import Checkpoints

SOURCE = Path(sys.modules[Checkpoints.__module__].__file__ or "").parents[2]


def on_a_small_disk(tmp_path: Path, script: str) -> str:
    """What `script` prints, run beside an empty disk of 1 MiB whose path is its first argument."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a small disk can only be mounted by root")
    mount = f"mount -t tmpfs -o size=1m tmpfs {disk}"
    tried = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {tried.stderr.strip()}")
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            f'{mount} && exec "$@"',
            "sh",
            sys.executable,
            "-c",
            textwrap.dedent(script),
            str(disk),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
