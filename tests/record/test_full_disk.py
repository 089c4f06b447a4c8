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


def test_a_full_disk_leaves_the_older_checkpoint_and_no_leftovers(tmp_path: Path) -> None:
    out = on_a_small_disk(
        tmp_path,
        """
        import os, sys
        from pathlib import Path
        from evenstep.errors import MachineError
        from evenstep.record.checkpoints import Checkpoints
        from evenstep.record.paths import RunPaths
        root = Path(sys.argv[1])
        checkpoints = Checkpoints(RunPaths(root))
        checkpoints.write(1, lambda folder: (folder / "a").write_bytes(b"x" * 400_000) and None, {})
        free = os.statvfs(root).f_bavail
        try:
            checkpoints.write(2, lambda folder: (folder / "a").write_bytes(b"x" * 900_000) and None, {})
        except MachineError as error:
            print(error)
        assert os.statvfs(root).f_bavail == free, "something was left"
        assert [path.name for path in checkpoints.folder(0).parent.iterdir()] == ["step-0000000001"]
        assert checkpoints.newest_whole() == (1, {})
        checkpoints.write(2, lambda folder: (folder / "a").write_bytes(b"x" * 300_000) and None, {})
        assert checkpoints.newest_whole() == (2, {})
        """,
    )
    assert "step-0000000002: No space left on device" in out


def test_a_full_disk_does_not_stop_events_and_metrics(tmp_path: Path) -> None:
    out = on_a_small_disk(
        tmp_path,
        """
        import sys
        from pathlib import Path
        from evenstep.record.events import EventWriter, read_events
        from evenstep.record.metrics import MetricsWriter, read_metrics
        from evenstep.record.paths import RunPaths
        paths = RunPaths(Path(sys.argv[1]))
        told = []
        events = EventWriter(paths.events(0), 0, on_error=told.append)
        metrics = MetricsWriter(paths, on_error=told.append)
        events.emit("start")
        metrics.write(1, 0, {"loss": 1.0})
        ballast = paths.root / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1000))
            except OSError:
                pass
        for step in range(2, 200):
            events.emit("step", number=step, text="x" * 100)
            metrics.write(step, 0, {"loss": 1.0, "more": 2.0})
        ballast.unlink()
        events.emit("end")
        metrics.write(200, 0, {"loss": 0.5, "more": 1.0})
        kinds = [event["kind"] for event in read_events(paths.events(0))]
        assert kinds[0] == "start" and kinds[-1] == "end" and len(kinds) < 200, len(kinds)
        steps = [row["step"] for row in read_metrics(paths.metrics_jsonl)]
        assert steps[0] == 1 and steps[-1] == 200 and len(steps) < 199, len(steps)
        rows = paths.metrics_csv.read_text().splitlines()
        assert [int(row.split(",")[0]) for row in rows[1:]] == steps
        print(*told, sep="\\n")
        """,
    )
    assert len(out.splitlines()) == 2
    assert "rank-0.jsonl: No space left on device" in out
    assert "metrics" in out
