"""What a checkpoint must hold so that a resumed run has the same bits, and what restore refuses."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from evenstep.errors import CheckpointError, MachineError, MismatchError, UsageError
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from evenstep.train.agreement import Share, agree, by_path, share
from evenstep.train.fingerprint import fingerprint
from evenstep.train.run import Run
from evenstep.train.tensor_file import write_tensors
from evenstep.train.weights import save_model
from tests.ranks import run_ranks
from tests.train.scripts import fingerprints, training_run

DATA = TensorDataset(torch.arange(40, dtype=torch.float32).reshape(20, 2) / 40, torch.arange(20) % 3)

Make = Callable[..., torch.optim.Optimizer]


def loss_fn(model: nn.Module, batch: Any) -> Any:
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(batch[0].to(dtype)), batch[1], reduction="sum"), len(batch[1])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


def begin(directory: Path, **options: Any) -> Run:
    return training_run(directory, **{"global_batch": 6, "checkpoint_every": 2, **options})


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


class Script:
    """A small training; what a subclass changes is what the test is about."""

    make: Make = staticmethod(adam)
    dtype = torch.float32

    def begin(self, run: Run, model: nn.Module) -> dict[str, Any]:
        """What else restore is given."""
        return {}

    def before(self, number: int, model: nn.Module) -> None: ...

    def after(self, run: Run, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def train(self, directory: Path, stop: int | None = None) -> list[str]:
        """The fingerprints of the steps done in this start. `stop`: dies in the step of that number."""
        with begin(directory) as run:
            model = run.prepare(net().to(self.dtype))
            optimizer = self.make(model.parameters())
            steps = run.steps(DATA, epochs=2)
            run.restore(model=model, optimizer=optimizer, **self.begin(run, model))
            for step in steps:
                self.before(step.number, model)
                step.backward(loss_fn)
                if step.number == stop:
                    run._close(failed=True)
                    return []
                self.after(run, step.number, model, optimizer)
        return fingerprints(run)

    def resumes(self, tmp_path: Path, world_size: int) -> None:
        """Any resume ends as an undisturbed run does, whatever the number of processes."""
        whole = self.train(tmp_path / "whole")
        assert len(set(whole)) == 8
        for stop in (3, 5):
            directory = tmp_path / f"cut{stop}"
            run_ranks(self.train, 3 - world_size, directory, stop)
            for found in run_ranks(self.train, world_size, directory):
                assert found[-1] == whole[-1]


# ---- what comes back


def nadam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, 0.05)


def asgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, 0.05, lambd=0.01, t0=2)


@pytest.mark.parametrize("make", [nadam, asgd])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_state_that_is_wider_than_the_parameters_keeps_its_bits(make: Make, dtype: torch.dtype, tmp_path: Path) -> None:
    script = Script()
    script.make, script.dtype = make, dtype
    script.resumes(tmp_path, 1)


class Nested(torch.optim.SGD):
    """Keeps float32 tensors in lists and dicts."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sums", [{"of": torch.zeros(p.shape)}, (torch.tensor(0.1), None)])
                state["sums"][0]["of"] += p.grad.float() / 3
        super().step()


