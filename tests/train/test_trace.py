"""A step that is traced, and a run that is stopped: what `evenstep prove` asks of a training process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenstep.record.events import read_events
from evenstep.record.paths import RunPaths
from tests.ranks import run_ranks
from tests.train.scripts import train_cnn

ASKED = {"EVENSTEP_STOP_AFTER": "3", "EVENSTEP_TRACE_STEP": "1"}


def stopped(directory: Path) -> str:
    with pytest.raises(SystemExit) as ended:
        train_cnn(directory)
    return str(ended.value.code)


def places(events: list[dict[str, Any]], kind: str) -> dict[tuple[Any, ...], str]:
    """What was hashed, by micro-batch, module and call."""
    return {
        (e["micro_batch"], e.get("module"), e.get("nth")): f"{e.get('got')} {e['hash']}"
        for e in events
        if e["kind"] == kind
    }


def test_a_run_is_stopped_and_goes_on_and_a_step_is_traced_alike_on_two_processes(tmp_path: Path) -> None:
    assert run_ranks(stopped, 1, tmp_path / "one", env=ASKED) == ["0"]
    assert run_ranks(stopped, 2, tmp_path / "two", env={**ASKED, "EVENSTEP_CHECKPOINT_EVERY": "3"}) == ["0", "0"]
    one, two = RunPaths(tmp_path / "one"), RunPaths(tmp_path / "two")
    alone, left, right = (read_events(path) for path in (one.trace(0), two.trace(0), two.trace(1)))
    for kind in ("batch", "forward", "loss", "backward"):
        together = {**places(left, kind), **places(right, kind)}
        assert places(alone, kind) == together
        assert not places(left, kind).keys() & places(right, kind).keys()
    modules = [e["module"] for e in alone if e["kind"] == "forward" and e["micro_batch"] == 0]
    assert modules == [
        *("features.0", "features.1", "features.2", "features.3", "features"),
        *("classify.0", "classify.1", "classify.2", "classify", "Convolutions"),
    ]
    for kind in ("state", "gradients", "optimizer"):
        said = [[e["hashes"] for e in events if e["kind"] == kind] for events in (alone, left, right)]
        assert said[0] == said[1] == said[2]
        assert said[0]
    before, after = [e["hashes"] for e in alone if e["kind"] == "state"]
    changed = {path.partition("\0")[0] for path in after if before.get(path) != after[path]}
    assert changed >= {"model.classify.2.weight"}
    assert not one.finished.exists()
    assert not one.checkpoints.exists()  # nobody asked for one
    (gone_on,) = run_ranks(train_cnn, 1, tmp_path / "two")
    assert gone_on[2] == run_steps(one)[2]
    assert two.finished.exists()
    assert len(gone_on) == 8


def run_steps(paths: RunPaths) -> list[str]:
    return [e["fingerprint"] for e in read_events(paths.events(0)) if e["kind"] == "step"]
