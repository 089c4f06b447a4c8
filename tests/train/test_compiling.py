"""torch.compile: exact on any number of processes and after a resume, part of the identity, or refused by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from evenstep.errors import EvenstepError, IdentityError, UsageError
from evenstep.record.identity import read_identity
from evenstep.record.paths import RunPaths
from evenstep.train import compiling
from tests.ranks import run_ranks
from tests.train.layouts import CHECKPOINT, copy_checkpoint, each
from tests.train.scripts import Pictures, adamw, classification, fingerprints, training_run

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own

STEPS = 4
compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.last(self.dropout(torch.relu(self.first(images.flatten(1)))))
        return result


def compiled(model: nn.Module, **how: Any) -> nn.Module:
    model.compile(**how)
    return model


def train(
    directory: Path,
    options: Mapping[str, Any],
    before: Callable[[nn.Module], object] | None = None,
    after: Callable[[nn.Module], object] | None = None,
    **more: Any,
) -> list[str]:
    """`before`, `after`: what is done to the model before and after it is prepared."""
    given = {"global_batch": 12, "micro_batch": 3, "checkpoint_every": CHECKPOINT, "keep": STEPS, **options, **more}
    with training_run(directory, **given) as run:
        model = Net()
        if before is not None:
            before(model)
        model = run.prepare(model)
        if after is not None:
            after(model)
        optimizer = adamw(model.parameters())
        steps = run.steps(Pictures(17), steps=STEPS)  # every second step is ragged
        run.restore(model=model, optimizer=optimizer)
        for step in steps:
            step.backward(classification)
            optimizer.step()
            optimizer.zero_grad()
    return fingerprints(run)


def eager(model: nn.Module) -> None:
    model.compile(backend="eager")


def inductor(model: nn.Module) -> None:
    model.compile()


def first_layer(model: nn.Module) -> None:
    model.get_submodule("first").compile(backend="eager")


def train_all(options: Mapping[str, Any], directory: Path) -> dict[str, list[str]]:
    return {
        "not compiled": train(directory / "plain", options),
        "before": train(directory / "before", options, before=eager),
        "after": train(directory / "after", options, after=eager),
        "in part": train(directory / "part", options, before=first_layer),
    }


def test_compiled_models_are_the_same_on_every_number_of_processes(tmp_path: Path) -> None:
    alone = each("accumulate", train_all, tmp_path / "alone")[0]
    assert all(found == alone for found in each("2 processes", train_all, tmp_path / "two"))
    assert alone["before"] == alone["after"], "compiled before or after prepare: the same code"
    assert "compiled" not in (read_identity(RunPaths(tmp_path / "two" / "plain").identity) or {})


@compiler
@pytest.mark.slow
def test_inductor_is_exact_on_two_processes_and_after_a_resume(tmp_path: Path) -> None:
    """Its dropout too, which has random numbers of another kind, and the ragged micro-batch, which has its own code."""
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}

    def work(options: Mapping[str, Any], place: Path) -> list[str]:
        os.environ.update(settings)
        found = train(place, options, before=inductor)
        return found + train(copy, options, before=inductor) if copy.exists() else found

    copy = tmp_path / "copy"
    alone = each("accumulate", work, tmp_path / "alone")[0]
    copy_checkpoint(tmp_path / "alone", copy)
    for found in each("2 processes", work, tmp_path / "two"):
        assert found == [*alone, *alone[CHECKPOINT:]]
    saved = read_identity(RunPaths(copy).identity)
    assert saved is not None
    assert str(saved["compiled"]).startswith("inductor; ")


def alone(work: Callable[[], None]) -> None:
    """In a process of its own: torch's compiler leaves threads and files behind."""
    run_ranks(work, 1, timeout=100)


def test_a_run_does_not_go_on_compiled_in_another_way(tmp_path: Path) -> None:
    def others() -> None:
        for name, before, then in (("plain", None, eager), ("eager", eager, None), ("whole", eager, first_layer)):
            whole = train(tmp_path / name, {}, before=before)
            copy_checkpoint(tmp_path / name, tmp_path / f"{name} copy")
            with pytest.raises(IdentityError, match="compiled: "):
                train(tmp_path / f"{name} copy", {}, before=then)
            rest = train(tmp_path / f"{name} copy", {}, before=then, allow_other_identity=True)
            assert len(rest) == len(whole) - CHECKPOINT

    alone(others)


def test_each_shape_is_compiled_for_itself(tmp_path: Path) -> None:
    """Whatever came before it. More shapes than allowed are named, and afterwards torch compiles as before."""

    def shapes() -> None:
        from torch._dynamo import config
        from torch._inductor import config as inductor

        def settings() -> tuple[Any, ...]:
            return config.automatic_dynamic_shapes, config.recompile_limit, inductor.deterministic

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            seen.extend(tuple(i.shape) for i in inputs if isinstance(i, Tensor) and i.ndim == 4)
            assert not any(isinstance(i, torch.SymInt) for i in inputs)
            return graph.forward

        before, seen = settings(), list[Any]()
        train(tmp_path / "run", {}, before=lambda model: model.compile(backend=backend))
        assert seen == [(3, 1, 8, 8), (2, 1, 8, 8)], "nor is anything compiled for the checks of the first step"
        assert settings() == before
        compiling._SHAPES = config.recompile_limit = 1
        with pytest.raises(UsageError, match="more than 1 shapes"):
            train(tmp_path / "again", {}, before=eager)

    alone(shapes)


def test_code_that_depends_on_time_or_on_what_came_before_is_refused(tmp_path: Path) -> None:
    def refusals() -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"mode": "max-autotune"}, "fastest"),
            ({"dynamic": True}, "dynamic"),
        ]
        for number, (how, words) in enumerate(wrong):
            with training_run(tmp_path / str(number)) as run:
                with pytest.raises(UsageError, match=words):
                    run.prepare(compiled(Net(), **how))
                with pytest.raises(UsageError, match=words):
                    run.prepare(cast(nn.Module, torch.compile(Net(), **how)))
            with training_run(tmp_path / f"{number} not exact", exact=False) as run:
                run.prepare(compiled(Net(), **how))

    alone(refusals)


@pytest.mark.parametrize("layout", ["2 shards", "2 stages", "2 thread replicas", "split over 2 devices"])
def test_layouts_that_run_layers_one_by_one_refuse_compiled_models(layout: str, tmp_path: Path) -> None:
    def prepare(options: Mapping[str, Any], directory: Path) -> str:
        try:
            train(directory, options, before=eager)
        except EvenstepError as error:
            return str(error)
        return ""

    for said in each(layout, prepare, tmp_path):
        assert "is compiled" in said
        assert "leave torch.compile out" in said
