"""Keyed randomness: what is drawn depends on what it is for, and on nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenstep.train.randomness import Randomness, blocks, kept_generators, key, seed_generators


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_a_key_is_the_same_on_every_machine_and_another_for_other_parts() -> None:
    assert key(0, "sample", 3, 7) == 5196445285644427895
    parts: list[tuple[int | str, ...]] = [
        (0, 1),
        (1, 0),
        (0, "1"),
        ("0", 1),
        (0, 1, 0),
        (),
        (0,),
        ("01",),
        (-1,),
        (2**80,),
    ]
    keys = [key(*p) for p in parts]
    assert len(set(keys)) == len(parts)
    assert all(0 <= k < 2**63 for k in keys)


def test_seeding_sets_the_three_generators() -> None:
    with kept_generators():
        seed_generators(key(1))
        first = draws()
        seed_generators(key(2))
        second = draws()
        seed_generators(key(1))
        assert draws() == first
        assert all(a != b for a, b in zip(first, second, strict=True))


def test_kept_generators_go_on_as_if_nothing_had_happened() -> None:
    seed_generators(5)
    draws()
    expected_then = None
    with kept_generators():
        expected_then = draws()

    @kept_generators()
    def fails() -> None:
        seed_generators(77)
        draws()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.default_generator.initial_seed() == 5
    assert draws() == expected_then


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.linear(x))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(4, 16), "drop": nn.Dropout(0.1), "h": nn.ModuleList([Block(), Block()])}
        )
        self.head = nn.Sequential(nn.Linear(16, 4), nn.Sequential(nn.ReLU(), nn.Dropout()))
        self.again = self.head


def test_blocks_are_the_places_where_a_model_can_be_cut() -> None:
    assert [name for name, _ in blocks(GPT())] == [
        "transformer.wte",
        "transformer.drop",
        "transformer.h.0",
        "transformer.h.1",
        "head.0",
        "head.1",
    ]
    assert [name for name, _ in blocks(nn.Sequential(Block(), nn.Sequential(Block(), Block())))] == ["0", "1.0", "1.1"]
    assert [name for name, _ in blocks(Block())] == ["linear", "drop"]
    assert blocks(nn.Linear(1, 1)) == []


class Wrapped(nn.Module):
    """A child that merely contains a list somewhere, as GPT-2's `transformer`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList([nn.ModuleList([Block(), Block()])])
        self.inner.norm = nn.LayerNorm(16)
        self.plain = Block()


def test_a_child_that_contains_a_list_stands_for_its_own_blocks() -> None:
    names = [name for name, _ in blocks(Wrapped())]
    assert names == ["inner.layers.0.0", "inner.layers.0.1", "inner.norm", "plain"]


def test_what_a_block_draws_does_not_depend_on_what_was_drawn_before_it() -> None:
    model = nn.Sequential(Block(), Block())
    randomness = Randomness(3)
    randomness.key_blocks(model, "model")
    x = torch.ones(4, 16)
    with randomness.keyed():
        randomness.begin_micro_batch(0, 0, 1)
        whole = model(x)
        after = draws()
        randomness.begin_micro_batch(0, 0, 1)
        hidden = model[0](x)
        draws()  # a second stage stands elsewhere in the stream
        assert torch.equal(model[1](hidden), whole)
        assert draws() == after
        randomness.begin_micro_batch(0, 0, 2)
        assert not torch.equal(model(x), whole)
        randomness.begin_micro_batch(0, 1, 1)
        assert not torch.equal(model(x), whole)


def test_two_calls_of_a_block_draw_differently() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    randomness = Randomness(0)
    randomness.key_blocks(model, "model")
    x = torch.ones(64)
    with randomness.keyed():
        randomness.begin_micro_batch(0, 0, 0)
        first, second = model(x), model(x)
        assert not torch.equal(first, second)
        randomness.begin_micro_batch(0, 0, 0)
        assert torch.equal(model(x), first)
        assert torch.equal(model(x), second)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_activation_checkpointing_draws_the_same_again(
    reentrant: bool, interleaved: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also when other micro-batches run forward before the first one's backward, as in a pipeline."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch would set it, and leave it set

    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        randomness = Randomness(9)
        randomness.key_blocks(model, "model")

        def forward(x: torch.Tensor) -> torch.Tensor:
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
            return x

        def loss(index: int) -> torch.Tensor:
            randomness.begin_micro_batch(0, 0, index)
            x = torch.ones(4, 16, requires_grad=True)
            return forward(x).sum() * 2 + forward(x).square().sum()

        with randomness.keyed():
            if interleaved:
                for value in [loss(0), loss(1)]:
                    value.backward()
            else:
                loss(0).backward()
                loss(1).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, again = gradients(False), gradients(True)
    assert len(plain) == 4
    # The reentrant form adds up a parameter's two uses in another order: other roundings, but no other mask.
    tolerance = 1e-6 if reentrant else 0.0
    assert all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(plain, again, strict=True))


def test_outside_of_keyed_work_a_model_leaves_the_generators_alone() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))
    randomness = Randomness(0)
    handles = randomness.key_blocks(model, "model")
    x = torch.ones(8)
    seed_generators(1)
    F.dropout(x)
    expected = draws()
    seed_generators(1)
    with randomness.keyed():
        randomness.begin_micro_batch(3, 0, 0)
        model(x)
    model(x)
    assert draws() == expected
    for handle in handles:
        handle.remove()


def test_two_models_of_a_run_draw_differently() -> None:
    randomness = Randomness(0)
    first, second = nn.Sequential(nn.Dropout()), nn.Sequential(nn.Dropout())
    randomness.key_blocks(first, "generator")
    randomness.key_blocks(second, "critic")
    x = torch.ones(64)
    with randomness.keyed():
        randomness.begin_micro_batch(0, 0, 0)
        assert not torch.equal(first(x), second(x))


def test_a_step_keys_the_users_own_loop() -> None:
    randomness = Randomness(4)
    with kept_generators():
        randomness.begin_step(2)
        expected = draws()
        randomness.begin_step(3)
        assert draws() != expected
        randomness.begin_step(2)
        with randomness.keyed():
            randomness.begin_micro_batch(2, 0, 0)
            draws()
        assert draws() == expected
