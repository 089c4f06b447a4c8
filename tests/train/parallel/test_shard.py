"""Sharded parameters: the bits of one process, and errors instead of processes that wait for each other for ever."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # here, so that not every rank imports it
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import EvenstepError, PeerFailed, UsageError
from evenstep.train.optimizers import ELEMENTWISE
from evenstep.train.parallel.cutting import cut
from evenstep.train.run import Run
from tests.ranks import RanksFailed, run_ranks
from tests.train.scripts import (
    Convolutions,
    Critic,
    Generator,
    Pictures,
    Sentences,
    Transformer,
    classification,
    critic_loss,
    generator_loss,
    next_token,
    padded,
)

LAYOUTS: list[tuple[int, int]] = [(2, 1), (3, 1), (4, 1), (4, 2)]  # processes, replicas
CUTS = {"cnn": ["features.0", "classify"], "transformer": ["blocks"], "gan": [], "branches": ["first"]}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(tensors: Iterable[Tensor | None]) -> str:
    raw = b"".join(b"none" if t is None else whole(t).contiguous().numpy().tobytes() for t in tensors)
    return hashlib.sha256(raw).hexdigest()[:12]


def state(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> str:
    """Of parameters, gradients and what optimizers keep."""
    params = [p for model in models for p in model.parameters()]
    kept = [o.state[p][key] for o in optimizers for g in o.param_groups for p in g["params"] for key in o.state[p]]
    return digest([*params, *(p.grad for p in params), *(t for t in kept if isinstance(t, Tensor))])


class Branches(nn.Module):
    """One of three parts is used by a micro-batch, another one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 33)
        self.branches = nn.ModuleList([nn.Linear(33, 32) for _ in range(3)])
        self.never = nn.Linear(4, 4)
        self.last = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        branch = self.branches[int(torch.randint(0, 3, ()))]
        result: Tensor = self.last(F.relu(branch(F.relu(self.first(images.flatten(1))))))
        return result


def begin(directory: Path, **options: Any) -> Run:
    given: dict[str, Any] = {"global_batch": 16, "micro_batch": 2, "seed": 3, **options}
    return evenstep.start(run=directory, **given)


def train(kind: str, directory: Path, **options: Any) -> list[tuple[str, float]]:
    models: dict[str, Callable[[], list[nn.Module]]] = {
        "cnn": lambda: [Convolutions()],
        "transformer": lambda: [Transformer()],
        "gan": lambda: [Generator(), Critic()],
        "branches": lambda: [Branches()],
    }
    others: dict[str, list[Any]] = {"transformer": [next_token], "gan": [critic_loss, generator_loss]}
    losses = others.get(kind, [classification])
    data: Any = Sentences(33) if kind == "transformer" else Pictures(33)
    found = []
    with begin(directory, **options) as run:
        prepared = [run.prepare(model, shard=CUTS[kind]) for model in models[kind]()]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in reversed(prepared)]
        for step in run.steps(data, epochs=1, collate=padded if kind == "transformer" else None):
            for loss_fn, optimizer in zip(losses, optimizers, strict=True):
                result = step.backward(loss_fn)
                run.clip(1.0)
                optimizer.step()
                found.append((state(prepared, optimizers), result.loss))
                for model in prepared:
                    model.zero_grad()
    return found


@pytest.mark.slow
def test_the_bits_of_one_process(tmp_path: Path) -> None:
    """The last step has 1 micro-batch: fewer than shards, and than replicas."""
    kinds = list(CUTS)
    alone = {kind: train(kind, tmp_path / f"alone {kind}") for kind in kinds}
    for world, replicas in LAYOUTS:

        def several(world: int = world, replicas: int = replicas) -> dict[str, list[tuple[str, float]]]:
            where = tmp_path / f"{world} {replicas}"
            dist.init_process_group("gloo")  # for all these runs
            return {kind: train(kind, where / kind, shard=True, replicas=replicas) for kind in kinds}

        for rank, found in enumerate(run_ranks(several, world)):
            for kind in kinds:
                assert found[kind] == alone[kind], f"{kind}, rank {rank} of {world}, {replicas} replicas"


