"""What docs/data.md shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.metrics  # noqa: F401  it sets environment variables, once
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep
from tests.train.scripts import training_run

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(F.one_hot(x.clamp(min=0) % 8, 8).float().sum(1) if x.dtype == torch.int64 else x)
        return result


def pad(rows: list[Tensor]) -> Any:
    texts = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    return texts, texts.clamp(min=0).sum(1) % 4


def loss_fn(model: nn.Module, batch: Any) -> Any:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), torch.as_tensor(labels).long(), reduction="sum"), len(inputs)


def blocks(section: str) -> list[str]:
    found: list[str] = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    return found


def names(folder: Path) -> dict[str, Any]:
    """What the page's blocks take for given."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 1000)
    rng.random((1000, 8), dtype=np.float32).tofile(folder / "images.bin")
    np.save(folder / "labels.npy", rng.integers(0, 4, 1000))
    test_set = TensorDataset(torch.randn(50, 8), torch.arange(50) % 2)
    texts = [torch.full((int(n),), int(n)) for n in lengths]
    classes = torch.arange(1000) % 5
    given: dict[str, Any] = {"np": np, "torch": torch, "folder": folder, "texts": texts, "lengths": lengths}
    return {**given, "classes": classes, "pad": pad, "test_set": test_set}


def test_map_style_data_order_weights_and_lengths(tmp_path: Path) -> None:
    given = names(tmp_path)
    for section in ("Map-style data", "Order", "Weights", "Lengths"):
        (block,) = blocks(section)
        with training_run(tmp_path / section, global_batch=32, micro_batch=16) as run:
            model = run.prepare(Net())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            given["run"] = run
            exec(block, given)
            for step in given["steps"]:
                step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 1:
                    break


def test_streams(tmp_path: Path) -> None:
    given = names(tmp_path)
    for number, block in enumerate(blocks("Streams")):
        with training_run(tmp_path / str(number), global_batch=32, micro_batch=4) as run:
            model = run.prepare(Net())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            given.update(run=run, optimizer=optimizer, evenstep=evenstep)
            exec(block, given)
            samples = 0
            for step in given["steps"]:
                step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()
                samples += step.samples
                if step.ends_epoch:
                    break
        assert samples == (1000, 400)[number]


def test_metrics(tmp_path: Path) -> None:
    given = names(tmp_path)
    with training_run(tmp_path / "metrics", global_batch=32, micro_batch=16) as run:
        given["run"] = run
        run.prepare(Net())
        for block in blocks("Metrics"):
            exec(block, given)
        run._close(failed=True)
    assert given["means"].keys() == {"precision", "recall"}
