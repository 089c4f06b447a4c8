"""batchnorm="sync": as one big BatchNorm over what the processes compute at the same time, at this number of them."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import evenstep
from evenstep.errors import IdentityError, MismatchError, PeerFailed, UsageError
from evenstep.train.run import Run
from tests.ranks import run_ranks


def begin(directory: Path, **options: Any) -> Run:
    chosen: dict[str, Any] = {"global_batch": 8, "micro_batch": 3, "batchnorm": "sync", **options}
    return evenstep.start(run=directory / "run", **chosen)


def rank() -> int:
    return int(os.environ["RANK"])


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 2 + 1


class Scaled(nn.Module):
    """A norm of 4 channels, and a parameter in any case."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = kind(4, **options)
        for p in self.norm.parameters():
            nn.init.uniform_(p, 0.5, 2.0, generator=torch.Generator().manual_seed(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x) * self.scale
        return result


def squares(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().sum(), len(batch[0])


def objective(x: Tensor, y: Tensor) -> Tensor:
    return (y.pow(3) * x.detach()).sum() + y.square().sum()


KINDS: list[tuple[Callable[[], Scaled], tuple[int, ...]]] = [
    (lambda: Scaled(nn.BatchNorm1d), (16, 4)),
    (lambda: Scaled(nn.BatchNorm1d, momentum=None), (16, 4, 3)),
    (lambda: Scaled(nn.BatchNorm2d, bias=False), (16, 4, 3, 2)),
    (lambda: Scaled(nn.BatchNorm3d, affine=False, momentum=0.4), (16, 4, 1, 3, 2)),
    (lambda: Scaled(nn.BatchNorm2d, track_running_stats=False), (16, 4, 3, 2)),
]


def test_it_is_one_big_batch_norm(tmp_path: Path) -> None:
    """Outputs, gradients of inputs and weights, running statistics; micro-batches of 3, 3 and 2 samples, two steps."""
    cases = [(make, rows(*shape).to(dtype)) for make, shape in KINDS for dtype in (torch.float64, torch.float32)]

    def make_all() -> list[Scaled]:
        return [make().to(data.dtype) for make, data in cases]

    def train() -> list[list[list[Tensor]]]:
        """For each step, for each case: outputs and input gradients of this process, gradients, buffers."""
        seen: list[list[Tensor]] = []

        def loss_fn(models: nn.ModuleList, batch: Any) -> Any:
            inputs = [x.clone().requires_grad_(models.training) for x in batch]
            seen[:] = [[x, model(x)] for x, model in zip(inputs, models, strict=True)]
            return sum(objective(x, y).double() for x, y in seen), len(batch[0])

        steps = []
        with begin(tmp_path) as run:
            models = run.prepare(nn.ModuleList(make_all()))
            for step in run.steps(TensorDataset(*(data for _, data in cases)), epochs=1, shuffle=False):
                step.backward(loss_fn)
                found = []
                for (x, y), model in zip(seen, models, strict=True):
                    now = (y, gradient(x), *(gradient(p) for p in model.parameters()), *model.buffers())
                    found.append([t.detach().clone() for t in now])
                steps.append(found)
                models.zero_grad()
        return steps

    parts = run_ranks(train, 3)
    for k, (plain, (_, data)) in enumerate(zip(make_all(), cases, strict=True)):
        rounding = 1e-12 if data.dtype == torch.float64 else 1e-6
        for number, big in enumerate(data.split(8)):
            x = big.clone().requires_grad_()
            y = plain(x)
            objective(x, y).backward()
            expected = [y.detach(), gradient(x), *(gradient(p) / 8 for p in plain.parameters()), *plain.buffers()]
            plain.zero_grad()
            found = [part[number][k] for part in parts]
            whole = [torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])]
            for one in found:
                for mine, theirs in zip([*whole, *one[2:]], expected, strict=True):
                    assert mine.dtype == theirs.dtype
                    size = max(float(theirs.abs().max()), 1.0)
                    torch.testing.assert_close(mine, theirs, rtol=0, atol=size * rounding)


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


