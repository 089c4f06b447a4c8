"""A generator for each thread: the same numbers as from the default one, which stays untouched."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import UsageError
from evenstep.train import generators
from evenstep.train.generators import Own, cpu_generator, drawing_from, installed, shared_left_alone

half = torch.full((40,), 0.5)
many = torch.zeros(40)
long = torch.zeros(40, dtype=torch.int64)
attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
beta = torch.distributions.Beta(torch.tensor([0.5]), torch.tensor([2.0]))
rrelu_with_noise: Any = torch.ops.aten.rrelu_with_noise.out


def heads(dropout: float) -> Tensor:
    q = torch.ones(2, 2, 6, 4)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout)


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(5),
    "rand double": lambda: torch.rand(500, dtype=torch.float64),
    "rand out": lambda: torch.rand(40, out=many.clone()),
    "rand_like": lambda: torch.rand_like(half.bfloat16()),
    "randn": lambda: torch.randn(500),
    "randn complex": lambda: torch.randn(20, dtype=torch.complex64),
    "randn_like": lambda: torch.randn_like(half),
    "randint": lambda: torch.randint(3, 10, (20,)),
    "randint one side": lambda: torch.randint(10, (20,)),
    "randint_like": lambda: torch.randint_like(half, 2, 9),
    "randperm": lambda: torch.randperm(30),
    "randperm out": lambda: torch.randperm(40, out=long.clone()),
    "bernoulli": lambda: torch.bernoulli(half),
    "bernoulli p": lambda: torch.bernoulli(half, 0.3),
    "bernoulli_": lambda: many.clone().bernoulli_(0.3),
    "bernoulli_ tensor": lambda: many.clone().bernoulli_(half),
    "bernoulli out": lambda: torch.bernoulli(half, out=many.clone()),
    "uniform_": lambda: many.clone().uniform_(2, 3),
    "normal_": lambda: many.clone().normal_(2, 3),
    "exponential_": lambda: many.clone().exponential_(2),
    "geometric_": lambda: many.clone().geometric_(0.2),
    "cauchy_": lambda: many.clone().cauchy_(),
    "log_normal_": lambda: many.clone().log_normal_(),
    "random_": lambda: long.clone().random_(),
    "random_ to": lambda: long.clone().random_(9),
    "random_ from": lambda: long.clone().random_(3, 9),
    "multinomial": lambda: torch.multinomial(half, 3),
    "multinomial again": lambda: torch.multinomial(half, 70, replacement=True),
    "multinomial out": lambda: torch.multinomial(half, 40, out=long.clone()),
    "poisson": lambda: torch.poisson(half * 9),
    "binomial": lambda: torch.binomial(half * 20, half),
    "normal tensors": lambda: torch.normal(half, half),
    "normal tensors out": lambda: torch.normal(half, half, out=many.clone()),
    "normal mean": lambda: torch.normal(half, 2.0),
    "normal mean out": lambda: torch.normal(half, 2.0, out=many.clone()),
    "normal deviation": lambda: torch.normal(1.0, half),
    "normal deviation out": lambda: torch.normal(1.0, half, out=many.clone()),
    "normal numbers": lambda: torch.normal(1.0, 2.0, (7,)),
    "gamma": lambda: torch._standard_gamma(half),
    "dirichlet": lambda: torch._sample_dirichlet(half),
    "Beta": lambda: beta.rsample((3,)),
    "rrelu": lambda: F.rrelu(-half, training=True),
    "rrelu_": lambda: F.rrelu(-half, training=True, inplace=True),
    "rrelu with noise out": lambda: rrelu_with_noise(-half, half.clone(), training=True, out=many.clone()),
    "the default one, by name": lambda: torch.rand(5, generator=torch.default_generator),
    "binomial, the default one, by name": lambda: torch.binomial(half * 20, half, torch.default_generator),
    "dropout": lambda: F.dropout(half, 0.3),
    "dropout in place": lambda: F.dropout(half.clone(), 0.3, inplace=True),
    "dropout of a graph": lambda: F.dropout(half.clone().requires_grad_(), 0.3),
    "native dropout": lambda: torch.native_dropout(half, 0.3, True),
    "dropout2d": lambda: F.dropout2d(torch.ones(3, 4, 2, 2), 0.3),
    "alpha dropout": lambda: F.alpha_dropout(half, 0.3, training=True),
    "feature alpha dropout": lambda: F.feature_alpha_dropout(torch.ones(3, 4, 2), 0.3, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(half),
    "fractional pool": lambda: F.fractional_max_pool2d(torch.ones(1, 1, 8, 8), 2, output_ratio=(0.5, 0.5)),
    "attention": lambda: heads(0.4),
    "transformer layer": lambda: attention(torch.ones(2, 5, 8)),
    "lstm": lambda: lstm(torch.ones(5, 2, 4))[0],
    "svd_lowrank": lambda: torch.svd_lowrank(torch.ones(5, 4) + torch.eye(5, 4), 2)[1],
    "trunc_normal_": lambda: nn.init.trunc_normal_(many.clone()),
    "mask in bfloat16": lambda: F.dropout(half.bfloat16(), 0.3),
    "vmap": lambda: torch.vmap(lambda x: x + torch.rand(()), randomness="different")(half),
}


def numbers(value: Any) -> list[Tensor]:
    return [value.detach()] if isinstance(value, Tensor) else [t.detach() for t in value]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operations whose overridden kernel ran."""
    ran: set[str] = set()
    override = generators._override

    def counting(library: torch.library.Library, operation: str) -> None:
        make = generators._kernel

        def kernel(call: Callable[..., Any], place: int | None) -> Callable[..., Any]:
            inner = make(call, place)

            def recording(*given: Any, **named: Any) -> Any:
                ran.add(operation)
                return inner(*given, **named)

            return recording

        monkeypatch.setattr(generators, "_kernel", kernel)
        override(library, operation)
        monkeypatch.setattr(generators, "_kernel", make)

    monkeypatch.setattr(generators, "_override", counting)
    return ran


