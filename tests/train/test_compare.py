"""Two files of weights: which parameter differs first, and by how much; no pickle is executed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.train.compare import compare, load_weights


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "first.weight": torch.randn(3, 4, generator=generator),
        "first.bias": torch.randn(3, generator=generator),
        "norm.count": torch.tensor(7),
        "second.weight": torch.randn(2, 3, generator=generator),
    }


def changed(**values: Any) -> dict[str, Tensor]:
    return {**weights(), **{name.replace("__", "."): value for name, value in values.items()}}


def test_equal_within_the_tolerance_of_the_largest_value() -> None:
    theirs = {name: t * (1 + 1e-5) if t.is_floating_point() else t for name, t in weights().items()}
    found = compare(weights(), theirs, 1e-4)
    assert (found["compared"], found["differ"], found["first"]) == (4, 0, None)
    assert 0.9e-5 < found["largest"] < 1.1e-5
    found = compare(weights(), theirs, 1e-6)
    assert found["differ"] == 3
    assert found["first"]["name"] == "first.weight"
    largest = float(theirs["first.weight"].abs().max())
    assert found["first"]["absolute"] == pytest.approx(1e-5 * largest, rel=1e-2)
    assert compare(weights(), weights(), 0.0)["differ"] == 0


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (changed(first__bias=torch.zeros(4)), "its shape is (3,) and (4,)"),
        (changed(first__bias=torch.zeros(3)), "1 of its largest value"),
        (changed(first__bias=weights()["first.bias"].double()), "its dtype is float32 and float64"),
        (changed(first__bias=torch.full((3,), float("nan"))), "3 of its values are NaN on one side only"),
        (changed(first__bias=torch.full((3,), float("inf"))), "by up to inf"),
        (changed(norm__count=torch.tensor(8)), "its values differ"),
    ],
)
def test_what_differs_is_named(theirs: dict[str, Tensor], why: str) -> None:
    found = compare(weights(), theirs, 1e-3)
    assert found["differ"] == 1
    assert why in found["first"]["why"]


def test_missing_and_extra_names_and_nans() -> None:
    theirs = {"new": torch.zeros(1), **weights()}
    del theirs["second.weight"]
    found = compare(weights(), theirs, 1e-3)
    assert (found["missing"], found["extra"], found["differ"]) == (["second.weight"], ["new"], 0)
    nan = changed(first__bias=torch.tensor([float("nan"), 1.0, float("inf")]))
    found = compare(nan, nan, 0.0)
    assert (found["differ"], found["nan"]) == (0, ["first.bias"])


def test_checkpoints_and_wrappers_are_seen_through(tmp_path: Path) -> None:
    plain = weights()
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in plain.items()}
    momentum = {"state": {0: {"momentum": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    for name, tree in {
        "plain.pt": plain,
        "wrapped.pt": wrapped,
        "model.pt": {"model": plain, "optimizer": momentum, "epoch": 3},
        "nested.ckpt": {"state_dict": {"model": wrapped}, "epoch": 3},
    }.items():
        torch.save(tree, tmp_path / name)
        found = load_weights(tmp_path / name)
        assert list(found) == list(plain)
        assert all(torch.equal(found[key], plain[key]) for key in plain)
    save_file(plain, tmp_path / "plain.safetensors")
    assert load_weights(tmp_path / "plain.safetensors").keys() == plain.keys()
    (tmp_path / "parts").mkdir()
    save_file({"a": plain["first.bias"]}, tmp_path / "parts" / "1.safetensors")
    save_file({"b": plain["first.bias"]}, tmp_path / "parts" / "2.safetensors")
    assert list(load_weights(tmp_path / "parts")) == ["a", "b"]
    torch.save([{"w": plain["first.bias"]}], tmp_path / "list.pt")
    assert list(load_weights(tmp_path / "list.pt")) == ["[0].w"]


class Trap:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_no_pickle_is_executed(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1), "trap": Trap(tmp_path / "sprung")}, tmp_path / "trap.pt")
    with pytest.raises(UsageError, match="would run code"):
        load_weights(tmp_path / "trap.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(UsageError, match="would run code"):
        load_weights(tmp_path / "module.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["none.pt", "cut.pt", "cut.safetensors", "empty.pt", "folder"])
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    torch.save(weights(), tmp_path / "whole.pt")
    save_file(weights(), tmp_path / "whole.safetensors")
    for kind in ("pt", "safetensors"):
        data = (tmp_path / f"whole.{kind}").read_bytes()
        (tmp_path / f"cut.{kind}").write_bytes(data[: len(data) // 2])
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(UsageError, match=name):
        load_weights(tmp_path / name)
