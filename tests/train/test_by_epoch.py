"""`steps.by_epoch()`: the two loops of a script as it was, with the steps, checkpoints and bits of the one loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from evenstep.errors import UsageError
from evenstep.record.metrics import read_metrics
from evenstep.record.paths import RunPaths
from tests.ranks import run_ranks
from tests.train.scripts import fingerprints, training_run

DATA = TensorDataset(torch.randn(20, 2, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3)


def loss_fn(model: nn.Module, batch: Any) -> Any:
    inputs, labels = batch
    out = model(inputs)
    return F.cross_entropy(out, labels, reduction="sum"), len(labels), {"right": ((out.argmax(1) == labels).sum(), 1)}


def train(
    directory: Path,
    nested: bool,
    body: Callable[[Any], None] = lambda step: None,
    after: Callable[[int], bool] = lambda epoch: False,
    how: Mapping[str, Any] | None = None,
) -> tuple[list[str], list[Any]]:
    """Fingerprints of the steps, and the epochs after which `state` was written, as this run knew them at its end."""
    with training_run(directory, global_batch=8) as run:
        model = run.prepare(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        steps = run.steps(DATA, **(how or {"epochs": 3}))
        state = run.restore(model=model, optimizer=optimizer, seen=[])

        def one(step: Any) -> None:
            result = step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=result.loss)
            body(step)

        def validate(epoch: int) -> bool:
            state.seen = [*state.seen, (epoch, run.evaluate(DATA, loss_fn)["loss"])]
            run.log(seen=len(state.seen))
            return after(epoch)

        if nested:
            for epoch, steps_of_epoch in steps.by_epoch():
                for step in steps_of_epoch:
                    one(step)
                if validate(epoch):
                    break
        else:
            for step in steps:
                one(step)
                if (step.ends_epoch or step.number + 1 == len(steps)) and validate(step.epoch):
                    break
    return fingerprints(run), state.seen


def finished(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RunPaths(directory).finished.read_text())
    return found


@pytest.mark.parametrize("how", [{"epochs": 3}, {"steps": 8}], ids=str)
def test_two_loops_are_the_one_loop(how: dict[str, int], tmp_path: Path) -> None:
    one = train(tmp_path / "one", False, how=how)
    assert len(one[0]) == {"epochs": 9, "steps": 8}[next(iter(how))]
    assert train(tmp_path / "two", True, how=how) == one
    rows = [list(read_metrics(RunPaths(tmp_path / name).metrics_jsonl)) for name in ("one", "two")]
    assert rows[0] == rows[1]
    assert finished(tmp_path / "one") == finished(tmp_path / "two")
    assert run_ranks(train, 2, tmp_path / "ranks", True, timeout=30) == [train(tmp_path / "alone", True)] * 2


@pytest.mark.parametrize("at", [4, 5])
def test_what_follows_the_inner_loop_is_in_the_epochs_checkpoint(at: int, tmp_path: Path) -> None:
    """Step 5 ends an epoch: stopped after it, nothing is left of that; stopped before, the epoch is done again."""

    def stop(step: Any) -> None:
        if step.number == at + 1:
            raise RuntimeError("stop")

    whole = train(tmp_path / "whole", True)
    with pytest.raises(RuntimeError, match="stop"):
        train(tmp_path / "cut", True, stop)
    again = train(tmp_path / "cut", True)
    assert again[1] == whole[1]
    rest = whole[0][3 if at == 4 else 6 :]
    assert again[0] == [*whole[0][: at + 1], *rest]  # what was done before the stop, and after it


def test_break_of_the_outer_loop_ends_the_run(tmp_path: Path) -> None:
    one = train(tmp_path / "one", False, after=lambda epoch: epoch == 1)
    assert train(tmp_path / "two", True, after=lambda epoch: epoch == 1) == one
    assert finished(tmp_path / "two") == finished(tmp_path / "one")
    assert finished(tmp_path / "two")["left early"]


def two_loops(directory: Path, inner: Callable[[Any], bool], outer: Callable[[Any], bool]) -> Any:
    with training_run(directory, global_batch=8) as run:
        model = run.prepare(nn.Linear(2, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps = run.steps(DATA, epochs=3)
        run.restore(model=model, optimizer=optimizer)
        for _, steps_of_epoch in steps.by_epoch():
            for step in steps_of_epoch:
                step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()
                if inner(step):
                    break
            if outer(step):
                break
    return finished(directory)


def test_both_loops_may_be_left(tmp_path: Path) -> None:
    found = two_loops(tmp_path / "both", lambda step: step.number == 4, lambda step: step.number == 4)
    assert (found["step"], found["left early"]) == (5, True)
    found = two_loops(tmp_path / "last", lambda step: step.ends_epoch, lambda step: False)
    assert (found["step"], found["left early"]) == (9, False)


def test_an_epoch_that_is_left_in_the_middle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="left in step 1, before the end of epoch 0"):
        two_loops(tmp_path, lambda step: step.number == 1, lambda step: False)


def test_a_step_is_no_batch(tmp_path: Path) -> None:
    with training_run(tmp_path, global_batch=8) as run:
        run.prepare(nn.Linear(2, 3))
        first = next(iter(run.steps(DATA, epochs=1)))
        with pytest.raises(UsageError, match="step 0 was taken for a batch") as caught:
            list(first)
        assert "result = step.backward(loss_fn)" in str(caught.value)
