"""What a disk that is really full does to what a run records."""

from __future__ import annotations

from pathlib import Path

from tests.record.small_disk import on_a_small_disk


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
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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
        curves = EventAccumulator(str(paths.tensorboard))
        curves.Reload()
        points = [point.step for point in curves.Scalars("loss")]
        assert points[0] == 1 and points[-1] == 200 and len(points) < 199, len(points)
        print(*told, sep="\\n")
        """,
    )
    assert len(out.splitlines()) == 2
    assert "rank-0.jsonl: No space left on device" in out
    assert "metrics" in out
