"""Gradients of which a process has a part are not changed by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep.errors import UsageError
from tests.ranks import run_ranks
from tests.train.scripts import Pictures, classification, training_run


def half(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def half_uncounted(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.mul_(0.5)


def another(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def to_none(model: nn.Module) -> None:
    model.zero_grad()


CHANGES: list[Callable[[nn.Module], None]] = [half, half_uncounted, another]


def train(directory: Path, **layout: object) -> list[str]:
    said = []
    with training_run(directory, **layout) as run:
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        model = run.prepare(made)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in run.steps(Pictures(), steps=2):
            for change in CHANGES if step.number == 0 else (half, another):
                step.backward(classification)
                change(model)
                said += [
                    message(optimizer.step),
                    message(lambda: run.clip(1.0)),
                    message(partial(step.backward, classification)),
                ]
                model.zero_grad()
            for fine in (to_zero, to_none):
                step.backward(classification)
                step.backward(classification)
                run.clip(0.01)
                optimizer.step()
                fine(model)
                optimizer.step()
    return said


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as error:
        return error.message
    return ""


@pytest.mark.parametrize("layout", [{"stages": 2}, {"shard": True}])
def test_gradients_that_a_script_changes_are_refused(layout: dict[str, object], tmp_path: Path) -> None:
    for said in run_ranks(lambda: train(tmp_path, **layout), 2):
        assert len(said) == 15
        assert all(text.startswith("the gradients were changed after step.backward") for text in said), said
