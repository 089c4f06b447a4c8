"""step.backward through the API: what is awkward for other libraries, and agreement with one big batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenstep.errors import LossError, PeerFailed, UsageError
from tests.ranks import run_ranks
from tests.train.scripts import Sentences, Transformer, fingerprints, next_token, padded, training_run


def numbers(length: int = 45, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(length, 12, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 4, (length,), generator=generator), torch.arange(length))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        result: Tensor = self.last(F.dropout(F.relu(self.branches[branch](F.relu(self.first(x)))), 0.1, self.training))
        return result


def awkward(directory: Path) -> list[str]:
    """Unused branches, two forwards in a micro-batch, ragged batches, freezing, a second backward, a failure."""
    failures = 0

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        x, y, index = batch
        loss = torch.zeros(())
        for branch in set((index % 2).tolist()):
            mine = index % 2 == branch
            loss = loss + F.cross_entropy(model(x[mine], branch), y[mine], reduction="sum")
        again = index % 5 == 0
        if again.any():
            loss = loss + F.cross_entropy(model(x[again] * 0.5, 2), y[again], reduction="sum")
        return loss, len(y)

    def failing(model: nn.Module, batch: Any) -> Any:
        if 0 in batch[2]:  # one sample, so one process
            raise RuntimeError("this sample cannot be had")
        return loss_fn(model, batch)

    with training_run(directory, global_batch=19) as run:
        model = run.prepare(Branches())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        steps = run.steps(numbers(), epochs=4)
        run.restore(model=model, optimizer=optimizer)
        for step in steps:
            model.branches[1].requires_grad_(step.number not in (4, 5))
            if step.epoch == 1:
                before = [p.grad for p in model.parameters()]
                try:
                    step.backward(failing)
                except RuntimeError:
                    failures += 1
                    assert [p.grad for p in model.parameters()] == before
                    step.backward(loss_fn)
            else:
                step.backward(loss_fn)
            if step.number == 7:
                step.backward(lambda model, batch: (model.first(batch[0]).square().sum(), None))
            run.clip(2.0)
            optimizer.step()
            optimizer.zero_grad()
        assert model.never.weight.grad is None
    assert failures == 1
    return fingerprints(run)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_the_awkward_is_equal_on_every_layout(world_size: int, tmp_path: Path) -> None:
    expected = awkward(tmp_path / "alone")
    assert len(set(expected)) == len(expected) == 12
    for rank, found in enumerate(run_ranks(awkward, world_size, tmp_path / "run")):
        assert found == expected, f"rank {rank}"


@pytest.mark.parametrize("world_size", [1, 3])
def test_agrees_with_a_plain_loop_over_big_batches(world_size: int, tmp_path: Path) -> None:
    data = numbers(dtype=torch.float64)

    def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def ours() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        with training_run(tmp_path / "run") as run:
            model, optimizer = model_and_optimizer()
            run.prepare(model)
            begun = [p.detach().clone() for p in model.parameters()]
            for step in run.steps(data, epochs=2):
                seen: list[Tensor] = []
                step.backward(lambda model, batch, seen=seen: weighted(model, batch, seen))
                optimizer.step()
                optimizer.zero_grad()
                order.append(torch.cat(seen))
        return begun, [p.detach() for p in model.parameters()], order

    order: list[Tensor] = []  # the indices of each step that this process read

    def weighted(model: nn.Module, batch: Any, seen: list[Tensor] | None = None) -> Any:
        x, y, index = batch
        if seen is not None and model.training:
            seen.append(index)
        weights = 1.0 + index % 3
        return (F.cross_entropy(model(x), y, reduction="none") * weights).sum(), weights.sum()

    ranks = run_ranks(ours, world_size) if world_size > 1 else [ours()]
    begun, ended, _ = ranks[0]
    visited = [torch.cat(parts) for parts in zip(*(own for _, _, own in ranks), strict=True)]
    assert all(sorted(torch.cat(visited[e : e + 3]).tolist()) == list(range(45)) for e in (0, 3))
    model, optimizer = model_and_optimizer()
    with torch.no_grad():
        for p, value in zip(model.parameters(), begun, strict=True):
            p.copy_(value)
    for indices in visited:
        total, weight = weighted(model, [tensor[indices] for tensor in data.tensors])
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close([p.detach() for p in model.parameters()], ended, rtol=1e-12, atol=1e-13)


def test_results_are_means_over_the_global_batch_and_equal_everywhere(tmp_path: Path) -> None:
    def work(directory: Path) -> list[Any]:
        found: list[Any] = []
        with training_run(directory) as run:
            model = run.prepare(nn.Linear(12, 4))
            for step in run.steps(numbers(), epochs=1):
                counts = step.total(lambda batch: {"even": (batch[2] % 2 == 0).sum(), "all": len(batch[2])})
                assert counts["all"] == step.samples == step.total(lambda batch: len(batch[2]))
                result = step.backward(
                    lambda model, batch: (
                        F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
                        len(batch[1]),
                        {"index": (batch[2].sum(), len(batch[2]))},
                    )
                )
                assert result.weight == step.samples
                found.append((result.loss, result.metrics["index"], counts["even"]))
                model.zero_grad()
        return found

    alone = work(tmp_path / "alone")
    assert len(alone) == 3
    for ranks in (2, 5):
        assert all(found == alone for found in run_ranks(work, ranks, tmp_path / str(ranks)))


def test_several_denominators(tmp_path: Path) -> None:
    """Terms that are divided by totals of their own, with the weight None, give the gradient of the big batch."""
    data = numbers(16, torch.float64)

    def work(directory: Path) -> list[Tensor]:
        with training_run(directory) as run:
            torch.manual_seed(1)
            model = run.prepare(nn.Linear(12, 4).double())
            for step in run.steps(data, steps=1):
                totals = step.total(lambda b: {"even": (b[2] % 2 == 0).sum(), "odd": (b[2] % 2 == 1).sum()})

                def loss_fn(model: nn.Module, b: Any, totals: dict[str, float] = totals) -> Any:
                    per_sample = model(b[0]).square().sum(1)
                    even = b[2] % 2 == 0
                    return per_sample[even].sum() / totals["even"] + 3 * per_sample[~even].sum() / totals["odd"], None

                result = step.backward(loss_fn)
                assert result.weight is None
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(1)
    model = nn.Linear(12, 4).double()
    per_sample = model(data.tensors[0]).square().sum(1)
    (per_sample[::2].mean() + 3 * per_sample[1::2].mean()).backward()
    expected = [p.grad for p in model.parameters()]
    for found in [work(tmp_path / "alone"), *run_ranks(work, 3, tmp_path / "run")]:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_a_failure_within_backward_is_told_to_all_and_keeps_nothing(tmp_path: Path) -> None:
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ArithmeticError("no gradient today")

    def work() -> str:
        with training_run(tmp_path / "run") as run:
            model = run.prepare(nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4)))
            said = ""
            for step in run.steps(numbers(16), steps=1):

                def loss_fn(model: nn.Sequential, batch: Any) -> Any:
                    hidden = model[0](batch[0])
                    if run.rank == 1:
                        hidden = Explodes.apply(hidden)  # type: ignore[no-untyped-call]
                    return model[1](hidden).sum(), len(batch[0])

                try:
                    step.backward(loss_fn)
                except (ArithmeticError, PeerFailed) as error:
                    said = f"{type(error).__name__}: {error}"
                assert all(p.grad is None for p in model.parameters())
                step.backward(lambda model, batch: (model(batch[0]).sum(), len(batch[0])))
                assert all(p.grad is not None for p in model.parameters())
        return said

    first, second, third = run_ranks(work, 3)
    assert second == "ArithmeticError: no gradient today"
    assert "rank 1: ArithmeticError: no gradient today" in first
    assert "rank 1: ArithmeticError: no gradient today" in third


class MaxNorm(nn.Module):
    """Writes a parameter in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(45, 4, max_norm=0.5)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        result: Tensor = self.embed(index)
        return result


