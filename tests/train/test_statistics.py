"""BatchNorm: running statistics change once a step, from all micro-batches, the same on every layout.

What plain PyTorch does is excluded by name below: statistics of the last micro-batch only, of rank 0 only, V updates a
step, and one more for each recomputation.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import EvenstepError, PeerFailed, UsageError
from evenstep.plan.tree import share
from evenstep.train.meeting import Meeting
from evenstep.train.run import Run
from evenstep.train.statistics import Statistics, _decode, _encode, refuse_statistics
from tests.ranks import run_ranks
from tests.train.scripts import train_batchnorm

DATA = torch.utils.data.TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)) * 2 + 1)


def begin(directory: Path, **options: Any) -> Run:
    return evenstep.start(run=directory / "run", **{"global_batch": 12, "micro_batch": 3, **options})


def squares(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().sum(), len(batch[0])


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def count(layer: nn.Module) -> int:
    return int(layer.get_buffer("num_batches_tracked"))


def same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- every layout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return train_batchnorm(tmp_path_factory.mktemp("alone"), global_batch=20, micro_batch=3)


def test_thread_replicas_have_the_same_fingerprint(alone: list[str], tmp_path: Path) -> None:
    assert train_batchnorm(tmp_path / "run", global_batch=20, micro_batch=3, thread_replicas=2) == alone


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_step_has_the_same_fingerprint(world_size: int, alone: list[str], tmp_path: Path) -> None:
    """On 3 and 4 processes the last step leaves shares of different lengths; a micro-batch has 2 samples."""
    assert len(set(alone)) == len(alone) == 6
    several = run_ranks(
        lambda: train_batchnorm(tmp_path / "run", global_batch=20, micro_batch=3), world_size, timeout=150
    )
    assert several == [alone] * world_size


def test_a_run_goes_on_with_the_statistics_of_its_checkpoint(alone: list[str], tmp_path: Path) -> None:
    """Stopped after step 3 on two processes, gone on with on three."""

    def part() -> list[str]:
        with pytest.raises(KeyError, match="stop"):
            train_batchnorm(tmp_path / "run", _stopping(3), global_batch=20, micro_batch=3, checkpoint_every=1)
        return []

    run_ranks(part, 2)
    rest = run_ranks(lambda: train_batchnorm(tmp_path / "run", global_batch=20, micro_batch=3), 3)
    assert rest[0][-3:] == alone[-3:]


def _stopping(after: int) -> Callable[[Any], torch.optim.Optimizer]:
    class Stopping(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            if self.steps == after:
                raise KeyError("stop")
            self.steps += 1
            return super().step(closure)

    return lambda parameters: Stopping(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


# ---- the formulas


def updated(old: Tensor, found: list[Tensor], sizes: list[int], momentum: float) -> Tensor:
    """By the definition, in float64; `found`: the mean or the variance of each micro-batch."""
    total = sum(n * x.double() for n, x in zip(sizes, found, strict=True)) / sum(sizes)
    return ((1 - momentum) * old.double() + momentum * total).float()


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_running_statistics_follow_torchs_formulas(tmp_path: Path, momentum: float | None) -> None:
    """Once a step, not once a micro-batch; the mean of the micro-batches' variances. Steps of 4 and, at last, 3 leaves
    of 3, 3, 3, 2 and 3, 3, 2 samples."""
    rows = torch.randn(19, 6) * 3 + 5
    data = torch.utils.data.TensorDataset(rows)
    with begin(tmp_path, global_batch=11) as run:
        model = run.prepare(nn.BatchNorm1d(6, momentum=momentum))
        expected = buffers(model)
        for number, step in enumerate(run.steps(data, epochs=1, shuffle=False)):
            step.backward(squares)
            model.zero_grad()
            mine = rows[11 * number : 11 * number + 11].split(3)
            m = 1 / (number + 1) if momentum is None else momentum
            sizes = [len(x) for x in mine]
            for name, found in (
                ("running_mean", [x.mean(0) for x in mine]),
                ("running_var", [x.var(0) for x in mine]),
            ):
                expected[name] = updated(expected[name], found, sizes, m)
                torch.testing.assert_close(model.get_buffer(name), expected[name], rtol=1e-6, atol=1e-6)
            assert count(model) == number + 1


def test_one_micro_batch_a_step_is_plain_torch(tmp_path: Path) -> None:
    rows = torch.randn(24, 3, 4, 4) * 3 + 5
    data = torch.utils.data.TensorDataset(rows)
    plain = nn.BatchNorm2d(3)
    with begin(tmp_path, global_batch=8, micro_batch=8) as run:
        model = run.prepare(copy.deepcopy(plain))
        for step, batch in zip(run.steps(data, epochs=1, shuffle=False), rows.split(8), strict=True):
            step.backward(squares)
            plain(batch).square().sum().div(8).backward()
            for name, p in model.named_parameters():
                assert same_tensor(p.grad, plain.get_parameter(name).grad)
            model.zero_grad()
            plain.zero_grad()
            for name, b in model.named_buffers():
                torch.testing.assert_close(b, plain.get_buffer(name), rtol=3e-7, atol=0)


def test_the_kth_calls_of_all_micro_batches_make_the_kth_update(tmp_path: Path) -> None:
    """The second call comes in the first two of four micro-batches only."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x = batch[0]
        total = model(x).square().sum()
        if x[0, 0] < 6:
            total = total + model(x * 2 + 1).square().sum()
        return total, len(x)

    rows = torch.arange(12.0)[:, None] + torch.rand(12, 6)
    with begin(tmp_path) as run:
        model = run.prepare(nn.BatchNorm1d(6))
        before = buffers(model)
        for step in run.steps(torch.utils.data.TensorDataset(rows), epochs=1, shuffle=False):
            step.backward(loss)
        first = [x.mean(0) for x in rows.split(3)]
        second = [(x * 2 + 1).mean(0) for x in rows.split(3)[:2]]
        expected = updated(updated(before["running_mean"], first, [3] * 4, 0.1), second, [3] * 2, 0.1)
        torch.testing.assert_close(model.running_mean, expected, rtol=1e-6, atol=1e-6)
        assert count(model) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_buffers_of_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(12, 6).to(dtype) + 3)
    with begin(tmp_path) as run:
        model = run.prepare(nn.BatchNorm1d(6).to(dtype))
        for step in run.steps(data, epochs=1):
            step.backward(squares)
        mean = model.get_buffer("running_mean")
        assert mean.dtype == dtype
        assert (mean - 0.3).abs().max() < 0.2