class Twice(nn.Module):
    """Two calls of one layer, inside activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: self.part(self.part(x)), x, use_reentrant=False)
        return result


def test_running_statistics_change_once_a_step_and_are_equal_everywhere(tmp_path: Path) -> None:
    """2 processes with 2 micro-batches each: {0, 2} and {1, 3} are computed at the same time."""
    data = rows(16, 4)

    def train() -> dict[str, Tensor]:
        with begin(tmp_path, micro_batch=2) as run:
            torch.manual_seed(0)
            model = run.prepare(Twice())
            for step in run.steps(TensorDataset(data), epochs=1, shuffle=False):
                before = {name: b.clone() for name, b in model.named_buffers()}
                with pytest.raises(ZeroDivisionError) if rank() else pytest.raises(PeerFailed):
                    step.backward(lambda model, batch: (model(batch[0]).sum() / (1 - rank() or 1 / 0), len(batch[0])))
                assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
                step.backward(squares)
                model.zero_grad()
                assert int(model.part[1].get_buffer("num_batches_tracked")) == 2 * step.number + 2
            return {name: b.clone() for name, b in model.named_buffers()}

    first, second = run_ranks(train, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(0)
    part = Twice().part
    mean = torch.zeros(4)
    for step in data.split(8):
        pairs = [torch.cat([step[0:2], step[4:6]]), torch.cat([step[2:4], step[6:8]])]
        calls = []
        for pair in pairs:
            hidden = part[0](pair)
            calls.append((hidden.mean(0), part[0](part[1](hidden)).mean(0)))
        for call in zip(*calls, strict=True):
            mean = 0.9 * mean + 0.1 * torch.stack(call).mean(0)
    torch.testing.assert_close(first["part.1.running_mean"], mean.detach(), rtol=1e-6, atol=1e-6)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise OverflowError("in backward")


def test_nobody_waits_for_a_process_that_failed(tmp_path: Path) -> None:
    """It fails before its BatchNorm layers, between them, after them, in the backward pass of each micro-batch; then
    the step can be done again."""
    breaks: Callable[[Tensor], Tensor] = Breaks.apply

    def breaks_at(x: Tensor) -> Tensor:
        if rank() == 1:
            raise OverflowError("in the first pass")
        return x

    def train() -> list[float]:
        losses = []
        with begin(tmp_path, micro_batch=2) as run:
            torch.manual_seed(0)
            _, second = run.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.BatchNorm1d(4))
            for step in run.steps(TensorDataset(rows(8, 4)), epochs=1, shuffle=False):
                for where in range(8):
                    turn: list[int] = []

                    def loss_fn(a: Any, b: Any, batch: Any, where: int = where, turn: list[int] = turn) -> Any:
                        turn.append(1)
                        mine = rank() == 1 and len(turn) == 1 + where // 6 and a.training
                        x = batch[0]
                        parts: list[Callable[[Tensor], Tensor]] = [a, b, lambda x: x.square().sum()]
                        for place, part in enumerate(parts):
                            if mine and place == where % 6:
                                raise OverflowError("in forward")
                            x = part(x)
                            if mine and place == where % 6 - 3:
                                x = breaks(x)
                        return x, len(batch[0])

                    with pytest.raises(OverflowError if rank() == 1 else PeerFailed):
                        step.backward(loss_fn)
                with pytest.raises(OverflowError if rank() == 1 else PeerFailed):
                    step.backward_whole(lambda a, b, batch: b(breaks_at(batch[0])), lambda a, b, y: y.square().sum())
                losses.append(step.backward(lambda a, b, batch: (b(a(batch[0])).square().sum(), len(batch[0]))).loss)
                assert int(second.num_batches_tracked) == 1
        return losses

    first, second = run_ranks(train, 2, timeout=30.0)
    assert first == second


def test_processes_at_different_layers_are_named(tmp_path: Path) -> None:
    def train() -> str:
        with begin(tmp_path, micro_batch=4) as run:
            run.prepare(nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)]))
            for step in run.steps(TensorDataset(rows(8, 4)), epochs=1):
                with pytest.raises(MismatchError) as raised:
                    step.backward(lambda model, batch: (model[rank()](batch[0]).sum(), len(batch[0])))
                return str(raised.value)
        return ""

    for said in run_ranks(train, 2):
        assert "rank 0: 0, forward; rank 1: 1, forward" in said


def test_evaluation_and_copies_are_not_synchronised(tmp_path: Path) -> None:
    def train() -> float:
        with begin(tmp_path, micro_batch=4) as run:
            held: Any = nn.BatchNorm1d(4)
            model: Any = run.prepare(nn.Sequential(nn.Linear(4, 4), held))
            assert model[1] is held
            assert issubclass(type(held), nn.BatchNorm1d)
            assert not {*model.state_dict()} ^ {*nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).state_dict()}
            for step in run.steps(TensorDataset(rows(8, 4)), epochs=1):
                step.backward(squares)
            if run.rank == 0:  # alone
                x = rows(5, 4)
                plain = nn.BatchNorm1d(4)
                plain.load_state_dict(held.state_dict())
                for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
                    assert torch.equal(other(x), plain(x))
                torch.save(model, io.BytesIO())
            again: Any = run.prepare(copy.deepcopy(model))
            assert again[1].over.together is held.over.together
            loss: float = run.evaluate(TensorDataset(rows(9, 4)), lambda model, _, batch: squares(model, batch))
            return loss

    first, second = run_ranks(train, 2)
    assert first == second


# ---- what is refused


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (16, {"micro_batch": 3}, r"a step has 3 micro-batches \(8 samples\), which 2 processes(.|\n)*drop_last=True"),
        (18, {"micro_batch": 2}, r"the last step of each epoch has 1 micro-batches \(2 samples\)(.|\n)*drop_last=True"),
    ],
)
def test_micro_batches_that_do_not_divide(tmp_path: Path, length: int, options: dict[str, int], message: str) -> None:
    def train(drop_last: bool) -> bool:
        with begin(tmp_path / str(drop_last), **options) as run:
            run.prepare(Scaled(nn.BatchNorm1d))
            for step in run.steps(TensorDataset(rows(length, 4)), epochs=1, drop_last=drop_last):
                step.backward(squares)
            return True

    with pytest.raises(UsageError, match=message):
        run_ranks(train, 2, False)
    if length == 18:
        assert run_ranks(train, 2, True) == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 2}, r"not with --stages(.|\n)*batchnorm=\"exact\""),
        ({"shard": True}, "not with --shard"),
        ({"thread_replicas": 2}, "not with --thread-replicas"),
        ({"batchnorm": "synced"}, "batchnorm='synced', expected 'exact' or 'sync'"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        begin(tmp_path, **options)


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm(4), nn.LazyBatchNorm1d()])
def test_other_layers_are_refused_by_name(tmp_path: Path, norm: nn.Module) -> None:
    with begin(tmp_path) as run, pytest.raises(UsageError, match=r"^1 is a SyncBatchNorm, which|no shape yet"):
        run.prepare(nn.Sequential(nn.Linear(4, 4), norm))


def test_another_number_of_processes_cannot_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        with begin(tmp_path, micro_batch=2) as run:
            model = run.prepare(Scaled(nn.BatchNorm1d))
            steps = run.steps(TensorDataset(rows(16, 4)), epochs=1)
            run.restore(model=model)
            for step in steps:
                step.backward(squares)

    run_ranks(train, 2)
    with pytest.raises(IdentityError, match="processes that batchnorm normalises over: 2 in the run directory, 4 now"):
        run_ranks(train, 4)
    with pytest.raises(IdentityError, match='batchnorm: "sync" in the run directory, "exact" now'):
        begin(tmp_path, micro_batch=2, batchnorm="exact")
    with begin(tmp_path / "alone", micro_batch=2) as run:
        run.prepare(Scaled(nn.BatchNorm1d))
        for step in run.steps(TensorDataset(rows(16, 4)), epochs=1):
            step.backward(squares)
    assert "equal, to rounding, on 1 processes only" in capsys.readouterr().err
