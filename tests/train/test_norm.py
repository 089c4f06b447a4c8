from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.errors import EvenstepError, UsageError
from evenstep.train.norm import clip_, fold, folds_of, norm_of_folds, row_squares

SHAPES: list[tuple[int, ...]] = [
    (64, 33), (1000,), (1,), (), (7, 3, 5, 5), (300, 1), (2, 70_000), (70_000, 2), (70_001,), (0,), (0, 3), (3, 0),
]  # fmt: skip


def gradients(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"p{i}": (torch.randn(shape, generator=generator) * 10.0 ** (-i % 4)).to(dtype)
        for i, shape in enumerate(SHAPES)
    }


def total_norm(tensors: dict[str, Tensor]) -> float:
    return norm_of_folds(folds_of(tensors))


@given(st.sampled_from([s for s in SHAPES if s]), st.lists(st.integers(0, 70_001), max_size=6), st.booleans())
def test_any_cut_along_the_first_dimension_gives_the_same_bits(
    shape: tuple[int, ...], cuts: list[int], turned: bool
) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if turned:
        whole = whole.t().contiguous().t() if whole.dim() == 2 else whole.flip(0)
    ends = [0, *sorted(cut % (shape[0] + 1) for cut in cuts), shape[0]]
    parts = [row_squares(whole[a:b].clone()) for a, b in pairwise(ends)]
    assert torch.equal(torch.cat(parts), row_squares(whole))
    assert torch.equal(fold(torch.cat(parts)), fold(row_squares(whole)))


def test_a_shard_at_any_address_gives_the_same_bits() -> None:
    whole = torch.randn(50, 37)
    for offset in range(16):
        moved = torch.empty(50 * 37 + 16)[offset : offset + 50 * 37].view(50, 37).copy_(whole)
        assert torch.equal(row_squares(moved), row_squares(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_it_agrees_with_torch(dtype: torch.dtype) -> None:
    named = gradients(dtype)
    before = {name: tensor.clone() for name, tensor in named.items()}
    expected = torch.cat([tensor.double().reshape(-1) for tensor in named.values()]).norm().item()
    assert total_norm(named) == pytest.approx(expected, rel=1e-13)
    assert all(torch.equal(named[name], before[name]) for name in named)


def test_complex_empty_and_none() -> None:
    assert total_norm({"z": torch.tensor([3 + 4j, 0])}) == 5.0
    assert total_norm({}) == 0.0
    assert total_norm({"e": torch.empty(0, 3)}) == 0.0
    assert total_norm({"s": torch.tensor(-2.0)}) == 2.0


def test_the_order_of_names_in_the_mapping_does_not_count() -> None:
    named = gradients()
    assert total_norm(dict(reversed(named.items()))) == total_norm(named)
    folds = {name: fold(row_squares(tensor)) for name, tensor in named.items()}
    assert norm_of_folds(folds) == total_norm(named)


def test_values_that_are_not_finite() -> None:
    assert total_norm({"a": torch.tensor([1.0, math.inf])}) == math.inf
    assert math.isnan(total_norm({"a": torch.tensor([1.0, math.nan])}))
    assert total_norm({"a": torch.full((2,), 3e38)}) == pytest.approx(3e38 * 2**0.5)  # float32 alone would overflow


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(UsageError, match="sparse"):
        total_norm({"a": torch.eye(3).to_sparse()})


def parameters(named: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    made = {name: nn.Parameter(torch.zeros_like(tensor)) for name, tensor in named.items()}
    for name, parameter in made.items():
        parameter.grad = named[name].clone()
    made["frozen"] = nn.Parameter(torch.ones(2))
    return made


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0, 1e9, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clip_does_as_torch_does(max_norm: float, dtype: torch.dtype) -> None:
    ours, theirs = parameters(gradients(dtype)), parameters(gradients(dtype))
    norm = clip_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(list(theirs.values()), max_norm)
    assert norm == pytest.approx(expected.item(), rel=1e-5)
    for name in ours:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-5, atol=0)
    if max_norm > norm:
        assert all(torch.equal(ours[name].grad, tensor) for name, tensor in gradients(dtype).items())  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clip_of_what_is_not_finite(bad: float) -> None:
    named = {"fine": torch.ones(2), "layer.weight": torch.tensor([1.0, bad])}
    made = parameters(named)
    with pytest.raises(EvenstepError, match=r"layer\.weight have values that are not finite"):
        clip_(made, 1.0, error_if_nonfinite=True)
    assert made["fine"].grad is not None
    assert torch.equal(made["fine"].grad, named["fine"])

    theirs = parameters(named)
    clip_(made, 1.0)
    torch.nn.utils.clip_grad_norm_(list(theirs.values()), 1.0)
    for name in named:
        torch.testing.assert_close(made[name].grad, theirs[name].grad, equal_nan=True)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_max_norm_that_is_none(max_norm: float) -> None:
    with pytest.raises(UsageError, match="max_norm is"):
        clip_({}, max_norm)


def test_clip_without_gradients() -> None:
    assert clip_({"a": nn.Parameter(torch.ones(2))}, 1.0) == 0.0


def test_it_is_cheap() -> None:
    """About 2 ms a million elements on one thread; ten times that would be felt."""
    named = {"a": torch.randn(1024, 512), "b": torch.randn(512, 1024)}
    times = []
    for _ in range(5):
        start = time.thread_time()
        total_norm(named)
        times.append(time.thread_time() - start)
    assert min(times) < 0.03