class Block(nn.Module):
    """Of two layers a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        result: Tensor = self.dropout(torch.tanh((self.other if other else self.one)(x)))
        return result


class Odd(nn.Module):
    """Blocks that are computed again in the backward pass, and parts that only methods use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(16, 10)

    def forward(self, images: Tensor, again: bool = False, other: bool = False) -> Tensor:
        x = self.first(images.flatten(1))
        for block in self.blocks:
            x = checkpoint(block, x, other, use_reentrant=False) if again else block(x, other)
        result: Tensor = self.last(x)
        return result

    def short(self, images: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(images.flatten(1)))
        return result


def cross_entropy(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out, labels, reduction="sum")


def twice(model: nn.Module, batch: Any) -> Any:
    images, labels = batch
    return cross_entropy(model(images), labels) + cross_entropy(model(images * 0.5, other=True), labels), len(labels)


def recomputed(model: nn.Module, batch: Any) -> Any:
    return cross_entropy(model(batch[0], again=True), batch[1]), len(batch[1])


def under_autocast(model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model(batch[0], again=True), batch[1]), len(batch[1])


def by_a_method(model: Any, batch: Any) -> Any:
    return cross_entropy(model.short(batch[0]), batch[1]), len(batch[1])


def sometimes_constant(model: nn.Module, batch: Any) -> Any:
    """No graph for micro-batches that have label 3 (or 5) in them."""
    images, labels = batch
    out = model(images)
    if ((labels == 3) | (labels == 5)).any():
        out = out.detach()
    return cross_entropy(out, labels), len(labels)


AWKWARD = [twice, recomputed, under_autocast, by_a_method, sometimes_constant]


