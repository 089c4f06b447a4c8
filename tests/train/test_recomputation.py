"""Activation checkpointing: what is computed again draws what was drawn before, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from evenstep.errors import EvenstepError
from tests.train.layouts import each
from tests.train.scripts import Pictures, adamw, classification, fingerprints, training_run


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.3))


class Net(nn.Module):
    """`call(block, x)` calls its blocks."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1))
        for block in self.blocks:
            x = self.call(block, x)
        result: Tensor = self.head(x)
        return result


class Part(nn.Module):
    """A block of which only the inner part is computed again."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.inner, self.arguments = Block(), arguments

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + checkpoint(self.inner, x, use_reentrant=False, **self.arguments)
        return result


def policy(saved: list[Any], _: Any, operation: Any, *args: Any, **more: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE


def saving(*operations: Any) -> dict[str, Any]:
    return {"context_fn": partial(create_selective_checkpoint_contexts, partial(policy, list(operations)))}


def again(**arguments: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda block, x: checkpoint(block, x, **{"use_reentrant": False, **arguments})


def twice(block: nn.Module, x: Tensor) -> Tensor:
    """Shared weights in two checkpoints."""
    once = again(use_reentrant=True)
    return once(block, once(block, x))


def parts(**arguments: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), *(Part(**arguments) for _ in range(3)), nn.Linear(64, 10))


def train(directory: Path, options: Mapping[str, Any], model: nn.Module) -> list[str]:
    with training_run(directory, **options) as run:
        run.prepare(model)
        optimizer = adamw(model.parameters())
        for step in run.steps(Pictures(20), steps=3):
            step.backward(classification)
            optimizer.step()
            optimizer.zero_grad()
    return fingerprints(run)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


SAME: dict[str, Callable[[], nn.Module]] = {
    "as it is": lambda: Net(lambda block, x: block(x)),
    "checkpoint": lambda: Net(again()),
    "not stopped early": lambda: Net(again(early_stop=False)),
    "selective": lambda: Net(again(**saving(torch.ops.aten.mm.default, torch.ops.aten.addmm.default))),
    "reentrant": lambda: Net(again(use_reentrant=True)),
    "nothing drawn": lambda: Net(again(preserve_rng_state=False)).apply(no_dropout),
    "nothing drawn, as it is": lambda: Net(lambda block, x: block(x)).apply(no_dropout),
}
"""Names of forms of one model; those that draw nothing are another."""

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "blocks": (lambda: Net(again(preserve_rng_state=False)), "preserve_rng_state"),
    "stopped at the end": (lambda: Net(again(preserve_rng_state=False, early_stop=False)), "preserve_rng_state"),
    "part of a block": (lambda: parts(preserve_rng_state=False), "preserve_rng_state"),
    "shared weights, reentrant": (lambda: Net(twice), "use_reentrant=False"),
}


def no_dropout(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.0


def train_all(options: Mapping[str, Any], directory: Path) -> dict[str, list[str] | str]:
    found: dict[str, list[str] | str] = {}
    for name, make in {**SAME, **{name: make for name, (make, _) in REFUSED.items()}}.items():
        try:
            found[name] = train(directory / name, options, seeded(make))
        except EvenstepError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str] | str]:
    found: dict[str, list[str] | str] = each("accumulate", train_all, tmp_path_factory.mktemp("alone"))[0]
    return found


def check(found: dict[str, list[str] | str], alone: dict[str, list[str] | str], refused: Mapping[str, str]) -> None:
    for name in SAME:
        without = "nothing drawn, as it is" if name.startswith("nothing") else "as it is"
        if name in refused:
            assert refused[name] in found[name], name
        else:
            assert found[name] == found[without] == alone[without], name
    assert found["nothing drawn"] != found["as it is"]
    for name, (_, words) in REFUSED.items():
        assert isinstance(found[name], str), name
        assert refused.get(name, words) in found[name], name


def test_recomputation_changes_no_bit_or_is_refused(alone: dict[str, list[str] | str]) -> None:
    check(alone, alone, {})


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("layout", "refused"),
    [
        ("2 processes", {}),
        ("2 thread replicas", {}),
        ("2 shards", {}),
        (
            "2 stages",
            {"reentrant": "reentrant activation checkpointing", "shared weights, reentrant": "called a second time"},
        ),
    ],
)
def test_so_it_is_on_every_layout(
    layout: str, refused: Mapping[str, str], alone: dict[str, list[str] | str], tmp_path: Path
) -> None:
    for found in each(layout, train_all, tmp_path):
        check(found, alone, refused)
