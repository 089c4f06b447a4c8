"""Metrics of torchmetrics and scikit-learn: the numbers of one plain loop, on any number of processes."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc, multiclass_stat_scores

from evenstep.errors import UsageError
from evenstep.train.calls import Calls
from evenstep.train.evaluate import predict
from evenstep.train.meeting import Meeting
from evenstep.train.randomness import Randomness
from tests.ranks import run_ranks
from tests.train.scripts import training_run

Image = dict[str, Tensor]


class Scenes:
    """23 images with 0 to 4 boxes each, and a label: whether there are more than two. 23 is a multiple of nothing."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        corner = torch.rand(index % 5, 2, generator=generator)
        boxes = torch.cat([corner, corner + 0.2 + torch.rand(index % 5, 2, generator=generator)], 1)
        return torch.randn(6, generator=generator), boxes, int(index % 5 > 2)


def scenes(samples: list[Any]) -> Any:
    images, boxes, labels = zip(*samples, strict=True)
    return torch.stack(images), list(boxes), torch.tensor(labels)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def detect(model: nn.Module, batch: Any) -> dict[str, Any]:
    """What a detector gives: for each image boxes, as many as it finds, and scores; and beside them what is there."""
    images, truth, labels = batch
    out = model(images)
    found: list[Image] = []
    for row, boxes in zip(out, truth, strict=True):
        wrong = torch.rand(len(boxes) % 3, 4)
        moved = boxes + 0.05 * row[:1] * torch.randn_like(boxes)
        scores = torch.sigmoid(row[0] + torch.randn(len(boxes) + len(wrong)))
        found.append({"boxes": torch.cat([moved, wrong]), "scores": scores})
    return {"found": found, "truth": truth, "score": torch.sigmoid(out[:, 0]), "logits": out, "label": labels}