def awkward(directory: Path, **options: Any) -> list[str]:
    """Several losses a step, gradients from before, layers that are frozen for some steps."""
    found = []
    with begin(directory, **options) as run:
        model = run.prepare(Odd(), shard=["blocks"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in run.steps(Pictures(40), steps=5, weights=[1.0] * 40):
            model.blocks[1].requires_grad_(step.number not in (1, 2))
            model.last.requires_grad_(step.number != 2)
            for loss_fn in AWKWARD:
                step.backward(loss_fn)
                found.append(state([model]))
            found.append(str(run.evaluate(Pictures(27), by_a_method)))
            optimizer.step()
            if step.number != 3:  # else the next step's gradients are added to these
                optimizer.zero_grad()
            found.append(state([model], [optimizer]))
            predicted = run.predict(Pictures(11), lambda model, batch: model(batch[0]))
            found.append(digest([predicted]))
    return found


@pytest.mark.parametrize(("world", "replicas", "batch"), [(3, 1, 16), (4, 2, 8)])
def test_losses_of_every_form(world: int, replicas: int, batch: int, tmp_path: Path) -> None:
    alone = awkward(tmp_path / "alone", global_batch=batch)
    several = run_ranks(lambda: awkward(tmp_path / "several", global_batch=batch, shard=True, replicas=replicas), world)
    for rank, found in enumerate(several):
        assert found == alone, rank


def test_without_exactness_equal_to_rounding(tmp_path: Path) -> None:
    def gradients(directory: Path, **options: Any) -> list[Tensor]:
        with begin(directory, **options) as run:
            model = run.prepare(Odd(), shard=["blocks"])
            for step in run.steps(Pictures(14), steps=1):
                step.backward(twice)
            return [whole(p.grad) for p in model.parameters() if p.grad is not None]

    alone = gradients(tmp_path / "alone")
    several = run_ranks(
        lambda: gradients(tmp_path / "several", exact=False, shard=True, replicas=2), 4
    )  # 7 micro-batches
    for found in several:
        torch.testing.assert_close(found, alone)


class Failing(torch.autograd.Function):
    """Raises in its backward if asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ValueError("no backward")
        return grads[0], None


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(16, 10)
        self.fails = ""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0 and self.training and self.fails == "forward":
                raise ValueError("no forward")
            if number == 0 and self.training:
                x = Failing.apply(x, self.fails == "backward")  # type: ignore[no-untyped-call]
        result: Tensor = self.last(x)
        return result


def test_a_failure_leaves_nobody_waiting_and_the_step_can_be_done_again(tmp_path: Path) -> None:
    """16 micro-batches are 6 rounds of 3 shards, or 4 of 2 in two replicas."""

    def steps(rank_that_fails: int, directory: Path, **options: Any) -> list[str]:
        found = []
        with begin(directory, global_batch=32, **options) as run:
            model = run.prepare(Interrupted(), shard=["blocks"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            seen = 0

            def loss_fn(model: Any, batch: Any) -> Any:
                nonlocal seen
                kind, when = failure
                seen += model.training
                fails = run.rank == rank_that_fails and model.training and seen == when
                model.fails = kind if fails else ""
                return cross_entropy(model(batch[0]), batch[1]), len(batch[1])

            own = 4 if options.get("replicas") == 2 else 5  # rounds of a rank that fails
            failures = [(kind, when) for when in (1, 2, own) for kind in ("forward", "backward")]
            for step in run.steps(Pictures(64), steps=len(failures)):
                failure, seen = failures[step.number], 0
                before = state([model])
                if rank_that_fails >= 0:
                    own_error = ValueError, f"^no {failure[0]}"
                    told = PeerFailed, f"rank {rank_that_fails}: ValueError: no {failure[0]}"
                    kind, text = own_error if run.rank == rank_that_fails else told
                    with pytest.raises(kind, match=text):
                        step.backward(loss_fn)
                    assert state([model]) == before
                failure = "", 0
                step.backward(loss_fn)
                found.append(state([model]))
                optimizer.step()
                if step.number % 2:
                    optimizer.zero_grad()
        return found

    alone = steps(-1, tmp_path / "alone")
    for world, replicas in ((3, 1), (4, 2)):
        where = tmp_path / str(world)
        several = run_ranks(lambda w=where, r=replicas: steps(1, w, shard=True, replicas=r), world)
        for rank, found in enumerate(several):
            assert found == alone, f"rank {rank} of {world}"


def test_a_killed_process_ends_the_others(tmp_path: Path) -> None:
    def killed(directory: Path) -> str:
        with begin(directory, shard=True) as run:
            model = run.prepare(Interrupted(), shard=["blocks"])
            count = 0

            def loss_fn(model: Any, batch: Any) -> Any:
                nonlocal count
                count += 1
                if run.rank == 1 and count == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                return cross_entropy(model(batch[0]), batch[1]), len(batch[1])

            for step in run.steps(Pictures(64), steps=4):
                try:
                    step.backward(loss_fn)
                except PeerFailed as error:
                    (directory / f"told {run.rank}").write_text(str(error))
                    raise
                model.zero_grad()
        return ""

    with pytest.raises((RanksFailed, PeerFailed)):
        run_ranks(lambda: killed(tmp_path), 3)
    for rank in (0, 2):
        assert f"rank {rank} lost contact with another process" in (tmp_path / f"told {rank}").read_text()


# ---- refusals


class OneOfTwo(nn.Module):
    """Which branch is used depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 10) for _ in range(2))
        self.which: Callable[[], int] = lambda: 0

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.branches[self.which()](self.first(images.flatten(1)))
        return result