# ---- what counts


class Branches(nn.Module):
    """Every kind of layer that tracks or does not track."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.BatchNorm1d(6)
        self.unused = nn.BatchNorm1d(6)
        self.frozen = nn.BatchNorm1d(6)
        self.untracked = nn.BatchNorm1d(6, track_running_stats=False)
        self.plain = nn.BatchNorm1d(6, affine=False)
        self.tied = self.used
        self.rare = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 2:
            x = self.rare(x)
        result: Tensor = self.plain(self.untracked(self.frozen(self.used(x))) * 2)
        return result


def branches(directory: Path) -> dict[str, list[float]]:
    with begin(directory) as run:
        model = run.prepare(Branches())
        model.frozen.eval()
        for step in run.steps(DATA, epochs=2):
            step.backward(squares)
            model.zero_grad()
        return {name: b.flatten().tolist() for name, b in model.named_buffers()}


def test_layers_that_track_change_and_no_others(tmp_path: Path) -> None:
    after = branches(tmp_path)
    fresh = {name: b.flatten().tolist() for name, b in Branches().named_buffers()}
    changed = {name.partition(".")[0] for name in after if after[name] != fresh[name]}
    assert changed == {"used", "plain", "rare"}
    assert after["used.num_batches_tracked"] == [4]
    assert run_ranks(branches, 3, tmp_path / "three") == [after] * 3


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.norm, x, use_reentrant=False)
        return result


def test_recomputation_by_activation_checkpointing_does_not_count(tmp_path: Path) -> None:
    def train(model: nn.Module, directory: Path, loss: Any = squares) -> tuple[dict[str, Tensor], list[Tensor]]:
        with begin(directory) as run:
            run.prepare(model)
            for step in run.steps(DATA, steps=1):
                step.backward(loss)
            return buffers(model), [p.grad for p in model.parameters() if p.grad is not None]

    def slopes(model: nn.Module, batch: Any) -> Any:
        """Its own gradients recompute inside the forward."""
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().sum(), len(x)

    torch.manual_seed(0)
    recomputing = Checkpointed()
    plain = nn.ModuleDict({"norm": copy.deepcopy(recomputing.norm)})
    plain.forward = plain["norm"].forward
    for number, loss in enumerate((squares, slopes)):
        expected = train(copy.deepcopy(plain), tmp_path / f"{number}a", loss)
        found = train(copy.deepcopy(recomputing), tmp_path / f"{number}b", loss)
        assert same(found[0], expected[0])
        assert found[0]["norm.1.num_batches_tracked"].item() == 1
        assert all(map(torch.equal, found[1], expected[1]))


def test_only_step_backward_counts(tmp_path: Path) -> None:
    """evaluate and predict do not; a forward of the user's own outside a step is torch's (as swa_utils.update_bn)."""
    with begin(tmp_path) as run:
        model = run.prepare(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)))
        before = buffers(model)
        run.evaluate(DATA, squares)
        run.predict(DATA, lambda model, batch: model(batch[0]))
        assert same(buffers(model), before)
        model(DATA[:12][0])
        assert count(model[0]) == 1
        for step in run.steps(DATA, epochs=1):
            step.total(lambda batch: len(batch[0]))
            step.backward(squares)
            assert count(model[0]) == step.number + 2


def test_several_models_and_calls_of_backward(tmp_path: Path) -> None:
    def train() -> dict[str, list[float]]:
        with begin(tmp_path / "run") as run:
            first = run.prepare(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
            second = run.prepare(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)))
            for step in run.steps(DATA, epochs=1):
                step.backward(lambda a, b, batch: (b(a(batch[0])).square().sum(), len(batch[0])))
                step.backward(lambda a, batch: (a(batch[0]).exp().sum(), len(batch[0])), first)
                first.zero_grad()
            assert (count(first[1]), count(second[0])) == (4, 2)
            return {n: b.tolist() for model in (first, second) for n, b in model.named_buffers()}

    alone = train()
    (tmp_path / "run").rename(tmp_path / "alone")
    assert run_ranks(train, 2) == [alone] * 2


# ---- a step that fails


def test_a_failed_step_changes_nothing_and_can_be_done_again(tmp_path: Path) -> None:
    """It fails in a forward, in the last backward, in the loss that is returned; on this process or another."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise OverflowError("in backward")

    breaks: Callable[[Tensor], Tensor] = Breaks.apply

    def forward(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0]).square().sum(), len(batch[0])
        if evenstep_rank() == 1:
            raise OverflowError("in forward")
        return out

    def backward(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0]).square().sum()
        return (breaks(out) if evenstep_rank() == 1 else out), len(batch[0])

    def form(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]) if evenstep_rank() == 1 else squares(model, batch)

    def inside(model: nn.Module, batch: Any) -> Any:
        return model(batch[0][:, :5] if evenstep_rank() == 1 else batch[0]).square().sum(), len(batch[0])

    def evenstep_rank() -> int:
        return int(os.environ["RANK"])

    def train(losses: list[Any]) -> list[dict[str, Tensor]]:
        with begin(tmp_path / str(len(losses))) as run:
            model = run.prepare(nn.BatchNorm1d(6))
            found = []
            for step in run.steps(DATA, epochs=1):
                before = buffers(model)
                for loss in losses:
                    with pytest.raises((OverflowError, EvenstepError, RuntimeError)) as raised:
                        step.backward(loss)
                    assert isinstance(raised.value, PeerFailed) == (run.rank != 1)
                    assert same(buffers(model), before)
                    assert model.momentum == 0.1
                step.backward(squares)
                found.append(buffers(model))
            return found

    expected = run_ranks(lambda: train([]), 2)[0]
    for found in run_ranks(lambda: train([forward, backward, form, inside]), 2):
        assert all(map(same, found, expected))


