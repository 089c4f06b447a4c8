"""Mixed precision: the same bits on every layout, overflows that nobody notices, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.errors import IdentityError, UsageError
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from tests.ranks import run_ranks
from tests.train.scripts import Pictures, fingerprints, train_cnn, train_transformer, training_run

STEPS = 6


def numbers(length: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(length, 12, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (length,), generator=generator))


def network(dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def gradient(model: nn.Sequential) -> Tensor:
    """Of the first layer."""
    found = model[0].weight.grad
    assert isinstance(found, Tensor)
    return found


def loss_fn(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def too_large(model: nn.Module, batch: Any) -> Any:
    total, weight = loss_fn(model, batch)
    return total * 1e4, weight


def train(directory: Path, large_at: int | None = None, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """What each step left: fingerprint, loss scale, whether gradients were finite, how often the loss was computed."""
    found: dict[str, Any] = {"scales": [], "finite": [], "calls": []}
    with training_run(directory, **options) as run:
        model = run.prepare(network())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loop = run.steps(numbers(), steps=steps)
        run.restore(model=model, optimizer=optimizer)
        for step in loop:
            calls = 0

            def counted(model: nn.Module, batch: Any, large: bool = step.number == large_at) -> Any:
                nonlocal calls
                calls += model.training
                return (too_large if large else loss_fn)(model, batch)

            step.backward(counted)
            scaler = run._precision.scaler
            found["scales"].append(None if scaler is None else scaler.scale)
            found["finite"].append(all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()))
            found["calls"].append(calls)
            optimizer.step()
            optimizer.zero_grad()
    return {**found, "fingerprints": fingerprints(run)}


@pytest.mark.parametrize(
    ("training", "precision", "world_size"),
    [(train_cnn, "bf16", 2), (train_cnn, "fp16", 3), (train_transformer, "bf16", 3), (train_transformer, "fp16", 2)],
)
def test_the_same_bits_on_several_processes(training: Any, precision: str, world_size: int, tmp_path: Path) -> None:
    expected = training(tmp_path / "alone", precision=precision)
    assert len(set(expected)) == len(expected) > 5
    assert run_ranks(lambda: training(tmp_path / "run", precision=precision), world_size) == [expected] * world_size


def test_weights_and_gradients_stay_float32_and_what_computes_does_not(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def watched(model: nn.Module, batch: Any) -> Any:
        seen.append(model(batch[0]).dtype)
        return loss_fn(model, batch)

    with training_run(tmp_path, precision="bf16") as run:
        model = run.prepare(network())
        for step in run.steps(numbers(), steps=1):
            step.backward(watched)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        run.evaluate(numbers(), watched)
        outputs = run.predict(numbers(), lambda model, batch: model(batch[0]))
    assert set(seen) == {torch.bfloat16}
    assert outputs.dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_gradients_of_a_weights_uses_are_added_in_float32(tmp_path: Path) -> None:
    """Autocast's cache would add them in bfloat16: on two pipeline stages that could not be done."""
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))

    def twice(model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) + model(3 * batch[0])).float().square().sum(), None

    with training_run(tmp_path, precision="bf16", global_batch=8, micro_batch=8) as run:
        model = run.prepare(nn.Linear(12, 5, bias=False))
        for step in run.steps(TensorDataset(x), steps=1, shuffle=False):
            step.backward(twice)
    grad = model.weight.grad
    assert grad is not None
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected, _ = twice(model, [x])
    (exact,) = torch.autograd.grad(expected, [model.weight])
    assert torch.equal(grad, exact)
    assert not torch.equal(grad, grad.bfloat16().float())


