"""step.backward_whole: losses that compare all samples of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenstep.errors import LossError, PeerFailed, UsageError
from tests.ranks import run_ranks
from tests.train.scripts import fingerprints, training_run

BATCH = 14


def pairs(dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    one = torch.randn(44, 6, generator=generator, dtype=dtype)
    return TensorDataset(one, one + 0.3 * torch.randn(44, 6, generator=generator, dtype=dtype), torch.arange(44) % 5)


class Towers(nn.Module):
    """Two encoders and a temperature, as CLIP has them."""

    def __init__(self, dropout: float = 0.0, statistics: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8) if statistics else nn.LayerNorm(8)
        self.left = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.logit_scale = nn.Parameter(torch.ones(1))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(left), dim=1), F.normalize(self.right(right), dim=1)


COUNTER = iter(range(100))


def embed(model: nn.Module, batch: Any) -> Any:
    left, right = model(batch[0], batch[1])
    return {"left": left, "right": right, "label": batch[2]}


def info_nce(model: Towers, embeddings: Any) -> Any:
    """The labels take part, so that they are seen to come through."""
    logits = model.logit_scale.exp() * embeddings["left"] @ embeddings["right"].T
    targets = torch.arange(len(logits))
    same = (embeddings["label"][:, None] == embeddings["label"][None]).to(logits.dtype)
    loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2 + 0.01 * (logits * same).mean()
    return loss, {"accuracy": (logits.argmax(1) == targets).to(logits.dtype).mean()}


def train(directory: Path, make: Callable[[], nn.Module] = Towers, **options: Any) -> list[str]:
    with training_run(directory, global_batch=BATCH, **options) as run:
        model = run.prepare(make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in run.steps(pairs(), epochs=2):
            result = step.backward_whole(embed, info_nce)
            assert result.weight is None
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=result.loss, **result.metrics)
    return fingerprints(run)


def with_all() -> nn.Module:
    return Towers(dropout=0.2, statistics=True)


@pytest.mark.parametrize(
    ("world_size", "layout", "precision"),
    [(3, {}, "fp32"), (2, {"shard": True}, "fp32"), (2, {"thread_replicas": 2}, "fp32"), (2, {}, "fp16")],
)
def test_the_same_bits_on_every_layout(world_size: int, layout: dict[str, Any], precision: str, tmp_path: Path) -> None:
    expected = train(tmp_path / "alone", with_all, precision=precision)
    assert len(set(expected)) == len(expected) == 8
    several = run_ranks(lambda: train(tmp_path / "run", with_all, precision=precision, **layout), world_size)
    assert several == [expected] * world_size


def test_what_a_layout_cannot_do_is_refused(tmp_path: Path) -> None:
    def said(directory: Path, loss: Any, cut: Any = None, **layout: Any) -> str:
        texts = []
        with training_run(directory, global_batch=BATCH, fingerprints=False, **layout) as run:
            run.prepare(Towers(), shard=cut)
            for step in run.steps(pairs(), steps=1):
                with pytest.raises(UsageError) as caught:
                    step.backward_whole(embed, loss)
                texts.append(str(caught.value))
        return texts[0]

    def deeper(model: Towers, embeddings: Any) -> Any:
        return model.left[4](F.pad(embeddings["left"], (0, 4))).square().mean()

    for text in run_ranks(lambda: said(tmp_path / "stages", info_nce, stages=2), 2):
        assert "step.backward_whole is not offered with --stages" in text
    for text in run_ranks(lambda: said(tmp_path / "shard", deeper, ["left.4"], shard=True), 2):
        assert "calls a module whose parameters are cut by themselves" in text


@pytest.mark.parametrize("micro_batch", [1, 4, BATCH])
def test_equal_to_the_big_batch_in_one_go(micro_batch: int, tmp_path: Path) -> None:
    data, results = pairs(torch.float64), []
    with training_run(tmp_path, global_batch=BATCH, micro_batch=micro_batch, fingerprints=False) as run:
        model = run.prepare(Towers().double())
        for step in run.steps(data, steps=1, shuffle=False):
            results.append(step.backward_whole(embed, info_nce))
    (result,) = results
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss, metrics = info_nce(model, embed(model, data[:BATCH]))
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert result.metrics == {"accuracy": metrics["accuracy"].item()}
    assert model.logit_scale.grad is not None
    assert model.logit_scale.grad.abs() > 1e-3
    torch.testing.assert_close(ours, [p.grad for p in model.parameters()], rtol=1e-10, atol=1e-13)


def test_fp16_keeps_gradients_that_are_small(tmp_path: Path) -> None:
    """1e-7 of a gradient is nothing in float16, unless it is scaled in both passes."""

    def gradients(precision: str) -> list[Tensor | None]:
        with training_run(tmp_path / precision, global_batch=BATCH, precision=precision, fingerprints=False) as run:
            model = run.prepare(Towers())
            for step in run.steps(pairs(), steps=1):
                step.backward_whole(embed, lambda model, e: info_nce(model, e)[0] * 1e-6)
            return [p.grad for p in model.parameters()]

    for one, other in zip(gradients("fp16"), gradients("fp32"), strict=True):
        assert one is not None
        assert other is not None
        assert (one - other).abs().max() < 0.05 * other.abs().max()


def test_an_overflow_is_computed_again(tmp_path: Path) -> None:
    with training_run(tmp_path, global_batch=BATCH, precision="fp16", fingerprints=False) as run:
        model = run.prepare(Towers())
        for step in run.steps(pairs(), steps=1):
            step.backward_whole(embed, lambda model, e: info_nce(model, e)[0] * 1e4)
        assert run._precision.scaler is not None
        assert run._precision.scaler.scale < 2.0**16
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_statistics_count_once_and_other_gradients_stay(tmp_path: Path) -> None:
    with training_run(tmp_path, global_batch=BATCH, fingerprints=False) as run:
        model = run.prepare(Towers(statistics=True))
        for step in run.steps(pairs(), steps=1):
            step.backward_whole(embed, info_nce)
            assert dict(model.named_buffers())["left.1.num_batches_tracked"] == 1
            once = model.logit_scale.grad
            assert once is not None
            before = once.clone()
            step.backward_whole(embed, info_nce)
            assert torch.equal(once, 2 * before)


def test_rows_may_differ_from_samples(tmp_path: Path) -> None:
    """Embeddings of two micro-batches need not have as many rows; the order is that of the samples."""
    seen: list[list[int]] = []

    def embed_some(model: Towers, batch: Any) -> Any:
        keep = batch[2] != 1
        return F.normalize(model.left(batch[0][keep])), batch[2][keep]

    def loss(model: nn.Module, embeddings: Any) -> Any:
        seen.append(embeddings[1].tolist())
        return (embeddings[0] @ embeddings[0].T).logsumexp(1).mean()

    def script(directory: Path) -> list[str]:
        with training_run(directory, global_batch=BATCH, micro_batch=3) as run:
            model = run.prepare(Towers())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in run.steps(pairs(), steps=2, shuffle=False):
                step.backward_whole(embed_some, loss)
                optimizer.step()
                optimizer.zero_grad()
            assert model.right[0].weight.grad is None
        assert seen[0] == [k % 5 for k in range(BATCH) if k % 5 != 1]
        return fingerprints(run)

    expected = script(tmp_path / "alone")
    seen.clear()
    assert run_ranks(script, 3, tmp_path / "run") == [expected] * 3


def test_the_error_about_a_loss_that_is_not_additive_names_it(tmp_path: Path) -> None:
    with training_run(tmp_path, global_batch=BATCH, micro_batch=4, fingerprints=False) as run:
        run.prepare(Towers())
        for step in run.steps(pairs(), steps=1):
            with pytest.raises(LossError, match=r"loss is not additive(?s:.)*step.backward_whole"):
                step.backward(
                    lambda model, batch: (info_nce(model, embed(model, batch))[0] * len(batch[0]), len(batch[0]))
                )


@pytest.mark.parametrize(
    ("embed_fn", "loss_fn", "message"),
    [
        (
            embed,
            lambda model, e: e["left"].square().sum(1),
            r"shape \(14,\), expected a tensor of one number",
        ),
        (embed, lambda model, e: e["left"].detach().sum(), "nothing to differentiate"),
        (lambda model, batch: model(*batch[:2])[0].sum(), info_nce, "one number, expected tensors with a row a sample"),
        (lambda model, batch: 3, info_nce, "returned int, expected tensors"),
        (lambda model, batch: model.left(batch[0])[:, : 1 + len(batch[0])], info_nce, "for micro-batch 0 and"),
        (
            lambda model, batch: batch[0] + next(COUNTER),
            lambda model, e: (e * model.logit_scale).sum(),
            "computed twice",
        ),
        (embed, 3, "int as loss_fn"),
    ],
)
def test_what_is_wrong_is_said(embed_fn: Any, loss_fn: Any, message: str, tmp_path: Path) -> None:
    with training_run(tmp_path, global_batch=BATCH, micro_batch=3, fingerprints=False) as run:
        model = run.prepare(Towers())
        for step in run.steps(pairs(), steps=1):
            with pytest.raises(LossError, match=message):
                step.backward_whole(embed_fn, loss_fn)
            assert all(p.grad is None for p in model.parameters())
            step.backward_whole(embed, info_nce)


def test_a_failure_on_one_process_is_told_to_all(tmp_path: Path) -> None:
    def failing(model: nn.Module, batch: Any) -> Any:
        if 12 in batch[3]:
            raise ValueError("sample 12")
        return embed(model, batch)

    def script() -> list[str]:
        said = []
        with training_run(tmp_path / "run", global_batch=BATCH, fingerprints=False) as run:
            run.prepare(Towers())

            def other(model: Any, embeddings: Any, factor: int = 1 + run.rank) -> Any:
                return info_nce(model, embeddings)[0] * factor

            data = TensorDataset(*pairs().tensors, torch.arange(44))
            for step in run.steps(data, steps=1, shuffle=False):
                for embed_fn, loss_fn in (
                    (failing, info_nce),
                    (embed, other),
                ):
                    try:
                        step.backward_whole(embed_fn, loss_fn)
                    except (ValueError, PeerFailed, LossError) as error:
                        said.append(f"{type(error).__name__}: {error}".splitlines()[0])
        return said

    first, second = run_ranks(script, 2)
    assert second[0] == "ValueError: sample 12"
    assert first[0] == "PeerFailed: rank 1 failed in step 0: ValueError: sample 12"
    assert first[1] == second[1]
    assert "LossError: the loss of the whole batch is" in first[1]
