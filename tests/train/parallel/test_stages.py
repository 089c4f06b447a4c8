"""Pipeline stages over processes: the same bits as one process, and what cannot be cut is refused by name.

The fixed table of models is in tests/train/layouts.py; here stands what is awkward about stages.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import MismatchError, PeerFailed, UsageError
from evenstep.train.run import Run
from evenstep.train.step import Step
from tests.ranks import RanksFailed, run_ranks
from tests.train.scripts import Sentences, adamw, fingerprints, padded, training_run


class Rows:
    """13 samples: with a global batch of 4 the last step of an epoch has one, and one of two replicas nothing."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(13, 8, generator=generator)
        self.y = torch.randint(0, 4, (13,), generator=generator)

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def cross_entropy(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


class Four(nn.Module):
    """Four units, called in order."""

    a: Any
    b: Any
    c: Any
    d: Any

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.change()

    def change(self) -> None:
        pass

    def forward(self, x: Tensor) -> Any:
        return self.d(F.dropout(self.c(self.b(self.a(x)).relu()), 0.1, self.training))


# ---- models that are equal


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.linear(F.relu(x, inplace=True))


class InPlace(Four):
    """What arrives on a stage is changed in place, between units and in the first one."""

    def change(self) -> None:
        self.b, self.c = PreActivation(), PreActivation()
        self.activate = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        x += 1
        return self.d(self.activate(self.c(self.b(x))))


class Loose(Four):
    """Parameters of no unit, used where a stage begins, between two and behind the last unit."""

    def change(self) -> None:
        self.position, self.scale, self.last = (nn.Parameter(torch.randn(n)) for n in ((8,), (), (4,)))

    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.b(self.a(x) + self.position) * self.scale)) + self.last


class Pair(nn.Module):
    """Takes and returns a nest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state: Any, scale: float = 1.0) -> Any:
        x, more = state
        y = self.linear(x) * scale
        return y, {"sum": [more["sum"][0] + y.mean(1), None], "mask": more["mask"]}, "done"


class Nests(Four):
    def change(self) -> None:
        self.b, self.c = Pair(), Pair()

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        state: Any = (h, {"sum": [h.sum(1), None], "mask": h > 0})
        state = self.b(state, scale=2.0)[:2]
        h, more, said = self.c(state)
        assert said == "done"
        return self.d(h * more["mask"]) * more["sum"][0][:, None]


class Shapes(Four):
    """Code between the units asks for the shapes of what earlier stages have."""

    def change(self) -> None:
        self.b, self.c = nn.Conv1d(1, 2, 1), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        samples, width = h.shape
        h = self.b(h.view(samples, 1, width).transpose(0, 2).transpose(0, 2))
        samples, channels, width = h.shape
        assert h.dtype == x.dtype
        assert h.device == x.device
        h = h.reshape(samples, channels * width)
        first, second = h.chunk(2, dim=1)
        return self.d(self.c(torch.cat([second, first], 1)))


class Noise(Four):
    """Random numbers drawn between the units, also beside the activation."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(F.dropout(self.a(x), 0.3))
        noise = torch.randn(8)
        h = self.c(F.dropout(h, 0.1) + torch.randn_like(h) + noise)
        return self.d(h * torch.rand(8)) + noise[:4]


class Recurrent(Four):
    """Modules that refer to their weights by themselves, and return tuples."""

    def change(self) -> None:
        self.b, self.c = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.b(self.a(x)[:, None].expand(-1, 3, -1))
        return self.d(self.c(h)[0][:, -1])


class Borrowed(Four):
    """A weight of a unit is used outside it, where the unit itself lies."""

    def forward(self, x: Tensor) -> Any:
        device = self.d.weight.device
        h = self.b(self.a(x.to(device)) + self.a.weight[0] * 2)
        return self.d(self.c(h)) + self.d.bias


class Tied(Four):
    """A weight that three stages share, and a bias that two do."""

    def change(self) -> None:
        self.c.weight = self.b.weight = self.a.weight
        self.c.bias = self.b.bias


class Branches(Four):
    """Units that only some micro-batches use, the first of a stage too."""

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        if not self.training or len(x) == 2:
            x = self.b(x)
        if not self.training or bool(torch.rand(()) < 0.5):
            x = self.c(x)
        return self.d(x)