def test_state_in_containers_keeps_its_bits(tmp_path: Path) -> None:
    script = Script()
    script.make, script.dtype = Nested, torch.bfloat16
    script.resumes(tmp_path, 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_layer_that_was_unfrozen_stays_so(world_size: int, tmp_path: Path) -> None:
    class Unfreezes(Script):
        def begin(self, run: Run, model: nn.Module) -> dict[str, Any]:
            model.get_submodule("0").requires_grad_(False)
            return {}

        def before(self, number: int, model: nn.Module) -> None:
            if number == 2:
                model.get_submodule("0").requires_grad_(True)

    class FreezesLater(Script):
        def before(self, number: int, model: nn.Module) -> None:
            if number == 1:
                model.get_submodule("0").requires_grad_(False)

    Unfreezes().resumes(tmp_path / "unfreezes", world_size)
    FreezesLater().resumes(tmp_path / "freezes", world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_were_not_used_yet_come_back(world_size: int, tmp_path: Path) -> None:
    class EverySecond(Script):
        def after(self, run: Run, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.step()
            if number % 4 == 3:
                optimizer.zero_grad()

    EverySecond().resumes(tmp_path, world_size)


def test_gradients_are_none_where_they_were(tmp_path: Path) -> None:
    Script().train(tmp_path, stop=3)
    with begin(tmp_path) as run:
        model = run.prepare(net())
        loss_fn(model, DATA[:2])[0].backward()
        run.restore(model=model, optimizer=adam(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        run._close(failed=True)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("made", ["before", "after"])
def test_an_average_of_the_weights_is_saved_and_counts(made: str, world_size: int, tmp_path: Path) -> None:
    def train(directory: Path, stop: int | None = None, averages: bool = True) -> tuple[list[str], int]:
        with begin(directory) as run:
            model = net()
            if made == "after":
                run.prepare(model)
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            run.prepare(model)
            optimizer = adam(model.parameters())
            steps = run.steps(DATA, epochs=2)
            run.restore(model=model, optimizer=optimizer, average=average)
            for step in steps:
                step.backward(loss_fn)
                if step.number == stop:
                    run._close(failed=True)
                    break
                optimizer.step()
                optimizer.zero_grad()
                if averages:
                    average.update_parameters(model)
        return fingerprints(run), int(average.n_averaged)

    whole, n = train(tmp_path / "whole")
    assert n == 8
    run_ranks(train, 3 - world_size, tmp_path / "cut", 5)
    for found, n in run_ranks(train, world_size, tmp_path / "cut"):
        assert (found[-1], n) == (whole[-1], 8)
    assert train(tmp_path / "other", averages=False)[0][-1] != whole[-1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_does_not_come_back_as_it_was_saved_is_named(world_size: int, tmp_path: Path) -> None:
    class Forgets(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            next(iter(self.state.values()))["exp_avg"].zero_()

    def again(half: bool) -> None:
        with begin(tmp_path) as run:
            model = run.prepare(net().bfloat16() if half else net())
            run.restore(model=model, optimizer=(adam if half else Forgets)(model.parameters()))

    Script().train(tmp_path, stop=3)
    with pytest.raises(
        CheckpointError, match=r"optimizer \(Forgets\) does not come back.*changed optimizer\.state\[0\]\.exp_avg\n"
    ):
        run_ranks(again, world_size, False)
    with pytest.raises(CheckpointError, match=r"model \(Sequential\) does not come back.*model\.0\.weight"):
        run_ranks(again, world_size, True)


def test_hyperparameters_that_the_saved_torch_had_not_are_no_reason(tmp_path: Path) -> None:
    class Newer(torch.optim.Adam):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
            for group in self.param_groups:
                group.setdefault("novel", False)

    Script().train(tmp_path, stop=3)
    with begin(tmp_path) as run:
        model = run.prepare(net())
        optimizer = Newer(model.parameters())
        run.restore(model=model, optimizer=optimizer)
        assert optimizer.param_groups[0]["novel"] is False
        run._close(failed=True)


# ---- what is refused


def test_a_module_that_an_optimizer_updates_must_be_prepared(tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        model, other = run.prepare(net()), net()
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
        with pytest.raises(UsageError, match=r"other was not prepared(.|\n)*other = run\.prepare\(other\)"):
            run.restore(model=model, other=other, optimizer=optimizer)
        with pytest.raises(UsageError, match=r"model is a DataParallel(.|\n)*give the bare module"):
            run.restore(model=nn.DataParallel(model), optimizer=optimizer)


def test_the_checks_can_be_done_again_later(tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        run._saved.check()
        model = run.prepare(net())
        optimizer, other = adam(model.parameters()), adam(model.parameters())
        run.restore(model=model, optimizer=optimizer)
        run._saved.check()
        assert run._saved.knows(optimizer)
        assert not run._saved.knows(other)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        with pytest.raises(UsageError, match="is driven by a StepLR that restore was not given"):
            run._saved.check()
        del scheduler
        run.prepare(nn.Linear(2, 2))
        with pytest.raises(UsageError, match="Linear, number 1"):
            run._saved.check()
        run._close(failed=True)


class Holds:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Odd(nn.Linear):
    def get_extra_state(self) -> Any:
        return Path("x")


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ([adam([torch.zeros(1)])] * 2, r"state at thing\[0\] holds a .*Adam(.|\n)*a name of its own(.|\n)*thing0="),
        ({"a": adam([torch.zeros(1)])}, r"state at thing\.a holds a .*Adam(.|\n)*a name of its own"),
        (torch.Generator(), r"state at thing holds a .*Generator(.|\n)*generator\.get_state\(\)"),
        (np.random.default_rng(0), r"state at thing holds a .*Generator(.|\n)*generator\.bit_generator\.state"),
        ([random.Random(0)], r"state at thing\[0\] holds a .*Random(.|\n)*generator\.setstate\("),
        (Path("a"), r"state at thing holds a pathlib.*Path(.|\n)*give plain values(.|\n)*of a path its str"),
        ({"x": [1, deque([1])]}, r"state at thing\.x\[1\] holds a collections\.deque(.|\n)*give plain values"),
        (Holds({"x": [1, Path("a")]}), r"state at thing\.x\[1\] holds a pathlib"),
        (Odd(2, 2), r"state at thing\._extra_state holds a pathlib"),
        (torch.eye(2).to_sparse(), "state at thing holds a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_restore(thing: Any, message: str, tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        model = run.prepare(net())
        with pytest.raises(UsageError, match=message):
            run.restore(model=model, thing=thing)
        run.restore(model=model)


def test_the_advised_generator_state_goes_on(tmp_path: Path) -> None:
    def draw(steps: int) -> list[float]:
        with begin(tmp_path, checkpoint_every=1) as run:
            model = run.prepare(net())
            generator, rng = torch.Generator(), np.random.default_rng(1)
            state = run.restore(model=model, generator=generator.get_state(), rng=rng.bit_generator.state, drawn=[])
            generator.set_state(state.generator)
            rng.bit_generator.state = state.rng
            for step in run.steps(DATA, epochs=2):
                step.backward(loss_fn)
                if step.number == steps:
                    run._close(failed=True)
                    break
                state.drawn = [*state.drawn, torch.rand((), generator=generator).item(), rng.random()]
                state.generator, state.rng = generator.get_state(), rng.bit_generator.state
        return list(state.drawn)

    draw(3)
    generator, rng = torch.Generator(), np.random.default_rng(1)
    assert draw(9) == [x for _ in range(8) for x in (torch.rand((), generator=generator).item(), rng.random())]


# ---- processes that hold different things


@pytest.mark.parametrize(("world_size", "odd"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("what", ["rate", "weights", "no step"])
def test_processes_that_have_come_apart_are_told(what: str, world_size: int, odd: int, tmp_path: Path) -> None:
    def work() -> str:
        with training_run(tmp_path / "run", global_batch=8) as run:
            model = run.prepare(net())
            optimizer = adam(model.parameters())
            run.restore(model=model, optimizer=optimizer)
            loss_fn(model, DATA[:4])[0].backward()
            before = run._saved.fingerprint("the start")
            if run.rank != odd or what != "no step":
                optimizer.step()
            if run.rank == odd and what == "rate":
                optimizer.param_groups[0]["lr"] /= 2
            if run.rank == odd and what == "weights":
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.5)
            with pytest.raises(MismatchError) as caught:
                run._saved.fingerprint("the end of step 1")
            run._close(failed=True)
        return before + str(caught.value)

    found = run_ranks(work, world_size)
    assert len(set(found)) == 1
    assert "at the end of step 1 the processes hold different" in found[0]
    if what == "no step":
        assert f"optimizer.state[0].exp_avg: there is none on rank {odd}" in found[0]
    path = "optimizer.param_groups[0].lr" if what == "rate" else "model.0.weight"
    ranks = {(2, 0): "rank 0 and rank 1", (2, 1): "rank 0 and rank 1", (4, 2): "ranks 0, 1, 3 and rank 2"}
    assert f"{path}: {ranks[world_size, odd]} differ" in found[0]
    assert "scheduler that steps on some ranks only" in found[0]


def test_the_run_itself_tells_that_processes_have_come_apart(tmp_path: Path) -> None:
    class Slower(Script):
        def after(self, run: Run, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            super().after(run, number, model, optimizer)
            if run.rank == 1 and number == 1:
                optimizer.param_groups[0]["lr"] /= 2

    message = r"end of step 1 the processes hold(.|\n)*optimizer\.param_groups\[0\]\.lr: rank 0 and rank 1 differ"
    with pytest.raises(MismatchError, match=message):
        run_ranks(Slower().train, 2, tmp_path / "run")


def test_shares_add_up_to_the_same_fingerprint_and_tell_a_stranger() -> None:
    torch.manual_seed(0)
    values = torch.randn(100, 30)
    tree = {"a": values, "b": [1, 0.5], "c": torch.tensor(3)}
    other = {**tree, "a": values + 1}
    plain = {**tree, "b": [1, 0.25]}
    for world_size in (1, 2, 3, 5):
        shares = [share(tree, rank, world_size) for rank in range(world_size)]
        assert sum(s.part for s in shares) % 2**64 == fingerprint(tree)
        assert [Share.from_bytes(s.to_bytes()) for s in shares] == shares
        assert agree(shares)
        for stranger in (other, plain):
            for rank in range(world_size if world_size > 1 else 0):
                apart = [*shares[:rank], share(stranger, rank, world_size), *shares[rank + 1 :]]
                assert not agree(apart)
    assert [path for path, value in by_path(tree).items() if value != by_path(other)[path]] == ["a"]
    assert by_path({"a": {}, "b": {"c.d": [1]}}).keys() == {"a", "b.c.d[0]"}


@pytest.mark.parametrize("changed", ["a", "b", "c"])
@pytest.mark.parametrize("shape", [(80, 100), (3, 4), ()])
def test_a_change_of_one_tensor_shows_whichever_it_is(changed: str, shape: tuple[int, ...]) -> None:
    tree = {name: torch.full(shape, 0.5) for name in "abc"}
    other = {**tree, changed: torch.ones(shape)}
    shares, strange = ([share(t, rank, 4) for rank in range(4)] for t in (tree, other))
    assert sum(s.part for s in shares) % 2**64 == fingerprint(tree)
    for rank in range(4):
        assert not agree([*shares[:rank], strange[rank], *shares[rank + 1 :]])


# ---- the model's file


def test_complex_parameters_are_left_out_of_the_model_file_and_said(tmp_path: Path) -> None:
    model = net()
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    assert save_model(tmp_path / "m", {"model": model.state_dict()}) == ["phase"]


def test_a_checkpoint_records_its_fingerprint(tmp_path: Path) -> None:
    found = Script().train(tmp_path)
    assert Checkpoints(RunPaths(tmp_path)).about(8)["fingerprint"] == found[-1]


# ---- what trains alone is saved


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_adapter_is_saved_without_its_base(world_size: int, tmp_path: Path) -> None:
    def train(directory: Path, base: int = 0, stop: int | None = None) -> str:
        with begin(directory) as run:
            model = net()
            with torch.no_grad():
                model.get_parameter("0.weight").add_(base)
            model.get_submodule("0").requires_grad_(False)
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            run.prepare(model, save="trained")
            run.prepare(average, save="trained")
            optimizer = adam(p for p in model.parameters() if p.requires_grad)
            steps = run.steps(DATA, epochs=2)
            run.restore(model=model, optimizer=optimizer, average=average)
            for step in steps:
                step.backward(loss_fn, model)
                if step.number == stop:
                    run._close(failed=True)
                    return ""
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
        return fingerprints(run)[-1]

    whole = train(tmp_path / "whole")
    run_ranks(train, 3 - world_size, tmp_path / "cut", 0, 5)
    with pytest.raises(CheckpointError, match="goes with other base weights of model"):
        run_ranks(train, world_size, tmp_path / "cut", 1)
    assert run_ranks(train, world_size, tmp_path / "cut") == [whole] * world_size
    model = load_file(tmp_path / "cut" / "model.safetensors")
    trained = {"2.weight", "2.bias"}
    assert {n for n in model if n.startswith("Sequential")} == {f"Sequential.{n}" for n in trained}
    paths = RunPaths(tmp_path / "cut")
    assert paths.model.stat().st_size < 2000
    kept = load_file(paths.checkpoint(8) / "tensors.safetensors").keys()
    assert {n for n in kept if n.startswith("objects.model.")} == {f"objects.model.{n}" for n in trained}


# ---- processes that hold parts of the model


def test_stages_are_all_told_of_a_disk_that_failed_at_the_end(tmp_path: Path) -> None:
    def full(path: Path, entries: Any, data: Any) -> None:
        if path.parent.name.startswith(".step-0000000008"):
            raise OSError(28, "No space left on device", str(path))
        write_tensors(path, entries, data)

    def train(directory: Path, stages: int, breaks: bool) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if breaks:
                patch.setattr("evenstep.train.checkpoint.write_tensors", full)
            run = begin(directory, stages=stages)
            model = run.prepare(net())
            optimizer = adam(model.parameters())
            steps = run.steps(DATA, epochs=2)
            run.restore(model=model, optimizer=optimizer)
            try:
                for step in steps:
                    step.backward(loss_fn)
                    optimizer.step()
                    optimizer.zero_grad()
            except MachineError as error:
                run._close(failed=True)
                return str(error)
            run.close()
        return fingerprints(run)[-1]

    whole = train(tmp_path / "whole", 1, False)
    told = run_ranks(train, 2, tmp_path / "cut", 2, True)
    assert told[0] == told[1]
    assert "the last checkpoint could not be written" in told[0]
    assert run_ranks(train, 2, tmp_path / "cut", 2, False) == [whole] * 2
    for name in ("model.safetensors", "checkpoints/step-0000000008/tensors.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