class Later(nn.Module):
    """Writes a buffer from its fourth call on."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 4)
        self.register_buffer("mean", torch.zeros(12))
        self.calls = 0

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 30:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        result: Tensor = self.last(x)
        return result


class Registers(Later):
    """Replaces a buffer in its forward."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        if self.training:
            self.mean = x.detach().mean(0)
        result: Tensor = self.last(x)
        return result


class Hidden(Later):
    """Keeps a state beside its parameters and buffers."""

    state: Tensor | float = 0.0

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.last(x) + self.state)
        self.state = result.detach().mean(0)
        return result


def squares(model: nn.Module, batch: Any) -> Any:
    return model(batch[0], batch[2]).square().sum(), len(batch[0])


OWN = torch.Generator().manual_seed(3)


def own_noise(model: nn.Module, batch: Any) -> Any:
    noise = torch.randn(batch[0].shape, generator=OWN)
    return model(batch[0] + noise, batch[2]).square().sum(), len(batch[0])


def in_place(model: nn.Module, batch: Any) -> Any:
    batch[0].mul_(1.5)
    return squares(model, batch)


def zeroes(model: nn.Module, batch: Any) -> Any:
    model.zero_grad()
    return squares(model, batch)


def freezes(model: nn.Module, batch: Any) -> Any:
    next(model.parameters()).requires_grad_(False)
    return squares(model, batch)