class Checkpointed(Four):
    def forward(self, x: Tensor) -> Any:
        for unit in (self.a, self.b, self.c):
            x = F.dropout(checkpoint(unit, x, use_reentrant=False), 0.1, self.training)
        return self.d(x)


class Segment(Four):
    """One checkpoint over two units, between which a stage begins."""

    def forward(self, x: Tensor) -> Any:
        return self.d(checkpoint(lambda x: self.c(self.b(x)), self.a(x), use_reentrant=False))


class Rotary(nn.Module):
    """As in Llama: a module without parameters that takes the activation for its dtype and device alone."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        return torch.cos(place[:, None] * self.frequencies.to(x.device)).to(x.dtype)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, *, turn: Tensor) -> Tensor:
        result: Tensor = self.linear(hidden * turn)
        return result


class LikeLlama(Four):
    def change(self) -> None:
        self.b, self.c, self.rotary = Turned(), Turned(), Rotary()

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        turn = self.rotary(h, torch.full((len(x),), 0.3, device=h.device))
        return self.d(self.c(hidden=self.b(hidden=h, turn=turn), turn=turn))


def autocast(model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


def where_the_model_is(model: nn.Module, batch: Any) -> Any:
    device = next(model.parameters()).device
    return cross_entropy(model, [t.to(device) for t in batch])


def freeze_the_first(model: nn.Module) -> None:
    model.a.requires_grad_(False)
    model.b.requires_grad_(False)


def freeze_the_last(model: nn.Module) -> None:
    model.c.requires_grad_(False)
    model.d.requires_grad_(False)


class Keeps(nn.Module):
    """Keeps tensors of a forward pass: in an attribute, and in a list that others have too."""

    aux: Any = None

    def __init__(self, store: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.store = nn.Linear(8, 8), store
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        self.cache.setdefault(x.shape[1], torch.arange(3))
        self.aux = [x.square().sum(), None]
        self.store.append(x.mean(1).sum())
        return x


class Auxiliary(Four):
    def change(self) -> None:
        self.store: list[Tensor] = []
        self.b, self.c = nn.Sequential(Keeps(self.store)), Keeps(self.store)
        self.d = nn.Sequential(Keeps(self.store), self.d)

    def forward(self, x: Tensor) -> Any:
        self.store.clear()
        return super().forward(x)


def of_the_last_stage(model: Any, batch: Any) -> Any:
    loss, weight = cross_entropy(model, batch)
    return loss + model.d[0].aux[0] + model.store[-1], weight


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Any] = cross_entropy
    change: Callable[[nn.Module], None] = lambda model: None
    precision: str = "fp32"


EQUAL = {
    "plain": Case(Four),
    "in place": Case(InPlace),
    "loose": Case(Loose),
    "nests": Case(Nests),
    "shapes": Case(Shapes),
    "noise": Case(Noise),
    "recurrent": Case(Recurrent),
    "borrowed": Case(Borrowed),
    "tied": Case(Tied),
    "tied, autocast": Case(Tied, autocast),
    "branches": Case(Branches),
    "checkpointed": Case(Checkpointed),
    "checkpointed, autocast": Case(Checkpointed, autocast),
    "segment": Case(Segment),
    "like llama": Case(LikeLlama),
    "device": Case(Four, where_the_model_is),
    "first frozen": Case(Four, change=freeze_the_first),
    "kept": Case(Auxiliary, of_the_last_stage),
    "last frozen": Case(Tied, change=freeze_the_last),
    "fp16": Case(Tied, precision="fp16"),
}


def train(directory: Path, case: Case, stages: int) -> Any:
    """A short training that does much: fingerprints, losses and norms, and what evaluations gave."""
    said: list[Any] = []
    with training_run(directory, global_batch=4, stages=stages, precision=case.precision) as run:
        model = run.prepare(case.model())
        case.change(model)
        optimizer = adamw(model.parameters())
        for step in run.steps(Rows(), epochs=1):
            result = step.backward(case.loss_fn)
            if step.number == 1:
                step.backward(lambda model, batch: (model(batch[0]).square().sum(), None))
            said.append((result.loss, run.clip(0.5)))
            optimizer.step()
            optimizer.zero_grad()
        said.append(run.evaluate(Rows(), lambda model, batch: ((model(batch[0]).argmax(1) == batch[1]).sum(), 2)))
        said.append(run.predict(Rows(), lambda model, batch: model(batch[0])).tolist())
    return fingerprints(run), said


def in_one_group(body: Callable[[], Any], processes: int, **options: Any) -> list[Any]:
    """`body` on each of several ranks, whose runs share one process group."""

    def ranked() -> Any:
        dist.init_process_group("gloo")
        try:
            return body()
        finally:
            dist.destroy_process_group()

    return run_ranks(ranked, processes, **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("alone")
    return {name: train(directory / name, case, 1) for name, case in EQUAL.items()}


@pytest.mark.parametrize(("processes", "stages"), [(2, 2), (3, 3), (4, 2)])
def test_awkward_models_are_equal(processes: int, stages: int, alone: dict[str, Any], tmp_path: Path) -> None:
    cases = {name: case for name, case in EQUAL.items() if name != "branches" or stages == 2}  # else a stage is skipped
    found = in_one_group(
        lambda: {name: train(tmp_path / name, case, stages) for name, case in cases.items()}, processes
    )
    for rank, here in enumerate(found):
        for name, (prints, said) in here.items():
            assert len(set(alone[name][0])) == 4, name
            assert prints == alone[name][0], f"{name} on rank {rank}"
            assert said == alone[name][1], f"{name} on rank {rank}"


# ---- what is refused


class Skip(Four):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.d(self.c(self.b(h)) + h)


class Memory(Four):
    def change(self) -> None:
        self.c = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Any:
        memory = self.a(x)
        return self.d(self.c(self.b(memory), memory))


class Functional(Four):
    def forward(self, x: Tensor) -> Any:
        return self.d(F.linear(self.c(self.b(self.a(x))), self.a.weight))


class Hidden(nn.Module):
    """Uses a weight that it does not own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(8, 8), [other]

    def forward(self, x: Tensor) -> Any:
        return F.linear(self.own(x), self.others[0].weight)


