"""Weights, orders, lengths and data sets of other makes: one model on every layout, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from evenstep.errors import IdentityError, UsageError
from evenstep.plan.bucketed import bucketed
from evenstep.plan.schedule import Schedule
from evenstep.train.data.orders import choose_order
from evenstep.train.data.samples import Samples
from tests.ranks import run_ranks
from tests.train.data.test_reading import read
from tests.train.scripts import Sentences, adamw, fingerprints, training_run

tqdm.monitor_interval = 0  # else a progress bar leaves a thread behind
SENTENCES = Sentences(45)
SIZES = [len(row) for row in SENTENCES.rows]
WEIGHTS = [float(i % 7) for i in range(45)]


def easy_first(epoch: int) -> Any:
    """The 30 shortest in epoch 0, then any 30."""
    return np.argsort(SIZES, kind="stable")[:30] if epoch == 0 else torch.randperm(45)[:30]


HOWS: dict[str, dict[str, Any]] = {
    "with replacement": {"weights": WEIGHTS, "num_samples": 31},
    "without replacement": {"weights": torch.tensor(WEIGHTS), "replacement": False},
    "a curriculum": {"order": easy_first},
    "by length": {"lengths": SIZES},
    "by length, weighted": {"lengths": np.array(SIZES), "weights": WEIGHTS, "drop_last": True},
}


def padded(rows: list[Any]) -> Tensor:
    texts = [torch.as_tensor(row["text"] if isinstance(row, dict) else row) for row in rows]
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.out = nn.Embedding(20, 8), nn.Dropout(0.2), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.clamp(min=0)) * (tokens >= 0)[..., None]
        result: Tensor = self.out(self.drop(x).sum(1))
        return result


def loss_fn(model: nn.Module, tokens: Tensor) -> Any:
    targets = tokens.clamp(min=0).sum(1) % 5
    return F.cross_entropy(model(tokens), targets, reduction="sum"), len(tokens)


def train(directory: Path, data: Any = SENTENCES, stop: int | None = None, loaders: int = 0, **how: Any) -> list[str]:
    with training_run(directory, global_batch=8, micro_batch=2, checkpoint_every=3) as run:
        model = run.prepare(Bag())
        optimizer = adamw(model.parameters())
        steps = run.steps(data, epochs=2, collate=padded, loaders=loaders, **how)
        run.restore(model=model, optimizer=optimizer)
        try:
            for step in steps:
                step.backward(loss_fn)
                if step.number == stop:
                    run._close(failed=True)
                    break
                optimizer.step()
                optimizer.zero_grad()
        except (IdentityError, UsageError):
            run._close(failed=True)
            raise
    return fingerprints(run)


def on(world_size: int, work: Any) -> list[Any]:
    """What `work()` returns on each of several processes. Its runs share one process group."""

    def rank() -> Any:
        dist.init_process_group("gloo")
        try:
            return work()
        finally:
            dist.destroy_process_group()

    return run_ranks(rank, world_size)


def test_one_model_on_every_layout_and_after_a_resume_on_another(tmp_path: Path) -> None:
    alone = {name: train(tmp_path / name / "1", **how) for name, how in HOWS.items()}
    assert len({found[-1] for found in alone.values()}) == len(HOWS)

    def whole_and_cut() -> Any:
        for name, how in HOWS.items():
            train(tmp_path / name / "cut", stop=7, loaders=1 if name == "by length" else 0, **how)
        return {name: train(tmp_path / name / "3", **how) for name, how in HOWS.items()}

    assert on(3, whole_and_cut) == [alone] * 3
    resumed = on(2, lambda: {name: train(tmp_path / name / "cut", **how)[-1] for name, how in HOWS.items()})
    assert resumed == [{name: found[-1] for name, found in alone.items()}] * 2


@pytest.mark.parametrize("name", HOWS)
def test_the_same_samples_on_every_layout(name: str) -> None:
    how = dict(HOWS[name])
    lengths, drop_last = how.pop("lengths", None), how.pop("drop_last", False)
    order: Any = choose_order(SENTENCES, seed=3, **how)
    schedule = Schedule(order.length, 8, 2, epochs=3, drop_last=drop_last)
    if lengths is not None:
        order = bucketed(order, lengths, 45, schedule, 3)
    alone = read(range(45), schedule, order=order)
    for world_size in (2, 3, 5, 12):
        spread = read(range(45), schedule, world_size, order=order)
        assert {k: v.tolist() for k, v in spread.items()} == {k: v.tolist() for k, v in alone.items()}
    late = read(range(45), schedule, 3, order=order, first_step=8)
    assert {k: v.tolist() for k, v in late.items()} == {k: v.tolist() for k, v in alone.items() if k[0] >= 8}
    seen = [i for k, batch in sorted(alone.items()) if k[0] < schedule.steps_per_epoch for i in batch.tolist()]
    assert name != "by length" or sorted(seen) == list(range(45))
    assert name != "without replacement" or sorted(seen) == [i for i in range(45) if WEIGHTS[i]]


def test_a_resume_with_another_order_is_named(tmp_path: Path) -> None:
    other = [*WEIGHTS[:-1], 9.0]
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("by length", {}, r"order: shuffled, lengths= \w+; now it is shuffled:"),
        ("by length", {"lengths": SIZES[::-1]}, r"lengths= \w+; now it is shuffled, lengths= \w+:"),
        ("with replacement", {"weights": other, "num_samples": 31}, r"weights= \w+, 31 draws with replacement; now"),
        ("without replacement", {"order": easy_first}, "samples: 38; now it is 30"),
        ("a curriculum", {"order": lambda epoch: easy_first(epoch)[::-1]}, r"order= a function, \w+ in epoch 0; now"),
        (
            "a curriculum",
            {"order": lambda epoch: np.roll(easy_first(epoch), epoch)},
            r"order in this epoch: \w+; now it is",
        ),
    ]
    for name, how, message in changes:
        if not (tmp_path / name).exists():
            train(tmp_path / name, stop=7, **HOWS[name])
        with pytest.raises(IdentityError, match=message):
            train(tmp_path / name, **how)


def test_processes_with_other_weights_or_another_order_in_a_later_epoch_are_told(tmp_path: Path) -> None:
    def work() -> list[str]:
        rank = dist.get_rank()
        told = []
        hows: list[dict[str, Any]] = [
            {"weights": [*WEIGHTS[:-1], 3.0 + rank]},
            {"lengths": [*SIZES[:-1], 3 + rank]},
            {"order": lambda epoch: np.roll(np.arange(45), epoch * rank)},
            {"order": [*range(20), *np.roll(np.arange(20, 25), rank), *range(25, 45)] * 4},
        ]
        for number, how in enumerate(hows):
            with pytest.raises(UsageError) as raised:
                train(tmp_path / str(number), loaders=number % 2, **how)
            told.append(raised.value.message)
        return told

    for weights, lengths, later, middle in on(2, work):
        assert "rank 1 has" in weights
        assert "draws with replacement" in weights
        assert "lengths= " in lengths
        assert later == "order= gave rank 1 another order for epoch 1 than rank 0"
        assert "order= " in middle


def test_hugging_faces_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"text": [row.tolist() for row in SENTENCES.rows], "size": SIZES})
    parts = datasets.concatenate_datasets([rows.select(range(20)), rows.select(range(20, 45))])
    calls: list[int] = []  # how many rows were read at a time
    original = datasets.Dataset.__getitems__

    def counting(self: Any, indices: list[int]) -> Any:
        calls.append(len(indices))
        return original(self, indices)

    expected = train(tmp_path / "list")
    monkeypatch.setattr(datasets.Dataset, "__getitems__", counting)
    assert train(tmp_path / "rows", rows) == expected
    assert calls[-46:] == ([2] * 22 + [1]) * 2
    together: Any = torch.utils.data.ConcatDataset([rows.select(range(20)), rows.select(range(20, 45))])
    assert Samples(together, None, 0)._at_once
    assert (
        on(2, lambda: [train(tmp_path / "c", parts, loaders=1), train(tmp_path / "t", together)])
        == [[expected] * 2] * 2
    )
    by_length = train(tmp_path / "lengths", lengths=SIZES)
    assert train(tmp_path / "column", rows.with_format("torch"), lengths=rows["size"]) == by_length
    with pytest.raises(UsageError, match=r"DatasetDict of the data sets \['train'\].*(?s:.*)data\['train'\]"):
        train(tmp_path / "dict", datasets.DatasetDict(train=rows))


def test_lengths_need_a_micro_batch(tmp_path: Path) -> None:
    with training_run(tmp_path, global_batch=8, micro_batch="auto", memory="1GiB") as run:
        run.prepare(Bag())
        with pytest.raises(UsageError, match='got lengths= with micro_batch="auto"'):
            run.steps(SENTENCES, epochs=1, lengths=SIZES)
        run._close(failed=True)