def test_a_micro_batch_of_one_sample_names_the_layer(tmp_path: Path) -> None:
    with begin(tmp_path, global_batch=10) as run:
        model = run.prepare(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False)))
        for step in run.steps(DATA, epochs=1):
            with pytest.raises(UsageError, match=r"micro-batch 3 gives 1 \(a BatchNorm1d\) one value(.|\n)*drop_last"):
                step.backward(squares)
            with pytest.raises(UsageError, match="a micro-batch gives 1"):
                step.backward_whole(lambda model, batch: model(batch[0]), lambda model, y: y.square().sum())
            model[1].eval()  # such a layer normalises over its batch in eval mode, too
            with pytest.raises(UsageError, match="micro-batch 3 gives 1"):
                step.backward(squares)
            break


def test_a_last_step_of_one_sample_can_be_left_out(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(13, 6))
    with begin(tmp_path) as run:
        run.prepare(nn.BatchNorm1d(6))
        for step in run.steps(data, epochs=1, drop_last=True):
            step.backward(squares)


# ---- what cannot be had is refused by name


class ByHand(nn.Module):
    """Writes its own running statistics; torch does not count these writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.get_buffer("mean"), self.get_buffer("var"), training=True)


class Renormalised(nn.BatchNorm1d):
    """Uses the running mean while it trains."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        return super().forward(input) - self.running_mean