def test_the_scale_changes_no_bit_where_nothing_overflows(tmp_path: Path) -> None:
    """In float32 parts of a model it is exact: a power of two."""

    def plain(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return loss_fn(model, batch)

    def gradients(precision: str, weighted: bool) -> list[Tensor | None]:
        with training_run(tmp_path / f"{precision} {weighted}", precision=precision) as run:
            model = run.prepare(network())
            for step in run.steps(numbers(), steps=1):
                step.backward(plain if weighted else lambda model, batch: (plain(model, batch)[0] / 16, None))
            return [p.grad for p in model.parameters()]

    for weighted in (True, False):
        for one, other in zip(gradients("fp32", weighted), gradients("fp16", weighted), strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_an_overflow_is_computed_again_at_a_smaller_scale_on_every_layout(tmp_path: Path) -> None:
    expected = train(tmp_path / "alone", large_at=2, precision="fp16")
    begun, after = expected["scales"][1], expected["scales"][2]
    assert begun == 2.0**16
    assert after < begun / 100
    assert expected["scales"][3:] == [after] * 3, "nothing overflows any more"
    again = round(torch.log2(torch.tensor(begun / after)).item())
    assert expected["calls"] == [8, 8, 8 * (again + 1), 8, 8, 8], (
        "every attempt is a whole step, and no step is skipped"
    )
    assert all(expected["finite"])
    for number, (world_size, layout) in enumerate(((3, {}), (2, {"stages": 2}), (1, {"thread_replicas": 2}))):
        directory = tmp_path / str(number)
        several = run_ranks(lambda d=directory, o=layout: train(d, large_at=2, precision="fp16", **o), world_size)
        for found in several:
            assert found["fingerprints"] == expected["fingerprints"]
            assert found["scales"] == expected["scales"]


class Steep(torch.autograd.Function):
    """The identity, whose gradient is much larger."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1e4


class Slope(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Steep.apply(x)  # type: ignore[no-untyped-call]
        return result


def test_an_overflow_on_one_stage_alone_is_one_for_all(tmp_path: Path) -> None:
    def script(directory: Path, **options: Any) -> tuple[list[str], float]:
        with training_run(directory, precision="fp16", **options) as run:
            model = run.prepare(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), Slope(), nn.Linear(16, 4)))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in run.steps(numbers(), steps=2):
                step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()
            assert run._precision.scaler is not None
            return fingerprints(run), run._precision.scaler.scale

    expected = script(tmp_path / "alone")
    assert expected[1] < 2.0**15
    assert run_ranks(lambda: script(tmp_path / "run", stages=2), 2) == [expected] * 2


def test_gradients_from_before_are_kept_while_a_step_is_computed_again(tmp_path: Path) -> None:
    def gradients(large: bool) -> tuple[Tensor, Tensor]:
        with training_run(tmp_path / str(large), precision="fp16", fingerprints=False) as run:
            model = run.prepare(network(dropout=0.0))
            found = []
            for step in run.steps(numbers(), steps=1):
                for fn in (loss_fn, too_large) if large else (loss_fn, loss_fn):
                    step.backward(fn)
                    found.append(gradient(model).clone())
            return found[0], found[1]

    first, _ = gradients(False)
    again, both = gradients(True)
    assert torch.equal(first, again)
    torch.testing.assert_close(both - first, first * 1e4, rtol=0.02, atol=1.0)


def test_a_loss_that_is_not_a_number_passes_through_at_once_and_a_gradient_after_some_attempts(tmp_path: Path) -> None:
    calls = 0

    def broken_loss(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += model.training
        total, weight = loss_fn(model, batch)
        return total * float("nan"), weight

    def broken_gradient(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += model.training
        total, weight = loss_fn(model, batch)
        return total + (next(model.parameters()) * 0.0).float().sum().sqrt(), weight  # 0 * inf

    with training_run(tmp_path, precision="fp16", fingerprints=False) as run:
        model = run.prepare(network())
        for step in run.steps(numbers(), steps=1):
            for broken, attempts in ((broken_loss, 1), (broken_gradient, 20)):
                calls = 0
                step.backward(broken)
                assert calls == 8 * attempts
                assert gradient(model).isnan().any()
                assert run._precision.scaler is not None
                assert run._precision.scaler.scale == 2.0**16
                model.zero_grad()


def test_a_failure_puts_gradients_and_scale_back(tmp_path: Path) -> None:
    def failing(model: nn.Module, batch: Any) -> Any:
        raise RuntimeError("this sample cannot be had")

    with training_run(tmp_path, precision="fp16", fingerprints=False) as run:
        model = run.prepare(network())
        for step in run.steps(numbers(), steps=1):
            step.backward(loss_fn)
            before = [p.grad for p in model.parameters()]
            with pytest.raises(RuntimeError, match="cannot be had"):
                step.backward(failing)
            assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_the_first_overflow_asks_how_many_tokens_a_loss_is_the_sum_of(tmp_path: Path) -> None:
    def many(model: nn.Module, batch: Any) -> Any:
        total, weight = loss_fn(model, batch)
        return total * 1000, weight * 1000

    with training_run(tmp_path, precision="fp16", fingerprints=False) as run:
        run.prepare(network())
        for step in run.steps(numbers(), steps=1):
            step.backward(many)
        scaler = run._precision.scaler
        assert scaler is not None
        assert scaler.scale == 2.0**16 / 1024
        assert scaler.factor(16.0) == 4.0
        assert scaler.factor(None) == 64.0


def test_the_scale_grows_after_many_good_steps_and_a_resume_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenstep.train.precision._GROW_AFTER", 4)
    whole = train(tmp_path / "whole", large_at=1, steps=8, precision="fp16", checkpoint_every=3)
    assert whole["scales"][4] == 2 * whole["scales"][3] != 2.0**16
    first = train(tmp_path / "parts", large_at=1, steps=3, precision="fp16", checkpoint_every=3)
    (tmp_path / "parts" / "finished.json").unlink(missing_ok=True)
    about = Checkpoints(RunPaths(tmp_path / "parts")).about(3)
    assert (about["loss scale"], about["good steps"]) == (first["scales"][-1], 2)

    def rest() -> dict[str, Any]:
        return train(tmp_path / "parts", large_at=1, steps=8, precision="fp16", checkpoint_every=3)

    for found in run_ranks(rest, 2):
        assert found["scales"] == whole["scales"][3:]
        assert found["fingerprints"][-5:] == whole["fingerprints"][-5:]


def test_precision_is_part_of_the_identity(tmp_path: Path) -> None:
    train(tmp_path, steps=1, precision="bf16")
    with pytest.raises(IdentityError, match='precision: "bf16" in the run directory, "fp32" now'):
        train(tmp_path, steps=1)
    with pytest.raises(UsageError, match="precision='half', expected one of fp32, bf16, fp16"):
        evenstep.start(global_batch=4, precision="half")


def test_the_plan_says_in_which_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", steps=1, precision="bf16")
    assert "computed in bf16 where autocast has it; parameters, gradients and their sums are float32" in (
        capsys.readouterr().err
    )
    train(tmp_path / "b", steps=1)
    assert "float32" not in capsys.readouterr().err


def test_torchs_scaler_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with training_run(tmp_path, fingerprints=False) as run:
        model = run.prepare(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        unused = torch.amp.GradScaler("cpu", enabled=False)
        scaler = torch.amp.GradScaler("cpu")
        loop = iter(run.steps(numbers(), steps=2))
        step = next(loop)
        step.backward(lambda model, batch: (scaler.scale(loss_fn(model, batch)[0]), None))
        with pytest.raises(UsageError, match=r'GradScaler.*\n.*precision="fp16"'):
            scaler.step(optimizer)
        unused.step(optimizer)
        loop.close()


def test_autocast_in_the_loss_function_works_as_before(tmp_path: Path) -> None:
    def own(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    def script(directory: Path) -> list[str]:
        with training_run(directory) as run:
            model = run.prepare(network())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in run.steps(numbers(), steps=3):
                step.backward(own)
                optimizer.step()
                optimizer.zero_grad()
        return fingerprints(run)

    assert run_ranks(script, 3, tmp_path / "run") == [script(tmp_path / "alone")] * 3


def test_pictures_can_be_evaluated_in_bf16(tmp_path: Path) -> None:
    """The additive check, whose tolerance depends on the precision, passes for sums in bfloat16."""

    def in_bfloat16(model: nn.Module, batch: Any) -> Any:
        return model(batch[0].flatten(1)).square().sum(), len(batch[0])

    with training_run(tmp_path, precision="bf16", micro_batch=16) as run:
        model = run.prepare(nn.Linear(64, 10))
        for step in run.steps(Pictures(), steps=2):
            assert step.backward(in_bfloat16).loss > 0
        assert run.evaluate(Pictures(), in_bfloat16, model) > 0


def test_running_statistics_count_once_though_a_step_is_computed_again(tmp_path: Path) -> None:
    def statistics(directory: Path, large: bool) -> list[Tensor]:
        with training_run(directory, precision="fp16", fingerprints=False) as run:
            model = run.prepare(nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 4)))
            for step in run.steps(numbers(), steps=1):
                step.backward(too_large if large else loss_fn)
            return list(model[0].buffers())

    for one, other in zip(statistics(tmp_path / "once", False), statistics(tmp_path / "again", True), strict=True):
        assert torch.equal(one, other)