def attacks(model: nn.Module, batch: Any) -> Any:
    if torch.is_grad_enabled():
        squares(model, batch)[0].backward()
    return squares(model, batch)


def detached(model: nn.Module, batch: Any) -> Any:
    return squares(model, batch)[0].detach(), len(batch[0])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("make", "loss", "message"),
    [
        (MaxNorm, squares, "writes the model's own state in training: embed.weight"),
        (Later, squares, "writes the model's own state in training: mean"),
        (Registers, squares, "writes the model's own state in training: mean"),
        (Hidden, squares, "computed twice, is .* has a state or a random generator of its own"),
        (Later, own_noise, "computed twice, is .* has a state or a random generator of its own"),
        (Later, in_place, "changes its batch in place"),
        (Later, zeroes, "changes .grad .zero_grad"),
        (Later, freezes, r"freezes or unfreezes last\.weight"),
        (Later, attacks, r"calls backward\(\) itself"),
        (Later, detached, "no loss of this step depends on a parameter"),
    ],
)
def test_a_loss_that_does_more_than_compute_is_refused(
    make: Any, loss: Any, message: str, world_size: int, tmp_path: Path
) -> None:
    def work() -> None:
        with training_run(tmp_path / "run") as run:
            run.prepare(make())
            for step in run.steps(numbers(), epochs=3):
                step.backward(loss)

    with pytest.raises((LossError, UsageError, PeerFailed), match=message):
        run_ranks(work, world_size)


def test_optimizers_are_known(tmp_path: Path) -> None:
    for kind in ("stranger", "added", "forgotten"):  # one that it was made with, one added later, one not restored
        with training_run(tmp_path / kind) as run:
            model = run.prepare(nn.Linear(12, 4))
            extra = nn.Parameter(torch.ones(()))
            optimizer = torch.optim.SGD([*model.parameters(), *([extra] if kind == "stranger" else [])], 0.1)
            steps = run.steps(numbers(), epochs=1)
            if kind != "stranger":
                run.restore(model=model, **({"optimizer": optimizer} if kind == "added" else {}))
            message = (
                "run.restore was not given it" if kind == "forgotten" else "updates 1 parameters that belong to no"
            )
            for step in steps:
                step.backward(lambda m, b: (m(b[0]).square().sum(), len(b[0])))
                if kind == "added" and step.number == 1:
                    optimizer.add_param_group({"params": [extra]})
                if step.number == 1 or kind != "added":
                    with pytest.raises(UsageError, match=message):
                        optimizer.step()
                    break
                optimizer.step()
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD([*model.parameters()], 0.1).step()  # outside a loop nobody looks


def test_parameters_outside_of_prepared_models(tmp_path: Path) -> None:
    with training_run(tmp_path / "run") as run:
        run.prepare(nn.Linear(12, 4))
        temperature = nn.Parameter(torch.ones(1))
        for step in run.steps(numbers(), epochs=1):
            with pytest.raises(LossError, match=r"parameter of shape \(1,\) that belongs to no prepared model"):
                step.backward(lambda m, b: ((m(b[0]) * temperature).square().sum(), len(b[0])))
            temperature.requires_grad_(False)
            step.backward(lambda m, b: ((m(b[0]) * temperature).square().sum(), len(b[0])))
            break