class HiddenUse(Four):
    def change(self) -> None:
        self.c = Hidden(self.a)


class Twice(Four):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.b(self.b(self.a(x)))))


class Complex(Four):
    """A complex parameter of no unit."""

    def change(self) -> None:
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return (super().forward(x) * self.turn).real


class SparseHead(Four):
    """A sparse gradient would have to go to another stage."""

    def change(self) -> None:
        self.c = nn.EmbeddingBag(8, 8, sparse=True, mode="sum")
        self.b.weight = self.c.weight

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        return self.d(self.c((h > 0).long()))


class LooseTwice(Loose):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.position[:4]


class Reading(Four):
    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        return self.d(self.c(h * 2 if h.mean() > 0 else h))


class Written(Four):
    def forward(self, x: Tensor) -> Any:
        kept = torch.zeros(2, 8)
        kept[: len(x)] = self.b(self.a(x))
        return self.d(self.c(kept[: len(x)]))


class Unordered(Four):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.a(self.c(self.b(x))).relu())


class Backwards(Four):
    def forward(self, x: Tensor) -> Any:
        return self.a(self.b(self.c(x)))[:, :4]


class Early(Four):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))[:, :4]


class Swallowing(Four):
    def forward(self, x: Tensor) -> Any:
        try:
            return super().forward(x)
        except BaseException:
            return x[:, :4]


class Reentrant(Four):
    def forward(self, x: Tensor) -> Any:
        return self.d(checkpoint(self.c, checkpoint(self.b, self.a(x), use_reentrant=True), use_reentrant=True))


class Odd:
    pass


class Strange(Four):
    def change(self) -> None:
        self.b = Returning(Odd())

    def forward(self, x: Tensor) -> Any:
        h, _ = self.b(self.a(x))
        return self.d(self.c(h))


class Returning(nn.Module):
    def __init__(self, more: Any) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(8, 8), more

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), self.more


class Compiled(Four):
    def change(self) -> None:
        self.c.compile(backend="eager")


