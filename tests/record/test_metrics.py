from __future__ import annotations

import csv
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evenstep.record.metrics import MetricsWriter, read_metrics
from evenstep.record.paths import RunPaths
from evenstep.record.tensorboard import ScalarWriter


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def table(paths: RunPaths) -> list[list[str]]:
    with paths.metrics_csv.open(newline="") as file:
        return list(csv.reader(file))


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_the_three_forms_say_the_same(paths: RunPaths) -> None:
    writer = MetricsWriter(paths)
    writer.write(1, 0, {"loss": 0.1, "lr": 1e-3})
    writer.write(2, 0, {"lr": 2e-3, "loss": 1 / 3})
    # All is there before the writer is closed.
    assert list(read_metrics(paths.metrics_jsonl)) == [
        {"v": 1, "step": 1, "epoch": 0, "values": {"loss": 0.1, "lr": 1e-3}},
        {"v": 1, "step": 2, "epoch": 0, "values": {"loss": 1 / 3, "lr": 2e-3}},
    ]
    assert table(paths) == [
        ["step", "epoch", "loss", "lr"],
        ["1", "0", "0.1", "0.001"],
        ["2", "0", str(1 / 3), "0.002"],
    ]
    third = struct.unpack("<f", struct.pack("<f", 1 / 3))[0]
    assert curves(paths.tensorboard)["loss"][1] == (2, third)
    assert [step for step, _ in curves(paths.tensorboard)["lr"]] == [1, 2]
    writer.close()


def test_columns_that_appear_later_are_added_to_the_csv(paths: RunPaths) -> None:
    writer = MetricsWriter(paths)
    writer.write(1, 0, {"loss": 3})
    writer.write(2, 1, {"loss": 2, "test, accuracy": 0.5})
    writer.write(3, 1, {"loss": 1})
    writer.write(3, 1, {"grad": 7})
    writer.close()
    assert table(paths) == [
        ["step", "epoch", "loss", "test, accuracy", "grad"],
        ["1", "0", "3.0", "", ""],
        ["2", "1", "2.0", "0.5", ""],
        ["3", "1", "1.0", "", ""],
        ["3", "1", "", "", "7.0"],
    ]


def test_values_that_are_not_finite(paths: RunPaths) -> None:
    writer = MetricsWriter(paths)
    writer.write(1, 0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300})
    writer.close()
    (row,) = read_metrics(paths.metrics_jsonl)
    assert math.isnan(row["values"].pop("a"))
    assert row["values"] == {"b": math.inf, "c": -math.inf, "d": 1e300}
    json.loads(paths.metrics_jsonl.read_text(), parse_constant=pytest.fail)
    assert table(paths)[1] == ["1", "0", "nan", "inf", "-inf", "1e+300"]
    assert curves(paths.tensorboard)["d"] == [(1, math.inf)]  # float32 is all it has


def test_a_run_that_goes_on_writes_each_step_once(paths: RunPaths) -> None:
    writer = MetricsWriter(paths)
    for step in range(1, 8):
        writer.write(step, 0, {"loss": step, **({"late": 1} if step == 7 else {})})
    writer.close()
    with paths.metrics_jsonl.open("ab") as file:
        file.write(b'{"v":1,"step":8,"epo')  # it died here
    with paths.metrics_csv.open("ab") as file:
        file.write(b"8,0,")

    writer = MetricsWriter(paths)
    writer.cut(5)
    assert [row["step"] for row in read_metrics(paths.metrics_jsonl)] == [1, 2, 3, 4, 5]
    assert [row[0] for row in table(paths)[1:]] == ["1", "2", "3", "4", "5"]
    for step in range(6, 10):
        writer.write(step, 0, {"loss": step})
    writer.close()
    assert [row["step"] for row in read_metrics(paths.metrics_jsonl)] == list(range(1, 10))
    assert table(paths) == [["step", "epoch", "loss"], *([str(s), "0", f"{s}.0"] for s in range(1, 10))]
    assert curves(paths.tensorboard)["loss"] == [(step, float(step)) for step in range(1, 10)]


def test_a_second_resume_hides_what_the_first_one_wrote(paths: RunPaths) -> None:
    for start in (0, 4, 2):
        writer = MetricsWriter(paths)
        writer.cut(start)
        for step in range(start + 1, 7):
            writer.write(step, 0, {"loss": 10 * start + step})
        writer.close()
    assert curves(paths.tensorboard)["loss"] == [(step, 20 * (step > 2) + step) for step in range(1, 7)]


def test_a_run_that_goes_on_without_a_cut_keeps_its_table_whole(paths: RunPaths) -> None:
    writer = MetricsWriter(paths)
    writer.write(1, 0, {"loss": 1})
    writer.close()
    with paths.metrics_csv.open("ab") as file:
        file.write(b"2,")
    writer = MetricsWriter(paths)
    writer.write(2, 0, {"loss": 2})
    writer.close()
    assert table(paths) == [["step", "epoch", "loss"], ["1", "0", "1.0"], ["2", "0", "2.0"]]


def test_a_cut_of_nothing_makes_nothing(paths: RunPaths) -> None:
    writer = MetricsWriter(paths)
    writer.cut(0)
    writer.close()
    assert list(paths.root.iterdir()) == []


def test_a_full_disk_is_told_once_and_the_table_catches_up(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    writer = MetricsWriter(paths, on_error=told.append)
    writer.write(1, 0, {"loss": 1})

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        writer.write(2, 0, {"loss": 2})
        writer.write(3, 0, {"loss": 3, "new": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        writer.write(4, 0, {"loss": 4, "newer": 1})  # the lines get through, the new table does not
    writer.write(5, 0, {"loss": 5})
    writer.close()
    assert len(told) == 1
    assert "metrics.jsonl: No space left" in told[0]
    assert [row[0] for row in table(paths)[1:]] == ["1", "4", "5"]
    assert table(paths)[0] == ["step", "epoch", "loss", "newer"]
    assert [step for step, _ in curves(paths.tensorboard)["loss"]] == [1, 4, 5]


@given(
    st.lists(
        st.tuples(st.integers(0, 2**40), st.text(min_size=1), st.floats(width=32, allow_nan=False)),
        max_size=20,
        unique_by=lambda point: point[:2],
    )
)
def test_tensorboard_reads_any_point(points: list[tuple[int, str, float]]) -> None:
    points = [(step, name.encode("utf-8", "ignore").decode() or "x", value) for step, name, value in points]
    with tempfile.TemporaryDirectory() as folder:
        writer = ScalarWriter(Path(folder))
        for step, name, value in points:
            writer.write(step, {name: value})
        writer.close()
        got = sorted((step, name, value) for name, curve in curves(Path(folder)).items() for step, value in curve)
    assert got == sorted(points)


def test_tensorboard_is_imported_for_the_first_value_and_has_no_thread(tmp_path: Path) -> None:
    script = """if True:
        import sys, threading
        from pathlib import Path
        from evenstep.record.metrics import MetricsWriter
        from evenstep.record.paths import RunPaths
        paths = RunPaths(Path(sys.argv[1]))
        for start in (0, 1):
            writer = MetricsWriter(paths)
            writer.cut(start)
            print("tensorboard" in sys.modules)
            writer.write(start + 1, 0, {"loss": 1.0})
            print("tensorboard" in sys.modules, "torch" in sys.modules, threading.active_count())
            writer.close()
    """
    run = [sys.executable, "-W", "error", "-c", script, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "True False 1", "True", "True False 1"]
    assert done.stderr == ""
