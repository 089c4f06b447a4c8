"""Thread replicas: the same bits as one thread, and errors that are told as if there were none."""

from __future__ import annotations

import _thread
import contextvars
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import LossError, UsageError
from evenstep.train.casts import no_cast_cache
from evenstep.train.parallel import threads
from evenstep.train.parallel.copies import Copies, flat
from tests.ranks import run_ranks
from tests.train.scripts import (
    TRAININGS,
    Sentences,
    Transformer,
    fingerprints,
    padded,
    train_batchnorm,
    train_transformer,
    training_run,
)
from tests.train.test_step import Branches, awkward, numbers

CPU = torch.device("cpu")
HERE = {CPU: CPU}
TWO = {"EVENSTEP_THREAD_REPLICAS": "2"}


@pytest.mark.parametrize(("name", "replicas"), [("cnn", 3), ("transformer", 2), ("gan", 4), ("batchnorm", 3)])
def test_same_bits(name: str, replicas: int, tmp_path: Path) -> None:
    train = {**TRAININGS, "batchnorm": train_batchnorm}[name]
    alone = train(tmp_path / "alone")
    assert train(tmp_path / "threads", thread_replicas=replicas) == alone
    for found in run_ranks(train, 2, tmp_path / "both", env=TWO):
        assert found == alone


def test_awkward_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused branches, two forwards in a micro-batch, ragged and empty shares, freezing, failures."""
    alone = awkward(tmp_path / "alone")
    monkeypatch.setenv("EVENSTEP_THREAD_REPLICAS", "4")
    assert awkward(tmp_path / "threads") == alone
    for found in run_ranks(awkward, 2, tmp_path / "both", env=TWO):
        assert found == alone


class Checkpointed(Transformer):
    """With activation checkpointing, a head of two layers that share a weight, and noise of its own."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.clamp(min=0))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = checkpoint(block, x, src_mask=mask, is_causal=True, use_reentrant=False)
            x = x + 0.01 * torch.randn_like(x) @ F.dropout(self.head.weight.T @ self.head.weight, 0.1)
        result: Tensor = self.head(x)
        return result