def two_calls(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    loss = F.cross_entropy(model(x), y, reduction="sum") + F.cross_entropy(model(x + 1), y, reduction="sum")
    return loss, len(y)


def hidden_states(model: Any, batch: Any) -> Any:
    """The loss takes an output of the first unit."""
    states: list[Tensor] = []
    handle = model.a.register_forward_hook(lambda module, given, output: states.append(output))
    try:
        loss, weight = cross_entropy(model, batch)
    finally:
        handle.remove()
    return loss + states[0].square().sum(), weight


def decayed(model: nn.Module, batch: Any) -> Any:
    loss, weight = cross_entropy(model, batch)
    return loss + weight * sum(p.square().sum() for p in model.parameters()), weight


def with_auxiliary(model: Any, batch: Any) -> Any:
    loss, weight = cross_entropy(model, batch)
    return loss + model.b[0].aux[0] + model.c.aux[0], weight


def with_stored(model: Any, batch: Any) -> Any:
    loss, weight = cross_entropy(model, batch)
    return loss + sum(model.store), weight


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Any], str]] = {
    "skip": (Skip, cross_entropy, "an argument of d depends on the output of a"),
    "memory": (Memory, cross_entropy, "an argument of c depends on the output of a"),
    "functional": (Functional, cross_entropy, "an argument of d depends on a.weight, which lies on another stage"),
    "hidden use": (HiddenUse, cross_entropy, "a.weight lies on another stage"),
    "decay": (Four, decayed, "a.weight, which lies on another stage"),
    "twice": (Twice, cross_entropy, "b is called a second time for one micro-batch"),
    "two calls": (Four, two_calls, "a is called a second time for one micro-batch"),
    "hidden states": (Four, hidden_states, "what the function returned depends on the output of a, which"),
    "kept": (Auxiliary, with_auxiliary, "what the function returned depends on b.0.aux, which lies on another stage"),
    "stored": (Auxiliary, with_stored, "what the function returned depends on b.0.store, which"),
    "complex": (Complex, cross_entropy, "turn is complex and would lie on several stages"),
    "sparse": (SparseHead, cross_entropy, "a torch.sparse_coo tensor of torch.float32 goes from one stage"),
    "loose twice": (LooseTwice, cross_entropy, "position, which belongs to no unit"),
    "reading": (Reading, cross_entropy, "a value of the output of b, which lies on another stage, is read"),
    "written": (Written, cross_entropy, "the output of b, which lies on another stage, is written into a tensor"),
    "unordered": (
        Unordered,
        cross_entropy,
        "in which they are defined, or chooses by something that the stages do not",
    ),
    "backwards": (Backwards, cross_entropy, "c, of a later stage, is called before any of a to b"),
    "early": (Early, cross_entropy, "the function returned on stage 0, which has a to b"),
    "swallowing": (Swallowing, cross_entropy, "went on although a stage had ended"),
    "reentrant": (Reentrant, cross_entropy, "b runs under reentrant activation checkpointing"),
    "strange": (Strange, cross_entropy, "the output of b is, or holds, a Odd"),
    "compiled": (Compiled, cross_entropy, "c is compiled"),
}


def test_what_cannot_be_cut_is_refused_by_name_on_every_process(tmp_path: Path) -> None:
    def refused() -> dict[str, str]:
        found = {}
        for name, (model, loss_fn, _) in REFUSED.items():
            with training_run(tmp_path / name, global_batch=4, stages=2) as run:
                try:
                    run.prepare(model(), stages=["c"])
                    for step in run.steps(Rows(), steps=1):
                        step.backward(loss_fn)
                    found[name] = "nothing was refused"
                except UsageError as error:
                    found[name] = error.message
        return found

    for rank, found in enumerate(in_one_group(refused, 2)):
        for name, (_, _, words) in REFUSED.items():
            assert words in found[name], f"{name} on rank {rank}"


