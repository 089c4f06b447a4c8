"""Weights that are written after `prepare` would not be those of one process, where a process has a part of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep.errors import UsageError
from tests.ranks import run_ranks
from tests.train.scripts import Transformer, training_run


def begin(directory: Path, early: bool, **layout: object) -> str:
    with training_run(directory, **layout) as run:
        model = Transformer()
        if early:
            nn.init.normal_(model.embed.weight)
        model = run.prepare(model)
        if not early:
            with torch.no_grad():
                for p in model.parameters():
                    if not p.is_meta:
                        p.mul_(2)
        try:
            run.restore(model=model)
        except UsageError as error:
            return error.message
        return ""


@pytest.mark.parametrize("layout", [{"stages": 2}, {"shard": True}])
def test_weights_written_after_prepare_are_refused(layout: dict[str, object], tmp_path: Path) -> None:
    for said in run_ranks(lambda: begin(tmp_path / "late", early=False, **layout), 2):
        assert "was changed after run.prepare" in said
    assert run_ranks(lambda: begin(tmp_path / "early", early=True, **layout), 2) == ["", ""]


def test_a_whole_model_may_be_changed(tmp_path: Path) -> None:
    assert run_ranks(lambda: begin(tmp_path, early=False), 2) == ["", ""]