def overlap(one: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of a box with each of the others, as (x1, y1, x2, y2)."""
    low, high = torch.maximum(one[:2], others[:, :2]), torch.minimum(one[2:], others[:, 2:])
    common = (high - low).clamp(min=0).prod(1)
    area = (one[2:] - one[:2]).clamp(min=0).prod() + (others[:, 2:] - others[:, :2]).prod(1) - common
    return common / area


def mean_average_precision(found: list[Image], truth: list[Tensor]) -> float:
    """Over the overlaps 0.5, 0.6, ..., 0.9: the average precision of all boxes of all images, by score."""
    ranked = sorted(
        (
            (float(s), i, box)
            for i, image in enumerate(found)
            for s, box in zip(image["scores"], image["boxes"], strict=True)
        ),
        key=lambda entry: -entry[0],
    )
    precisions = []
    for least in (0.5, 0.6, 0.7, 0.8, 0.9):
        taken = [torch.zeros(len(boxes), dtype=torch.bool) for boxes in truth]
        hits: list[bool] = []
        for _, image, box in ranked:
            overlaps = overlap(box, truth[image]) * ~taken[image] if len(truth[image]) else torch.zeros(1)
            hits.append(bool(overlaps.max() >= least))
            if hits[-1]:
                taken[image][overlaps.argmax()] = True
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        precisions.append(float((precision * hits).sum() / sum(map(len, truth))))
    return sum(precisions) / len(precisions)


def metrics(outputs: dict[str, Any]) -> dict[str, float]:
    """As the documentation has them."""
    auroc = torchmetrics.AUROC(task="binary", sync_on_compute=False)
    auroc.update(outputs["score"], outputs["label"])
    return {
        "auroc": float(auroc.compute()),
        "auroc, function": float(binary_auroc(outputs["score"], outputs["label"])),
        "auroc, scikit-learn": float(roc_auc_score(outputs["label"], outputs["score"])),
        "average precision": float(average_precision_score(outputs["label"], outputs["score"])),
        "map": mean_average_precision(outputs["found"], outputs["truth"]),
    }


def counts(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Precision and recall from sums, with torchmetrics: each its own weight."""
    images, _, labels = batch
    stats = multiclass_stat_scores(model(images)[:, :2].argmax(1), labels, num_classes=2, average=None)
    true, false, _, missed, _ = stats[1]
    return {"precision": (true, true + false), "recall": (true, true + missed)}


def evaluated(directory: Path) -> Any:
    with training_run(directory, global_batch=28, micro_batch=4) as run:
        model = run.prepare(net())
        outputs = run.predict(Scenes(), detect, collate=scenes)
        means = run.evaluate(Scenes(), counts, collate=scenes, loaders=run.rank)
        run._close(failed=True)
    assert len(outputs["found"]) == len(outputs["score"]) == 23
    assert [len(boxes) for boxes in outputs["truth"]] == [i % 5 for i in range(23)]
    plain = model.eval()(torch.stack([Scenes()[i][0] for i in range(23)]))
    assert torch.allclose(outputs["logits"], plain)
    return metrics(outputs), means, outputs["logits"].tolist(), [image["boxes"].tolist() for image in outputs["found"]]


def test_metrics_are_those_of_one_process_on_any_number(tmp_path: Path) -> None:
    alone = evaluated(tmp_path / "1")
    numbers, means = alone[:2]
    assert 0.1 < numbers["map"] < 0.9
    assert numbers["auroc"] == pytest.approx(numbers["auroc, scikit-learn"], abs=1e-6)
    for world_size in (2, 3, 7):  # 6 micro-batches: one process of 7 has none
        assert run_ranks(lambda n=world_size: evaluated(tmp_path / str(n)), world_size) == [alone] * world_size
    labels = np.array([i % 5 > 2 for i in range(23)])
    said = np.array(alone[2])[:, :2].argmax(1) == 1
    assert means["precision"] == (said & labels).sum() / said.sum()
    assert means["recall"] == (said & labels).sum() / labels.sum()


Found = namedtuple("Found", "box score")


ROWS = torch.arange(20).reshape(5, 4)


@dataclass
class Detection:
    box: Tensor
    name: str


def test_entries_of_any_form_come_back_plain() -> None:
    def fn(batch: Any) -> Any:
        rows = [torch.ones(int(i)) for i in batch]
        return {
            "named": [Found(row, 0.5) for row in rows],
            "dataclass": [Detection(row, "x") for row in rows],
            "nested": torch.nested.nested_tensor([torch.ones(int(i) + 1) for i in batch], layout=torch.jagged),
            "lists": [[row.numpy()] * 2 for row in rows],
            "odd": [{"a": (row.bfloat16(), {1: [int(i), None]}), "b": ROWS[: int(i)].T} for i, row in enumerate(rows)],
            "arrays": [(np.full((2, 3), "x"), np.array(1.5, ">f8"), np.ones(2, bool), np.float16(0.5)) for _ in rows],
        }

    arguments: dict[str, Any] = {"micro_batch": 2, "randomness": Randomness(0), "meeting": Meeting(0, 1)}
    found = predict(Calls(range(5), fn, [], **arguments))
    assert [(len(box), score) for box, score in found["named"]] == [(i, 0.5) for i in range(5)]
    assert [len(entry["box"]) for entry in found["dataclass"]] == list(range(5))
    assert [len(row) for row in found["nested"]] == [1, 2, 3, 4, 5]
    assert [len(entry[1]) for entry in found["lists"]] == list(range(5))
    assert [int(a[1][1][0]) for a in (entry["a"] for entry in found["odd"])] == [0, 1, 0, 1, 0]
    assert found["odd"][3]["a"][0].dtype == torch.bfloat16
    assert torch.equal(found["odd"][3]["b"], ROWS[:1].T)
    text, big, flags, half = found["arrays"][4]
    assert text.tolist() == [["x"] * 3] * 2
    assert (big.dtype.str, big.shape, big.item()) == (">f8", (), 1.5)
    assert (flags.dtype, type(half)) == (np.dtype(bool), np.float16)
    with pytest.raises(UsageError, match=r"micro-batch 0 returned a list with a set in it, .*(?s:.*)for each sample"):
        predict(Calls(range(5), lambda b: [{1} for _ in b], [], **arguments))