def test_what_cannot_be_prepared_or_called_is_refused(tmp_path: Path) -> None:
    def body() -> None:
        def start(**options: Any) -> Any:
            return training_run(tmp_path / "run", global_batch=4, stages=2, **options)

        with start() as run:
            with pytest.raises(UsageError, match="'x' is no unit of the model"):
                run.prepare(Four(), stages=["x"])
            with pytest.raises(UsageError, match=r"does not cut a, b, c, d into 2 stages"):
                run.prepare(Four(), stages=["b", "c"])
            with pytest.raises(UsageError, match="Linear has 0 units"):
                run.prepare(nn.Linear(8, 4))
        with start() as run:
            model = run.prepare(Four(), stages=["b"])
            with pytest.raises(UsageError, match="a second model was prepared"):
                run.prepare(Four())
            with pytest.raises(UsageError, match="its parts lie on 2 stages"):
                model(torch.randn(2, 8))
            for copied in (copy.deepcopy, pickle.dumps):
                with pytest.raises(UsageError, match="cannot be copied or pickled"):
                    copied(model)
            here = {name for name, p in model.named_parameters() if not p.is_meta}
            assert here == (
                {"a.weight", "a.bias"} if run.rank == 0 else {f"{m}.{p}" for m in "bcd" for p in ("weight", "bias")}
            )
            for step in run.steps(Rows(), steps=1):
                step.backward(cross_entropy)
                with pytest.raises(UsageError, match="LBFGS with --stages: an update of its may need parameters"):
                    torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
                model.extra = nn.Linear(2, 2)
                with pytest.raises(UsageError, match="weight came into the model after it was cut"):
                    step.backward(cross_entropy)

    in_one_group(body, 2)


# ---- failures


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sprung: bool) -> Tensor:
        ctx.sprung = sprung
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.sprung:
            raise ValueError("a trap")
        return gradient, None


class Trapped(Tied):
    """Fails where it is told, for the micro-batch with sample 3 alone."""

    where = ""
    armed = False

    def forward(self, x: Tensor) -> Any:
        sprung = self.armed and bool((x == Rows().x[3]).all(1).any())
        for name in "abcd":
            x = getattr(self, name)(x)
            if self.where == f"forward {name}" and sprung:
                raise ValueError("a trap")
            if self.where == f"backward {name}":
                x = Trap.apply(x, sprung)  # type: ignore[no-untyped-call]
        return x


WHERE = ["forward a", "backward b", "forward d", "backward d"]