def refused(work: Callable[..., object], *args: object) -> tuple[str, str]:
    try:
        work(*args)
    except EvenstepError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_modules_that_are_not_called_alike_are_named(tmp_path: Path) -> None:
    def several(directory: Path) -> list[tuple[str, str]]:
        said = []
        with begin(directory, shard=True) as run:
            model = run.prepare(OneOfTwo(), shard=["branches"])
            number = 0

            def loss_fn(model: Any, batch: Any) -> Any:
                return cross_entropy(model(batch[0]), batch[1]), len(batch[1])

            def once_more(model: Any, batch: Any) -> Any:
                out = model(batch[0])
                if number == 2 and run.rank == 0:
                    out = out + model(batch[0])
                return cross_entropy(out, batch[1]), len(batch[1])

            for step in run.steps(Pictures(80), steps=3):
                number = step.number
                model.which = (lambda: 1) if number == 1 and run.rank == 1 else (lambda: 0)
                said.append(refused(step.backward, loss_fn))
                model.which = lambda: 0
                said.append(refused(step.backward, once_more))
                model.zero_grad()
                if number == 0:
                    model.which = lambda: run.rank
                    said.append(refused(step.backward, loss_fn))
        return said

    fine, also, parted, later, fine_too, fine_again, more = range(7)
    zero, one = run_ranks(lambda: several(tmp_path), 2)
    assert zero[parted][0] == one[parted][0] == "UsageError"
    assert "rank 0: branches.0; rank 1: branches.1" in zero[parted][1]
    assert "leave out branches.0 and branches.1 (prepare(model, shard=" in zero[parted][1]
    assert one[later][0] == "UsageError"
    assert "reaches branches.1 here; the first micro-batch reached branches.0" in one[later][1]
    assert zero[later][0] == "PeerFailed"
    assert "rank 1: UsageError: the model reaches branches.1" in zero[later][1]
    assert zero[more][0] == "UsageError"
    assert "the model reaches branches.0 here, once more than at first" in zero[more][1]
    assert one[more][0] == "PeerFailed"
    assert {zero[k][0] for k in (fine, also, fine_too, fine_again)} == {""}


def test_calls_of_the_model_by_other_ways(tmp_path: Path) -> None:
    def several(directory: Path, **options: Any) -> list[Any]:
        said: list[Any] = []
        with begin(directory, **options) as run:
            model = run.prepare(OneOfTwo(), shard=["branches"])

            def summed(times: int) -> Callable[[Any, Any], Any]:
                return lambda model, batch: (sum(model(batch[0]).sum() for _ in range(times)) / times, 1)

            def uneven(model: Any, batch: Any) -> Any:  # calls that the others make are made along
                return summed(1 + run.rank)(model, batch)

            def raises(model: Any, batch: Any) -> Any:
                if run.rank == run.world_size - 1:
                    raise ValueError("no evaluation")
                return summed(1)(model, batch)

            found = [run.evaluate(Pictures(9), fn) for fn in (summed(1), uneven, uneven)]
            assert found == [found[0]] * 3
            with pytest.raises(ValueError if run.rank == run.world_size - 1 else PeerFailed, match="no evaluation"):
                run.evaluate(Pictures(9), raises)
            again = run.evaluate(Pictures(9), summed(1))
            out = model(torch.ones(2, 1, 8, 8))  # all processes call it
            said += [found, again, digest([out])]
            if run.world_size > 1:
                assert refused(lambda: out.sum().backward())[0] == "UsageError"
                assert all(hasattr(p, "full_tensor") for p in model.parameters())
            assert run.evaluate(Pictures(9), summed(1)) == again
            if run.world_size > 1:
                alone = [lambda: model(torch.ones(2, 1, 8, 8)), lambda: run.evaluate(Pictures(9), summed(1))]
                kind, text = refused(alone[run.rank])
                assert kind == "MismatchError"
                assert re.search(r"rank 0: a call of the model outside of step.backward \(test_shard.py:\d+\)", text)
        return said

    alone = several(tmp_path / "alone")
    assert run_ranks(lambda: several(tmp_path / "several", shard=True), 2) == [alone] * 2