def test_a_step_is_used_in_its_own_turn(tmp_path: Path) -> None:
    with training_run(tmp_path / "run") as run:
        run.prepare(nn.Linear(12, 4))
        before = None
        for step in run.steps(numbers(), epochs=1):
            if before is not None:
                with pytest.raises(UsageError, match="step 0 is over"):
                    before.backward(lambda m, b: (m(b[0]).sum(), len(b[0])))
                with pytest.raises(UsageError, match="step 0 is over"):
                    before.total(len)
                break
            before = step
    with pytest.raises(UsageError, match=r"after the run had ended"):
        run.all_reduce(1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_dtypes_that_change_and_conjugated_gradients(world_size: int, tmp_path: Path) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.last = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(x) + self.v.conj().resolve_conj().imag
            return result

    def work(directory: Path) -> list[str]:
        with training_run(directory) as run:
            model = run.prepare(Waves())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            steps = run.steps(numbers(), epochs=2)
            run.restore(model=model, optimizer=optimizer)
            for step in steps:
                if step.number == 3:
                    model.last.double()
                step.backward(lambda m, b: (m(b[0].to(m.last.weight.dtype)).square().sum(), len(b[0])))
                optimizer.step()
                optimizer.zero_grad()
        return fingerprints(run)

    alone = work(tmp_path / "alone")
    assert all(found == alone for found in run_ranks(work, world_size, tmp_path / "run"))


def test_the_model_stays_the_bare_module(tmp_path: Path) -> None:
    with training_run(tmp_path / "run") as run:
        bare = Transformer()
        model = run.prepare(bare)
        assert model is bare
        assert list(model.state_dict()) == list(Transformer().state_dict())
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "whole.pt")
        loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
        for step in run.steps(Sentences(), steps=1, collate=padded):
            step.backward(next_token)
        tokens = torch.arange(6).reshape(1, 6)
        for other in (copied, loaded):
            assert torch.equal(other.eval()(tokens), model.eval()(tokens))


def test_bfloat16_autocast_inside_the_loss(tmp_path: Path) -> None:
    def work(directory: Path) -> list[str]:
        with training_run(directory) as run:
            model = run.prepare(nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.2), nn.Linear(32, 4)))
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            steps = run.steps(numbers(), epochs=1)
            run.restore(model=model, optimizer=optimizer)
            for step in steps:

                def loss_fn(model: nn.Module, batch: Any) -> Any:
                    with torch.autocast("cpu", torch.bfloat16):
                        out = model(batch[0])
                    return F.cross_entropy(out.float(), batch[1], reduction="sum"), len(batch[1])

                step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()
        return fingerprints(run)

    alone = work(tmp_path / "alone")
    assert all(found == alone for found in run_ranks(work, 3, tmp_path / "run"))


def test_without_exactness_the_result_is_equal_to_rounding(tmp_path: Path) -> None:
    def work(directory: Path, exact: bool) -> list[Tensor]:
        with training_run(directory, exact=exact) as run:
            model = run.prepare(nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.2), nn.Linear(32, 4)).double())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in run.steps(numbers(dtype=torch.float64), epochs=2):
                step.backward(lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="sum"), len(b[1])))
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    expected = work(tmp_path / "alone", True)
    for found in run_ranks(work, 3, tmp_path / "run", False):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_random_numbers_of_the_loop_are_the_same_everywhere(tmp_path: Path) -> None:
    def work(directory: Path, loaders: int) -> list[float]:
        drawn = []
        with training_run(directory) as run:
            run.prepare(nn.Linear(12, 4))
            for step in run.steps(numbers(), epochs=1, loaders=loaders):
                drawn.append(torch.rand(()).item())
                step.backward(lambda m, b: (m(b[0]).square().sum(), len(b[1])))
                drawn.append(torch.rand(()).item())
        return drawn

    alone = work(tmp_path / "alone", 0)
    assert len(set(alone)) == len(alone)
    for ranks, loaders in ((3, 0), (2, 1)):
        assert all(found == alone for found in run_ranks(work, ranks, tmp_path / f"{ranks}", loaders))