def redone(directory: Path, stages: int) -> tuple[list[str], list[str]]:
    """Steps that fail, on one stage of one replica, and are done again."""
    seen = []
    with training_run(directory, global_batch=13, stages=stages) as run:
        model = run.prepare(Trapped())
        optimizer = adamw(model.parameters())
        for step in run.steps(Rows(), steps=len(WHERE)):
            step.backward(lambda model, batch: (model(batch[0]).square().sum(), None))
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            model.where, model.armed = WHERE[step.number], True
            try:
                step.backward(cross_entropy)
                seen.append("nothing")
            except ValueError:
                seen.append("its own")
            except PeerFailed as error:
                seen.append("another's" if "ValueError: a trap" in str(error) else str(error))
            for p, grad in zip(model.parameters(), before, strict=True):
                assert (p.grad is None) == (grad is None)
                assert p.grad is None or grad is None or torch.equal(p.grad, grad)
            model.armed = False
            step.backward(cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    return fingerprints(run), seen


@pytest.mark.parametrize("processes", [2, 4])
def test_a_step_that_failed_on_one_stage_is_done_again(processes: int, tmp_path: Path) -> None:
    expected, alone = redone(tmp_path / "alone", 1)
    assert alone == ["its own"] * 4
    found = run_ranks(lambda: redone(tmp_path / "run", 2), processes)
    for prints, _ in found:
        assert prints == expected
    for k, where in enumerate(WHERE):
        failed = [rank for rank, (_, seen) in enumerate(found) if seen[k] == "its own"]
        assert len(failed) == 1, where
        assert failed[0] % 2 == (where[-1] in "cd"), f"{where} is on the stage that has the unit"
        assert all(seen[k] == "another's" for rank, (_, seen) in enumerate(found) if rank != failed[0])


def test_the_others_end_when_a_stage_is_killed(tmp_path: Path) -> None:
    def body() -> str:
        def loss_fn(model: nn.Module, batch: Any) -> Any:
            if os.environ["RANK"] == "1" and model.training and (batch[0] == Rows().x[3]).all(1).any():
                os.kill(os.getpid(), signal.SIGKILL)
            return cross_entropy(model, batch)

        with training_run(tmp_path / "run", global_batch=13, stages=3) as run:
            run.prepare(Four())
            for step in run.steps(Rows(), steps=1):
                step.backward(loss_fn)
        return "went on"

    with pytest.raises(RanksFailed) as caught:
        run_ranks(body, 3, timeout=30)
    story = str(caught.value)
    assert sorted(caught.value.ranks) == [0, 1, 2]
    assert "rank 1 was ended by SIGKILL" in story
    assert "PeerFailed: rank 0 lost contact with another process" in story
    assert "PeerFailed: rank 2 lost contact with another process" in story


def test_a_stage_that_goes_another_way_is_told(tmp_path: Path) -> None:
    """Each would wait for the other for ever."""

    def leave(run: Run, step: Step) -> None:
        if run.rank == 0:
            run.barrier()
        step.backward(cross_entropy)

    def evaluate(run: Run, step: Step) -> None:
        if run.rank == 1:
            run.predict(Rows(), lambda model, batch: model(batch[0]))
        step.backward(cross_entropy)

    def leave_in_a_loss(run: Run, step: Step) -> None:
        def loss_fn(model: nn.Module, batch: Any) -> Any:
            if run.rank == 1 and model.training:
                raise SystemExit
            return cross_entropy(model, batch)

        try:
            step.backward(loss_fn)
        except SystemExit:
            run.barrier()

    def body() -> list[str]:
        said = []
        for go in (leave, evaluate, leave_in_a_loss):
            with training_run(tmp_path / go.__name__, global_batch=4, stages=2) as run:
                run.prepare(Four())
                for step in run.steps(Rows(), steps=1):
                    try:
                        go(run, step)
                    except MismatchError as error:
                        said.append(str(error))
        return said

    for said in in_one_group(body, 2, timeout=10):
        assert ["step.backward" in text for text in said] == [True] * 3
        assert ["barrier" in text for text in said] == [True, False, True]
        assert "predict" in said[1]


def test_an_evaluation_that_fails_on_a_stage_ends_on_all(tmp_path: Path) -> None:
    def body() -> list[str]:
        def failing(model: Any, batch: Any) -> Any:
            outputs = model(batch[0])
            if (batch[0] == Rows().x[7]).all(1).any():
                raise ValueError("a bad sample")
            return outputs

        said = []
        with training_run(tmp_path / "run", global_batch=4, stages=2) as run:
            model = run.prepare(Four())
            for fn in (failing, lambda model, batch: model.a(batch[0]), lambda model, batch: model(batch[0])):
                try:
                    said.append(str(len(run.predict(Rows(), fn))))
                except (ValueError, UsageError, PeerFailed) as error:
                    said.append(f"{type(error).__name__}: {error}")
            assert model.training
        return said

    for rank, said in enumerate(in_one_group(body, 4)):
        assert "ValueError: a bad sample" in said[0], rank
        assert "without calling a unit of a later stage" in said[1], rank
        assert said[2] == "13", rank


# ---- transformers


def test_transformers_models_are_equal(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def gpt2() -> Any:
        config = transformers.GPT2Config(
            n_layer=3, n_embd=16, n_head=2, vocab_size=20, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)

    def llama() -> Any:
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=20,
            tie_word_embeddings=True,
            attention_dropout=0.1,
        )
        return transformers.LlamaForCausalLM(config)

    def next_token(model: Any, tokens: Tensor) -> Any:
        labels = tokens.masked_fill(tokens < 0, -100)
        seen = (tokens >= 0).long()
        out = model(input_ids=tokens.clamp(min=0), attention_mask=seen, labels=labels)
        count = (labels[:, 1:] != -100).sum()
        return out.loss * count, count

    def train(make: Callable[[], Any], checkpointing: bool, stages: int) -> list[str]:
        with training_run(tmp_path / f"{make.__name__}-{checkpointing}-{stages}", global_batch=8, stages=stages) as run:
            bare = make().train()
            if checkpointing:
                bare.activation_checkpointing_enable({"use_reentrant": False})
            model = run.prepare(bare)
            optimizer = adamw(model.parameters())
            steps = run.steps(Sentences(20), steps=3, collate=padded)
            run.restore(model=model, optimizer=optimizer)
            for step in steps:
                step.backward(next_token)
                run.clip(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return fingerprints(run)

    def both(stages: int) -> list[list[str]]:
        return [train(gpt2, False, stages), train(llama, True, stages)]

    expected = both(1)
    for found in in_one_group(lambda: both(3), 3):
        assert found == expected