def test_every_random_operation(counted: set[str]) -> None:
    """Equal to the default generator with this seed, down to where the generator stands afterwards."""
    wrong = []
    with installed():
        for name, draw in DRAWS.items():
            torch.manual_seed(11)
            expected, stands = numbers(draw()), torch.default_generator.get_state()
            torch.manual_seed(12)
            before = torch.default_generator.get_state()
            own = Own()
            own.seed(11)
            with drawing_from(own):
                got = numbers(draw())
            if not (
                all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
                and torch.equal(own.cpu.get_state(), stands)
                and torch.equal(torch.default_generator.get_state(), before)
            ):
                wrong.append(name)
    assert not wrong
    assert counted == set(generators.operations())


def test_no_random_operation_of_the_cpu_is_forgotten() -> None:
    """What torch marks as random and has a CPU kernel takes a generator, or draws through one that does."""
    through = {"native_dropout", "_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}
    known = {name.partition("::")[2].partition(".")[0] for name in generators.operations()} | through
    for packet in dir(torch.ops.aten):
        overloads = getattr(torch.ops.aten, packet)
        for overload in getattr(overloads, "overloads", list)():
            operation = getattr(overloads, overload)
            random_one = torch.Tag.nondeterministic_seeded in operation.tags
            if random_one and generators._has_cpu_kernel(operation.name()):
                assert packet in known


def test_removed_afterwards() -> None:
    with installed(), drawing_from(Own()):
        pass
    kernels = torch._C._dispatch_dump("aten::uniform_")
    assert "generators.py" not in kernels.split("catchall")[0].split("inactive")[0]
    torch.manual_seed(3)
    expected = torch.rand(3)
    own = Own()
    with drawing_from(own):
        torch.random.manual_seed(3)
        assert torch.equal(torch.rand(3), expected)
    with installed():
        assert torch.random.get_rng_state().equal(torch.default_generator.get_state())


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `work` in a thread; call the result for what it returns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()

    def wait() -> Any:
        thread.join()
        return results[0]

    return wait


def test_threads_do_not_disturb_each_other() -> None:
    def draw(seed: int) -> Tensor:
        own = Own()
        with drawing_from(own):
            own.seed(seed)
            return torch.stack([torch.randn(20) for _ in range(200)])

    def plain(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.stack([torch.randn(20) for _ in range(200)])

    expected = [plain(seed) for seed in range(4)]
    with installed():
        waits = [in_thread(partial(draw, seed)) for seed in range(4)]
        assert all(torch.equal(wait(), e) for wait, e in zip(waits, expected, strict=True))


def test_activation_checkpointing_in_threads() -> None:
    """The recomputation draws what the forward drew, though the other thread has drawn in between."""

    def work(seed: int) -> Tensor:
        x = torch.ones(64, requires_grad=True)
        y = x
        for k in range(20):
            cpu_generator().manual_seed(seed + k)
            y = checkpoint(lambda v: F.dropout(v, 0.1), y, use_reentrant=False) * 1.1
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    def alone(seed: int) -> Tensor:
        with drawing_from(Own()):
            return work(seed)

    expected = [work(0), work(100)]
    with installed():
        waits = [in_thread(partial(alone, seed)) for seed in (0, 100)]
        assert all(torch.equal(wait(), e) for wait, e in zip(waits, expected, strict=True))


def test_shared_generators_are_watched() -> None:
    with shared_left_alone():
        pass
    for draw, name in ((random.random, "Python's random"), (np.random.rand, "numpy's"), (torch.rand, "torch.default")):
        with pytest.raises(UsageError, match=name), shared_left_alone():
            draw(1) if draw is torch.rand else draw()
