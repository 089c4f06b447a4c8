"""Gradients of which a process has a part are not changed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import EvenstepError, UsageError
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
    except EvenstepError as error:
        return error.message
    return ""


@pytest.mark.parametrize("layout", [{"stages": 2}, {"shard": True}])
def test_gradients_that_a_script_changes_are_refused(layout: dict[str, object], tmp_path: Path) -> None:
    for said in run_ranks(lambda: train(tmp_path, **layout), 2):
        assert len(said) == 15
        assert all(text.startswith("the gradients were changed after step.backward") for text in said), said


def penalty(model: nn.Module, batch: Any) -> Any:
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum(), len(x)


def penalised(directory: Path, **layout: object) -> str:
    said = ""
    with training_run(directory, **layout) as run:
        model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Softplus(), nn.Linear(16, 10)))
        for step in run.steps(Pictures(), steps=1):
            said = message(partial(step.backward, penalty, model))
            step.backward(classification)
    return said


@pytest.mark.parametrize("layout", [{"stages": 2}, {"shard": True}])
def test_gradients_inside_a_loss_are_refused(layout: dict[str, object], tmp_path: Path) -> None:
    for said in run_ranks(lambda: penalised(tmp_path, **layout), 2):
        assert "gradients inside a loss" in said, said


def copied(directory: Path) -> list[str]:
    with training_run(directory, shard=True) as run:
        model = run.prepare(nn.Sequential(nn.Linear(4, 4)))
        said = [message(partial(copy.deepcopy, model)), message(partial(torch.optim.swa_utils.AveragedModel, model))]
        last = nn.Conv2d(4, 4, 3)
        last.weight.data = last.weight.data.contiguous(memory_format=torch.channels_last)
        try:
            run.prepare(nn.Sequential(last))
        except UsageError as error:
            said.append(str(error.do))
    return said


def test_copies_and_channels_last_are_refused_by_name(tmp_path: Path) -> None:
    for one, two, three in run_ranks(lambda: copied(tmp_path), 2):
        assert one == two
        assert one.startswith("the Sequential is copied (copy.deepcopy, AveragedModel) after run.prepare")
        assert three.startswith("leave channels_last out with --shard")