def test_optimizers_and_clipping_have_the_bits_of_one_process(tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {
        "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        "Adam": {"amsgrad": True, "weight_decay": 0.1},
        "RMSprop": {"momentum": 0.9, "centered": True},
    }
    makes = [(kind, foreach) for kind in ELEMENTWISE for foreach in (False, True)]

    def several(directory: Path, **options: Any) -> list[Any]:
        found: list[Any] = []
        with begin(directory, **options) as run:
            models, optimizers = [], []
            for kind, foreach in makes:
                torch.manual_seed(0)
                made = nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 10))
                models.append(run.prepare(made, shard=["1"]))
                given = {"foreach": foreach, **more.get(kind.__name__, {})}
                optimizers.append(kind(models[-1].parameters(), **given))
            for step in run.steps(Pictures(), steps=2):
                for model, optimizer in zip(models, optimizers, strict=True):
                    step.backward(classification, model)
                    found.append(run.clip(0.05, model))
                    optimizer.step()
                    found.append(state([model], [optimizer]))
                    optimizer.zero_grad()
                if run.world_size > 1:
                    check_refusals(models[0], step)
        return found

    def check_refusals(model: nn.Module, step: Any) -> None:
        step.backward(classification, model)
        for norm in (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), lambda: total(model)):
            assert refused(norm)[1].startswith("torch's norm of gradients")
        torch.nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)
        for make in (torch.optim.Adafactor, torch.optim.Rprop, lambda p: torch.optim.AdamW(p, fused=True), Own):
            assert "with --shard" in refused(make(model.parameters()).step)[1]
        model.zero_grad()

    def total(model: nn.Module) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    class Own(torch.optim.SGD):
        pass

    alone = several(tmp_path / "alone")
    assert len(set(alone)) > len(makes)
    assert run_ranks(lambda: several(tmp_path / "several", shard=True), 3) == [alone] * 3


# ---- which modules gather by themselves


class Blocks(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.looped = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.one_at_a_time = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.inner = nn.ModuleDict({"a": nn.Linear(width, width)})
        self.stack = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.now_and_then = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.skipped = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.looped[:3]:
            if self.training:
                x = layer(x)
            else:
                x = layer(x)
                x = x.float()
        if len(x) > 3:
            x = self.now_and_then(x)
        for layer in self.skipped:
            if x.sum() > 0:
                continue
            x = layer(x)
        x = self.one_at_a_time[int(x.sum())](x)
        result: Tensor = self.stack(x)
        return result


def test_blocks_that_are_seen_to_be_called_are_cut() -> None:
    blocks = ["looped.0", "looped.1", "looped.2", "stack.0", "stack.1"]
    assert [name for name, _ in cut(Blocks(), None)] == blocks
    assert cut(Blocks(8), None) == []
    assert [name for name, _ in cut(Blocks(), ["stack", "looped.1", "inner"])] == ["looped.1", "inner.a", "stack"]
    assert [name for name, _ in cut(Blocks(), ["stack.0", "stack"])] == ["stack", "stack.0"]
    assert cut(Blocks(), []) == []
    tied = Blocks()
    tied.stack[1].weight = tied.looped[0].weight
    assert [name for name, _ in cut(tied, None)] == ["looped.1", "looped.2", "stack.0"]
    with pytest.raises(UsageError, match=r"looped.0 shares a parameter"):
        cut(tied, ["looped.0"])
    with pytest.raises(UsageError, match=r"shard='stak' names no module inside the Blocks"):
        cut(Blocks(), ["stak"])
    mixed = nn.Sequential(
        nn.Linear(256, 256), nn.ReLU(), nn.Sequential(nn.Linear(256, 256), nn.ReLU()), nn.Linear(4, 4)
    )
    assert [name for name, _ in cut(mixed, None)] == ["0", "2.0"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 512, batch_first=True), 2)
    assert [name for name, _ in cut(encoder, None)] == ["layers.0", "layers.1"]


def test_what_cannot_be_sharded_is_named(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def __init__(self, made: Tensor) -> None:
            super().__init__(64, 10)
            self.scale = nn.Parameter(made)

    def several() -> list[str]:
        said = []
        with begin(tmp_path, shard=True) as run:
            for made in (torch.tensor(1.0), torch.ones(4, 4).t()[:2], torch.ones(4, dtype=torch.complex64)):
                said.append(refused(run.prepare, Scaled(made))[1])
            first = run.prepare(Generator())
            said.append(refused(lambda: run.prepare(nn.Sequential(first)))[1])
            said.append(refused(run.prepare, Scaled(torch.ones(4, dtype=torch.float64)))[1])
        return said

    texts = [
        "no dimension to cut",
        "not contiguous",
        "complex",
        "0.weight is sharded already",
        "weight is float32, scale is float64",
    ]
    for said in run_ranks(several, 2):
        for text, expected in zip(said, texts, strict=True):
            assert expected in text
