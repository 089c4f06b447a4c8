from __future__ import annotations

import threading
from pathlib import Path

import pytest

from evenstep.errors import MachineError
from evenstep.record.paths import RunPaths, checkpoint_step, new_run_directory


def test_every_path_is_named_once(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    named = [
        paths.identity, paths.events(0), paths.events(1), paths.launcher_events, paths.log(0), paths.log(1),
        paths.metrics_jsonl, paths.metrics_csv, paths.tensorboard, paths.checkpoints, paths.checkpoint(1),
        paths.finished, paths.model,
    ]  # fmt: skip
    assert len(set(named)) == len(named)
    assert all(tmp_path in path.parents for path in named)
    assert paths.events(0) == tmp_path / "events" / "rank-0.jsonl"
    assert paths.log(3) == tmp_path / "logs" / "rank-3.log"


@pytest.mark.parametrize("step", [0, 7, 10**9, 10**12])
def test_a_checkpoints_name_gives_its_step(step: int) -> None:
    assert checkpoint_step(RunPaths(Path("r")).checkpoint(step).name) == step


@pytest.mark.parametrize("name", ["step-1", "step-0000000001.aside", ".step-0000000001", "tmp", "step-"])
def test_other_names_are_no_checkpoint(name: str) -> None:
    assert checkpoint_step(name) is None


def test_a_new_run_directory_is_named_after_the_script(tmp_path: Path) -> None:
    path = new_run_directory("/some where/my train!.py", tmp_path)
    assert path.is_dir()
    assert path.parent == tmp_path / "runs"
    assert path.name.startswith("my-train-2")
    assert new_run_directory(None, tmp_path).name.startswith("run-")


def test_starts_at_one_moment_get_directories_of_their_own(tmp_path: Path) -> None:
    got: list[Path] = []
    threads = [
        threading.Thread(target=lambda: got.extend(new_run_directory("a.py", tmp_path) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 80


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(MachineError, match=r"runs.*\n.*--run"):
        new_run_directory("a.py", tmp_path)
