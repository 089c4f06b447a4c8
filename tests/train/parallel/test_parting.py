"""A process that goes another way than the others is named, also where a model lies on several: nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # here, so that not every rank imports it
import torch.nn.functional as F
from torch import nn

from evenstep.errors import MismatchError
from evenstep.train.run import Run
from tests.ranks import run_ranks
from tests.train.scripts import training_run


class Rows:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / 16), index % 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def loss_fn(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def train(run: Run, way: str, who: int, when: int) -> None:
    with run:
        run.prepare(model())
        for step in run.steps(Rows(), steps=3):
            if run.rank == who and step.number == when:
                if way.startswith("reduce"):
                    run.reduce(1.0)
                elif way == "evaluate":
                    run.evaluate(Rows(), loss_fn)
                else:
                    break
            if way == "evaluate and reduce":
                if run.rank != who:
                    run.evaluate(Rows(), loss_fn)
                run.reduce(1.0)
            if way == "reduce, not embeddings":
                step.backward_whole(lambda model, batch: model(batch[0]), lambda _, outputs: outputs.square().sum())
            step.backward(loss_fn)


@pytest.mark.parametrize("layout", [{"stages": 2}, {"shard": True, "replicas": 2}], ids=["stages", "shards"])
def test_one_process_that_goes_another_way_is_named(layout: dict[str, Any], tmp_path: Path) -> None:
    ways = [
        (way, who, when)
        for who in (0, 3)
        for way, when in (("reduce", 0), ("reduce", 1), ("evaluate", 1), ("break", 2), ("evaluate and reduce", 0))
    ]
    ways += [("reduce, not embeddings", who, 0) for who in (0, 3) if "shard" in layout]

    def body() -> list[str]:
        dist.init_process_group("gloo")
        said = []
        for k, (way, who, when) in enumerate(ways):
            try:
                train(training_run(tmp_path / str(k), global_batch=8, **layout), way, who, when)
                said.append("nothing")
            except MismatchError as error:
                said.append(str(error))
        dist.destroy_process_group()
        return said

    for said in run_ranks(body, 4, timeout=30):
        for (way, who, _), text in zip(ways, said, strict=True):
            assert "the processes are at different calls" in text, (way, who)
            assert f"rank {who}: " in text, (way, who)