class FixedMomentum(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, training=self.training, momentum=0.2)


class Replacing(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        result = super().forward(input)
        if self.training:
            self.running_mean = input.detach().mean(0)
        return result


class Activated(nn.BatchNorm1d):
    """With a forward of its own that is sound."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input).relu(), 0.3)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.InstanceNorm1d(6, track_running_stats=True), r"^0 is a InstanceNorm1d that tracks running statistics"),
        (nn.SyncBatchNorm(6), r"^0 is a SyncBatchNorm in training mode"),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
            r"0\.parametrizations\.weight\.0\._u \(of a _Spectral",
        ),
        (ByHand(), r"0\.mean \(of a ByHand\), 0\.var \(of a ByHand\)"),
        (Renormalised(6), r"0 \(a Renormalised\) depends on its running statistics"),
        (FixedMomentum(6), r"0 \(a FixedMomentum\) does not update its running statistics by `momentum`"),
        (Replacing(6), r"0 \(a Replacing\) puts another tensor"),
    ],
)
def test_layers_whose_statistics_cannot_be_had(tmp_path: Path, layer: nn.Module, message: str) -> None:
    with begin(tmp_path) as run:
        run.prepare(nn.Sequential(layer, nn.Linear(6, 2)))
        for step in run.steps(DATA, epochs=1):
            with pytest.raises(UsageError, match=message):
                step.backward(squares)
            break


def test_a_subclass_with_a_forward_of_its_own_is_exact(tmp_path: Path) -> None:
    def train() -> list[float]:
        with begin(tmp_path / "run") as run:
            model = run.prepare(Activated(6))
            for step in run.steps(DATA, epochs=1):
                step.backward(squares)
            found: list[float] = model.get_buffer("running_mean").tolist()
            return found

    alone = train()
    (tmp_path / "run").rename(tmp_path / "alone")
    assert run_ranks(train, 2) == [alone] * 2
    assert max(map(abs, alone)) > 0.1


@pytest.mark.parametrize("layer", [nn.LazyBatchNorm1d(affine=False), nn.LazyInstanceNorm1d(track_running_stats=True)])
def test_a_lazy_layer_is_refused_before_the_loop(tmp_path: Path, layer: nn.Module) -> None:
    with (
        begin(tmp_path) as run,
        pytest.raises(UsageError, match=r"running_mean has no shape yet|weight has no shape yet"),
    ):
        run.prepare(nn.Sequential(nn.Linear(6, 6), layer))


def test_a_lazy_layer_that_has_seen_a_batch_is_a_batch_norm(tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        layer = nn.LazyBatchNorm1d()
        layer(torch.randn(3, 6))
        model = run.prepare(layer)
        for step in run.steps(DATA, epochs=1):
            step.backward(squares)
        assert count(model) == 3


def test_inside_a_compiled_model_it_is_refused_by_name() -> None:
    def compiled(part: nn.Module) -> nn.Module:
        part.compile(backend="eager")  # nothing is compiled before the first call
        return part

    for model, message in (
        (
            nn.Sequential(compiled(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))),
            r"^0\.1 is a BatchNorm1d(.|\n)*0\.1\.eval",
        ),
        (
            compiled(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
            r"^1 is a BatchNorm1d in training mode inside a com",
        ),
        (compiled(nn.BatchNorm1d(6)), r"^the model is a BatchNorm1d(.|\n)* model\.eval\(\)"),
    ):
        with pytest.raises(UsageError, match=message):
            refuse_statistics(model.named_modules())
        refuse_statistics(model.eval().named_modules())
    beside = nn.Sequential(compiled(nn.Linear(6, 6)), nn.BatchNorm1d(6))
    refuse_statistics(beside.named_modules())


# ---- collections


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4))


def leaf(i: int) -> Tensor:
    return torch.randn(3 + i % 2, 6, generator=torch.Generator().manual_seed(i))


def in_one(leaves: int) -> list[tuple[str, int, Tensor, Tensor]]:
    statistics = Statistics(Meeting(0, 1))
    model = net()
    statistics.watch(model.named_modules())
    with statistics.active():
        for i in range(leaves):
            with statistics.collect(i):
                model(leaf(i))
    return [(c.layer, c.call, c.mean, c.variance) for c in statistics.exchange(leaves, signature="", site="")]


def equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(
        x[:2] == y[:2] and torch.equal(x[2], y[2]) and torch.equal(x[3], y[3]) for x, y in zip(a, b, strict=True)
    )


def test_any_cut_of_the_leaves_gives_the_same_bits() -> None:
    """Neighbours, strided ones, any order; as they travel."""
    for leaves in (1, 2, 3, 7, 8, 13):
        expected = in_one(leaves)
        assert not equal(expected, in_one(leaves + 1))
        shuffled = torch.randperm(leaves, generator=torch.Generator().manual_seed(leaves)).tolist()
        cuts: list[list[list[int]]] = [
            [list(share(leaves, 3, rank)) for rank in range(3)],
            [list(range(r, leaves, 4)) for r in range(4)],
            [shuffled[: leaves // 2], shuffled[leaves // 2 :]],
        ]
        for cut in cuts:
            last = Statistics(Meeting(0, 1))
            model = net()
            last.watch(model.named_modules())
            with last.active():
                pass
            for mine in cut:
                one = Statistics(Meeting(0, 1))
                copied = copy.deepcopy(model)
                one.watch(copied.named_modules())
                with one.active():
                    for i in mine:
                        with one.collect(i):
                            copied(leaf(i))
                    last.add(_decode(_encode(one.take())))
            found = last.exchange(leaves, signature="", site="")
            assert equal([(c.layer, c.call, c.mean, c.variance) for c in found], expected)


def test_copies_of_a_model_collect_side_by_side_in_threads() -> None:
    """A copy's hooks are inert until its own Statistics watches it; all copies are inside a forward at once."""
    leaves, threads = 8, 4
    model = net()
    main = Statistics(Meeting(0, 1))
    main.watch(model.named_modules())
    copies = [copy.deepcopy(model) for _ in range(threads)]
    collections = [Statistics(Meeting(0, 1)) for _ in range(threads)]
    together = threading.Barrier(threads)

    def compute(which: int) -> None:
        statistics, own = collections[which], copies[which]
        statistics.watch(own.named_modules())
        own[1].register_forward_pre_hook(lambda *_: [together.wait(20), None][1])
        with statistics.active():
            for i in range(which, leaves, threads):
                with statistics.collect(i):
                    own(leaf(i))

    with main.active():
        alone = copy.deepcopy(model)
        alone(leaf(0))  # of nobody's: as in plain torch
        assert count(alone[1]) == 1
        running = [threading.Thread(target=compute, args=(which,)) for which in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        assert not main.collected
        for statistics in collections:
            main.add(statistics.take())
        changes = main.exchange(leaves, signature="", site="")
    assert equal([(c.layer, c.call, c.mean, c.variance) for c in changes], in_one(leaves))
    before = buffers(model)
    assert all(same(buffers(c), before) for c in copies)
    main.apply(changes)
    assert not same(buffers(model), before)


def test_outputs_and_gradients_keep_their_bits() -> None:
    for layer, shape in (
        (nn.BatchNorm1d(5), (4, 5)),
        (nn.BatchNorm2d(5), (4, 5, 3, 3)),
        (nn.BatchNorm3d(5), (2, 5, 2, 3, 2)),
    ):
        plain = copy.deepcopy(layer)
        statistics = Statistics(Meeting(0, 1))
        statistics.watch(layer.named_modules())
        results = []
        for module in (layer, plain):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
            with statistics.active(), statistics.collect(0), torch.autocast("cpu", enabled=False):
                y = module(input=x) if module is layer else module(x)
                y.square().mul(x).sum().backward()
            results.append([y, x.grad, module.weight.grad, module.bias.grad])
        assert all(map(same_tensor, *results))
        assert torch.equal(layer.get_buffer("running_var"), torch.ones(5))
        with statistics.active(), statistics.collect(0):
            layer(torch.zeros((0, *shape[1:])))  # no value at all
        assert statistics.exchange(1, signature="", site="") == []
        statistics.close()
        layer(torch.randn(shape))
        assert count(layer) == 1