def bf16(model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.is_autocast_cache_enabled()
        out = model(batch[:, :-1])
    targets = batch[:, 1:]
    loss = F.cross_entropy(out.float().flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return loss, (targets != -1).sum()


def train_checkpointed(directory: Path, **options: Any) -> list[str]:
    with training_run(directory, **options) as run:
        model = run.prepare(Checkpointed())
        optimizer = torch.optim.AdamW(model.parameters())
        for number, step in enumerate(run.steps(Sentences(), steps=4, collate=padded)):
            model.blocks[0].dropout.p = 0.1 * (number % 3)  # type: ignore[union-attr]
            step.backward(bf16)
            optimizer.step()
            optimizer.zero_grad()
    return fingerprints(run)


def test_checkpointing_autocast_and_what_changes_between_steps(tmp_path: Path) -> None:
    alone = train_checkpointed(tmp_path / "alone")
    assert len(set(alone)) == 4
    assert train_checkpointed(tmp_path / "threads", thread_replicas=3) == alone


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str, tmp_path: Path) -> None:
    alone = train_transformer(tmp_path / "alone", precision=precision)
    assert train_transformer(tmp_path / "threads", precision=precision, thread_replicas=2) == alone


def test_no_thread_caches_casts() -> None:
    seen: list[bool] = []

    def look() -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            seen.append(torch.is_autocast_cache_enabled())

    with no_cast_cache():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert seen == [False, False]
    look()
    assert seen[-1]


def test_equal_tier(tmp_path: Path) -> None:
    """Without exactness each thread lets autograd add up; the result is the same in every run."""
    found = [train_transformer(tmp_path / str(k), exact=False, thread_replicas=3) for k in range(2)]
    assert found[0] == found[1]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`training(loss_fn)`: one step.backward in 4 threads, 8 micro-batches. Gives the model and the step."""
    runs: list[Any] = []

    def start(loss_fn: Any, before: Callable[[Any], object] = lambda _: None, **options: Any) -> Any:
        run = training_run(tmp_path / str(len(runs)), **{"thread_replicas": 4, **options})
        model = run.prepare(Branches())
        before(model)
        loop = iter(run.steps(numbers(), steps=2))
        runs.append((run, loop))
        step = next(loop)
        step.backward(lambda model, batch: loss_fn(model, batch), model)
        return model, step

    yield start
    for run, loop in runs:
        loop.close()
        run.close()


def plain(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0], 0), batch[1], reduction="sum"), len(batch[1])


def test_where_the_losses_are_computed(training: Callable[..., Any]) -> None:
    """In threads, in the caller's state."""
    seen: set[Any] = set()
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    def looking(model: nn.Module, batch: Any) -> Any:
        if model.training:
            seen.add((threading.current_thread(), id(model)))
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.float16
            assert torch.is_grad_enabled()
            assert torch.get_num_threads() == 1
            assert "omp_get_max_threads() : 1" in torch.__config__.parallel_info()
            assert variable.get() == 7
        with torch.autocast("cpu", enabled=False):
            return plain(model, batch)

    with torch.autocast("cpu", torch.float16), torch.no_grad():
        model, _ = training(looking)
    assert len(seen) == 4
    assert id(model) not in {copy for _, copy in seen}
    assert all(p.grad is not None for p in model.last.parameters())


def test_an_error_in_one_thread(tmp_path: Path) -> None:
    """The others stop, nothing is changed, the user's line is shown; the step can be done again."""
    computed: list[int] = []
    failing: list[threading.Thread] = []
    fails = threading.Event()

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if model.training:
            computed.append(len(batch[0]))
            if 0 in batch[2]:
                failing.append(threading.current_thread())
                fails.set()
                raise RuntimeError("this sample cannot be had")
            fails.wait()
            failing[0].join()
        return plain(model, batch)

    with training_run(tmp_path, thread_replicas=4, global_batch=32) as run:
        model = run.prepare(Branches())
        loop = iter(run.steps(numbers(), steps=1, shuffle=False))
        step = next(loop)
        kept = model.first.weight.grad = torch.ones_like(model.first.weight)
        with pytest.raises(RuntimeError, match="this sample") as caught:
            step.backward(loss_fn)
        assert len(computed) <= 4  # no second one of the four micro-batches of any thread
        shown = "".join(traceback.format_exception(caught.value))
        assert 'raise RuntimeError("this sample cannot be had")' in shown
        assert model.first.weight.grad is kept
        assert kept.eq(1).all()
        assert model.last.weight.grad is None
        again = step.backward(plain)
        assert not kept.eq(1).all()
        assert again.weight == 32


def test_ctrl_c(tmp_path: Path) -> None:
    started = threading.Semaphore(0)
    armed = False

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if model.training and armed:
            started.release()
            if 0 in batch[2]:
                for _ in range(4):
                    started.acquire()
                _thread.interrupt_main()
        return plain(model, batch)

    before = threading.active_count()
    with training_run(tmp_path, thread_replicas=4) as run:
        model = run.prepare(Branches())
        loop = iter(run.steps(numbers(), steps=1, shuffle=False))
        step = next(loop)
        step.backward(loss_fn)  # once, after which the threads start together
        model.zero_grad()
        armed = True
        signal.raise_signal(signal.SIGINT)  # the first one asks to finish the step, the second does not wait
        with pytest.raises(KeyboardInterrupt):
            step.backward(loss_fn)
        assert threading.active_count() == before
        assert all(p.grad is None for p in model.parameters())


def test_refused(training: Callable[..., Any]) -> None:
    outside: list[nn.Module] = []

    def closure(model: nn.Module, batch: Any) -> Any:
        return plain(outside[0], batch)

    def keep(model: nn.Module) -> None:
        outside[:] = [model]

    with pytest.raises(LossError, match=r"a gradient to \S+ of the model itself"):
        training(closure, keep)

    def drawing(draw: Callable[[], float]) -> Callable[..., Any]:
        def loss_fn(model: nn.Module, batch: Any) -> Any:
            loss, n = plain(model, batch)
            return loss * (draw() if model.training else 1), n

        return loss_fn

    with pytest.raises(UsageError, match="draws from numpy's global generator"):
        training(drawing(lambda: float(np.random.rand())))
    with pytest.raises(UsageError, match="draws from Python's random module"):
        training(drawing(random.random))
    with pytest.raises(UsageError, match="hook that runs after the gradient of"):
        training(plain, lambda model: model.last.bias.register_post_accumulate_grad_hook(lambda p: None))
    with pytest.raises(UsageError, match="first is compiled, and --thread-replicas"):
        training(plain, lambda model: model.first.compile(backend="eager"))

    def backward_inside(model: nn.Module, batch: Any) -> Any:
        loss, n = plain(model, batch)
        if model.training:
            loss.backward(retain_graph=True)
        return loss, n

    with pytest.raises(LossError, match="calls backward"):
        training(backward_inside)

    def writing(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            model.last.bias.add_(1 if model.training else 0)
        return plain(model, batch)

    with pytest.raises(UsageError, match=r"writes the model's own state .*last\.bias"):
        training(writing)

    stranger = nn.Parameter(torch.ones(()))
    with pytest.raises(LossError, match="belongs to no prepared model"):
        training(lambda model, batch: (plain(model, batch)[0] * stranger, len(batch[1])))


features: dict[str, Any] = {}
calls = 0


class Noting(nn.Module):
    """Keeps what it has seen, in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.mean()
        return x


class Kept:
    """A hook that is an object."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.output = output


def test_what_the_replicas_share_is_not_written(training: Callable[..., Any]) -> None:
    teacher = nn.Linear(5, 3)
    teacher.register_forward_hook(lambda module, args, output: features.update(t=output))
    noting, kept = Noting(), [Kept()]
    hooked = nn.Identity()
    hooked.register_forward_hook(kept[0])
    masks: dict[int, Tensor] = {}
    losses: list[float] = []

    def counting(model: nn.Module, batch: Any) -> Any:
        global calls
        calls += 1
        return plain(model, batch)

    def listing(model: nn.Module, batch: Any) -> Any:
        losses.append(1.0)
        return plain(model, batch)

    def through(layer: nn.Module) -> Callable[..., Any]:
        def loss_fn(model: nn.Module, batch: Any) -> Any:
            with torch.no_grad():
                layer(torch.ones(2, 5))
            return plain(model, batch)

        return loss_fn

    def hook_student(model: Any) -> None:
        model.last.register_forward_hook(lambda module, args, output: features.update(s=output))

    with pytest.raises(UsageError, match=r"writes features(\['t'\])?, which all thread replicas share"):
        training(through(teacher))
    with pytest.raises(UsageError, match=r"writes features\['s'\]"):
        training(plain, hook_student)
    with pytest.raises(UsageError, match=r"writes .*seen"):
        training(through(noting))
    with pytest.raises(UsageError, match=r"writes .*output"):
        training(through(hooked))
    with pytest.raises(UsageError, match="writes calls"):
        training(counting)
    with pytest.raises(UsageError, match="writes losses"):
        training(listing)

    def caching(model: nn.Module, batch: Any) -> Any:
        if model.training:  # not in the checks of the first step
            masks.setdefault(len(batch[0]), torch.ones(()))
        return plain(model, batch)

    training(caching)
    assert masks
    training(through(noting), thread_replicas=1)


def test_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_transformer(tmp_path, thread_replicas=2)
    said = capsys.readouterr().err
    assert "evenstep: thread replicas: 2" in said
    assert "1 of 2 cores" not in said
    with pytest.raises(UsageError, match="thread replicas"):
        evenstep.start(run=tmp_path / "many", global_batch=8, micro_batch=2, thread_replicas=5)


# ---- copies of a model


class Odd(nn.Module):
    """What models hold beside modules and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.inner.weight
        self.register_buffer("steps", torch.zeros(()))
        self.losses: list[Tensor] = []
        self.by_name: dict[str, Any] = {"inner": self.inner, "own": [self]}
        self.act = self.twice
        self.settings = Settings()

    def twice(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(x.sum())
        self.settings.calls += 1
        result: Tensor = self.act(self.by_name["inner"](x) + self.tied(x)) * self.settings.scale
        return result


class Settings:
    def __init__(self) -> None:
        self.scale, self.calls = 3.0, 0


def test_copies() -> None:
    model = Odd()
    hooked: list[int] = []
    model.inner.weight.register_hook(lambda grad: hooked.append(1))
    copies = Copies([model], HERE)
    copy: Any = copies.models[0]
    assert type(copy) is Odd
    assert copy.inner.weight.data_ptr() == model.inner.weight.data_ptr()
    assert copy.inner.weight is copy.tied.weight
    assert copy.inner.weight is not model.inner.weight
    assert copy.steps is model.steps
    assert copy.by_name["inner"] is copy.inner
    assert copy.by_name["own"][0] is copy
    assert copy.act.__self__ is copy
    x = torch.ones(2, 3)
    assert torch.equal(copy(x), model(x))
    assert len(copy.losses) == len(model.losses) == 1
    assert copy.settings.calls == 1
    copy(x).sum().backward()
    assert model.inner.weight.grad is None
    assert copy.inner.weight.grad is not None
    assert hooked == [1]


def test_copies_follow_the_model() -> None:
    model: Any = Odd()
    changes: list[Callable[[], Any]] = [
        lambda: model.eval(),
        lambda: setattr(model.settings, "scale", 4.0),
        lambda: model.losses.append(torch.ones(())),
        lambda: model.add_module("new", nn.Linear(2, 2)),
        lambda: model.inner.register_forward_hook(lambda *_: None),
        lambda: model.inner.bias.register_hook(lambda grad: grad),
        lambda: setattr(model.inner.bias, "data", torch.ones(3)),
        lambda: model.double(),
    ]
    for change in changes:
        copies = Copies([model], HERE)
        copy: Any = copies.models[0]
        assert copies.follows([model])
        with torch.no_grad():
            model.inner.weight.add_(1)
        model.inner.weight.requires_grad_(not model.inner.weight.requires_grad)
        copies.refresh()
        assert copies.follows([model])
        assert copy.inner.weight.requires_grad == model.inner.weight.requires_grad
        change()
        assert not copies.follows([model])
    assert len(flat([model])) > 50


def test_copies_on_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: the parameters are copied, and again before each step. (cpu:1 is a name of the CPU.)"""
    other = torch.device("cpu", 1)
    model: Any = Odd()
    copies = Copies([model], {CPU: other})
    copy: Any = copies.models[0]
    assert copy.inner.weight.data_ptr() != model.inner.weight.data_ptr()
    assert copy.steps is not model.steps
    with torch.no_grad():
        model.inner.weight.add_(1)
        model.steps.add_(1)
    assert copies.follows([model])
    copies.refresh()
    assert torch.equal(copy.inner.weight, model.inner.weight)
    assert torch.equal(copy.steps, model.steps)

    alone = train_transformer(tmp_path / "alone")
    monkeypatch.setattr(threads, "Copies", lambda models, devices: Copies(models, {CPU: other}))
    assert train_transformer(tmp_path / "moved", thread_replicas=2) == alone
