"""Where a model is cut into stages, and what each of them holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenstep.errors import UsageError
from evenstep.train.options import NOTHING, Asked
from evenstep.train.parallel.cut import cut, place

CPU = torch.device("cpu")


class Language(nn.Module):
    """Two embeddings that are added, four equal blocks, a norm, and a head that is tied to the first embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(50, 8), nn.Embedding(9, 8)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.token.weight
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.ones(9))


def test_parts_are_even_and_do_not_begin_with_an_embedding() -> None:
    model = Language()
    names = [name for name, _ in cut(model, 2, NOTHING).units]
    assert names == ["token", "position", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    assert cut(model, 2, NOTHING).parts == [range(4), range(4, 8)]
    assert cut(model, 3, NOTHING).parts == [range(2), range(2, 7), range(7, 8)]
    assert cut(model, 2, Asked(stages=["position"])).parts == [range(1), range(1, 8)]
    with pytest.raises(UsageError, match="can be cut before 6 of its units"):
        cut(model, 8, NOTHING)
    with pytest.raises(UsageError, match="has 8 units with parameters"):
        cut(model, 9, NOTHING)


def test_a_measured_example_counts() -> None:
    class Wide(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 400), nn.Tanh(), nn.Linear(400, 4))

    example = torch.randn(1000, 4)
    assert cut(Wide(), 2, NOTHING).parts == [range(2), range(2, 3)]
    assert cut(Wide(), 2, Asked(example=example)).parts == [range(1), range(1, 3)]


def test_each_stage_holds_its_own_and_the_tied() -> None:
    found = []
    for stage in range(2):
        model = Language()
        objects = dict(model.named_parameters())
        model.head.weight.requires_grad_()
        parts = cut(model, 2, NOTHING)
        elsewhere = place(model, parts, stage, CPU)
        assert all(objects[name] is p for name, p in model.named_parameters())
        assert model.head.weight is model.token.weight
        here = {name for name, p in model.named_parameters() if not p.is_meta}
        buffers = {name for name, buffer in model.named_buffers() if not buffer.is_meta}
        everything = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
        assert set(elsewhere.values()) == everything - here - buffers
        assert all(p.requires_grad for p in model.parameters())
        assert [id(p) for p in parts.shared(stage)] == [id(model.temperature), id(model.token.weight)]
        found.append((here, buffers))
    both = {"temperature", "token.weight"}
    assert found[0][0] & found[1][0] == both
    assert found[0][0] | found[1][0] == dict(Language().named_parameters()).keys()
    assert found[0][1] & found[1][1] == {"mask"}
    assert {name[:8] for name in found[0][1] - {"mask"}} == {"blocks.0", "blocks.1"}


def test_a_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile(backend="eager")
    with pytest.raises(UsageError, match="1 is compiled"):
        cut(model, 2, NOTHING)


def test_a_model_in_use_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loss = model(torch.randn(1, 2)).sum()
    with pytest.raises(UsageError, match=r"1\.weight cannot be taken out of memory"):
        place(model, cut(model, 2, NOTHING), 0, CPU)
    assert loss.requires_grad
