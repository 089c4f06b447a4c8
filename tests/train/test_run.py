"""A run from start to end: resuming, checkpoints, logs, break, and everything that is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import evenstep
from evenstep.errors import (
    CheckpointError,
    DataError,
    IdentityError,
    LossError,
    MachineError,
    MismatchError,
    PeerFailed,
    UsageError,
)
from evenstep.record.events import read_events
from evenstep.train.run import Run
from evenstep.train.state import save_tree
from tests.ranks import RanksFailed, run_ranks
from tests.train.scripts import Convolutions, Pictures, Transformer, classification, fingerprints, training_run

DATA = TensorDataset(torch.arange(40, dtype=torch.float32).reshape(20, 2) / 40, torch.arange(20) % 3)


def loss_fn(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def small(directory: Path, stop: int | None = None, epochs: int = 3, **options: Any) -> Run:
    """Trains on DATA; `stop`: as if the process died after that many steps, in the middle of the next."""
    options = {"global_batch": 6, "checkpoint_every": 2, **options}
    with training_run(directory, **options) as run:
        model = run.prepare(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        steps = run.steps(DATA, epochs=epochs)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        state = run.restore(model=model, optimizer=optimizer, scheduler=scheduler, best=9.0, seen=[])
        for step in steps:
            result = step.backward(loss_fn)
            if stop is not None and step.number == stop:
                run._close(failed=True)
                return run
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state.best = min(state.best, result.loss)
            state.seen = [*state.seen, step.number]
            run.log(loss=result.loss)
        assert state.seen == list(range(len(steps)))
    return run


def end(run: Run) -> str:
    """The fingerprint that the finished run recorded."""
    found: str = json.loads((run.directory / "finished.json").read_text())["fingerprint"]
    return found


# ---- going on


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 7, 11])
def test_a_resumed_run_ends_with_the_same_bits(stop: int, tmp_path: Path) -> None:
    undisturbed = end(small(tmp_path / "whole"))
    small(tmp_path / "cut", stop=stop)
    again = small(tmp_path / "cut")
    assert end(again) == undisturbed
    resumed = [e for e in read_events(tmp_path / "cut/events/rank-0.jsonl") if e["kind"] == "resume"]
    assert [e["step"] for e in resumed] == ([stop - stop % 2] if stop >= 2 else [])
    rows = [json.loads(line) for line in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))


def test_resumes_on_another_number_of_processes(tmp_path: Path) -> None:
    undisturbed = end(small(tmp_path / "whole"))

    def cut() -> None:
        small(tmp_path / "cut", stop=5)

    def go_on() -> str:
        return end(small(tmp_path / "cut"))

    run_ranks(cut, 3)
    assert run_ranks(go_on, 2) == [undisturbed] * 2


def test_survives_kill_9_of_a_process_and_goes_on_on_another_number(tmp_path: Path) -> None:
    undisturbed = end(small(tmp_path / "whole"))

    def killed() -> None:
        run = training_run(tmp_path / "cut", global_batch=6, checkpoint_every=2)
        model = run.prepare(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        steps = run.steps(DATA, epochs=3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        state = run.restore(model=model, optimizer=optimizer, scheduler=scheduler, best=9.0, seen=[])
        for step in steps:
            if step.number == 7 and run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            result = step.backward(loss_fn)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state.best = min(state.best, result.loss)
            state.seen = [*state.seen, step.number]

    with pytest.raises((RanksFailed, PeerFailed)):
        run_ranks(killed, 3)
    assert run_ranks(lambda: end(small(tmp_path / "cut")), 2) == [undisturbed] * 2


def test_a_finished_run_says_so_and_trains_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = end(small(tmp_path / "run"))
    capsys.readouterr()
    again = small(tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == f"fingerprint: {first}\n"
    assert "is finished (12 steps)" in err
    assert end(again) == first
    assert len([e for e in read_events(tmp_path / "run/events/rank-0.jsonl") if e["kind"] == "step"]) == 12


def test_a_finished_run_goes_on_for_more_epochs(tmp_path: Path) -> None:
    whole = end(small(tmp_path / "whole", epochs=4))
    small(tmp_path / "run")
    assert end(small(tmp_path / "run", epochs=4)) == whole


def test_a_run_that_is_beyond_what_was_asked_for_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small(tmp_path / "run", stop=7)
    with pytest.raises(AssertionError):  # of the script: its list of steps is longer than the loop
        small(tmp_path / "run", epochs=1)
    assert "is at step 6, and 4 were asked for: no step is left" in capsys.readouterr().err


def test_what_a_finished_run_left_is_not_replaced_by_less(tmp_path: Path) -> None:
    whole = end(small(tmp_path / "run"))
    shutil.copytree(tmp_path / "run", tmp_path / "bare")
    newest = tmp_path / "run/checkpoints/step-0000000012/tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    again = small(tmp_path / "run")
    assert [e["step"] for e in read_events(tmp_path / "run/events/rank-0.jsonl") if e["kind"] == "resume"] == [10]
    assert end(again) == whole

    shutil.rmtree(tmp_path / "bare/checkpoints")
    with pytest.raises(UsageError, match="is finished and holds no checkpoint"):
        small(tmp_path / "bare")
    assert load_file(tmp_path / "bare/model.safetensors").keys() == load_file(tmp_path / "run/model.safetensors").keys()


@pytest.mark.parametrize("first", ["stream", "map-style"])
def test_a_finished_run_is_not_gone_on_with_over_data_of_the_other_kind(first: str, tmp_path: Path) -> None:
    def train(stream: bool) -> None:
        with training_run(tmp_path / "run", global_batch=6) as run:
            model = run.prepare(nn.Linear(2, 3))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            data = evenstep.stream(lambda lane, lanes, epoch: (DATA[i] for i in range(lane, 20, lanes)))
            steps = run.steps(data if stream else DATA, epochs=1)
            run.restore(model=model, optimizer=optimizer)
            for step in steps:
                step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()

    train(stream=first == "stream")
    with pytest.raises(IdentityError, match="the checkpoint was made with"):
        train(stream=first != "stream")


def test_break_is_safe_and_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def early(directory: Path) -> str:
        with training_run(directory, global_batch=6) as run:
            model = run.prepare(nn.Linear(2, 3))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            steps = run.steps(DATA, epochs=3, loaders=1)
            run.restore(model=model, optimizer=optimizer)
            for step in steps:
                result = step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()
                if result.loss < 100 and step.number == 4:
                    break
        finished = json.loads((directory / "finished.json").read_text())
        assert (finished["step"], finished["left early"]) == (5, True)
        return str(finished["fingerprint"])

    alone = early(tmp_path / "alone")
    assert capsys.readouterr().out.endswith(f"fingerprint: {alone}\n")
    assert early(tmp_path / "alone") == alone, "a run that was left early is finished too"
    assert run_ranks(early, 3, tmp_path / "run") == [alone] * 3


def counting(steps: Any) -> Iterator[Any]:
    """A generator around the steps, as tqdm's."""
    yield from steps


def leave(run: Run, steps: Any, how: str) -> None:
    """Loops until step 4 and leaves the loop there."""
    model = run._models.all[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.restore(model=model, optimizer=optimizer)
    for step in counting(steps) if how.startswith("tqdm") else steps:
        step.backward(loss_fn)
        if step.number == 4:
            if how.endswith("return"):
                return
            if how.endswith("exit"):
                raise SystemExit(1)
            if how.endswith("interrupt"):
                os.kill(os.getpid(), signal.SIGINT)
            if how.endswith("raise"):
                raise ValueError("boom")
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 4 and how.endswith("break"):
            break


@pytest.mark.parametrize(
    "how", ["return", "exit", "interrupt", "raise", "break", "tqdm break", "tqdm raise", "tqdm return"]
)
def test_only_a_loop_that_was_left_on_purpose_is_finished(how: str, tmp_path: Path) -> None:
    def begun() -> tuple[Run, Any]:
        run = training_run(tmp_path / "run", global_batch=6, checkpoint_every=2)
        run.prepare(nn.Linear(2, 3))
        return run, run.steps(DATA, epochs=3)

    run, steps = begun()
    with run:
        try:
            leave(run, steps, how)
        except (ValueError, SystemExit, KeyboardInterrupt):
            assert not how.endswith(("break", "return"))
    if how.endswith(("break", "return")):
        finished = json.loads((tmp_path / "run/finished.json").read_text())
        assert finished["step"] == (5 if how.endswith("break") else 4), "a step without its optimizer's is not done"
        return
    assert not (tmp_path / "run/finished.json").exists()
    run, steps = begun()
    with run:
        leave(run, steps, "to the end")
    with training_run(tmp_path / "whole", global_batch=6) as other:
        other.prepare(nn.Linear(2, 3))
        leave(other, other.steps(DATA, epochs=3), "to the end")
    assert end(run) == end(other)


def test_the_model_file_is_plain(tmp_path: Path) -> None:
    with training_run(tmp_path / "run") as run:
        model = run.prepare(Transformer())
        for step in run.steps([torch.arange(5)] * 16, steps=1, collate=torch.stack):
            step.backward(lambda m, b: (m(b).square().sum(), len(b)))
    fresh = Transformer()
    fresh.load_state_dict(load_file(tmp_path / "run/model.safetensors"), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    assert fresh.head.weight is fresh.embed.weight


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = end(small(tmp_path / "whole"))
    small(tmp_path / "cut", stop=9)
    newest = tmp_path / "cut/checkpoints/step-0000000008/tensors.safetensors"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 4
    newest.write_bytes(data)
    capsys.readouterr()
    assert end(small(tmp_path / "cut")) == undisturbed
    err = capsys.readouterr().err
    assert "step-0000000008 is damaged: tensors.safetensors does not match its checksum" in err
    assert "goes on after step 6" in err


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    small(tmp_path / "cut", stop=3)
    (tmp_path / "cut/checkpoints/step-0000000002/tree.json").unlink()
    with pytest.raises(CheckpointError, match=r"tree\.json is missing"):
        small(tmp_path / "cut")


def test_a_checkpoint_of_another_model_names_the_keys(tmp_path: Path) -> None:
    small(tmp_path / "cut", stop=3)
    with training_run(tmp_path / "cut", global_batch=6) as run:
        model = run.prepare(nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 3, bias=False)))
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        with pytest.raises(CheckpointError, match=r"2\.bias is not in the model\n.*0\.weight has shape \(8, 2\)"):
            run.restore(model=model, optimizer=optimizer, scheduler=scheduler, best=0, seen=[])
    with training_run(tmp_path / "cut", global_batch=6) as run:
        net = run.prepare(nn.Linear(2, 3))
        with pytest.raises(CheckpointError, match="it has no net; it has model, optimizer, scheduler"):
            run.restore(net=net)


def test_another_identity_is_refused_unless_the_user_says_so(tmp_path: Path) -> None:
    small(tmp_path / "run", stop=3)
    with pytest.raises(IdentityError, match="seed: 3 in the run directory, 4 now"):
        small(tmp_path / "run", seed=4)

    def other() -> None:
        small(tmp_path / "run", micro_batch=3)

    with pytest.raises(IdentityError, match="micro_batch: 2 in the run directory, 3 now"):
        run_ranks(other, 2)
    small(tmp_path / "run", seed=4, allow_other_identity=True, stop=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "DATA", TensorDataset(DATA.tensors[0] + 1, DATA.tensors[1]))
        small(tmp_path / "run", seed=4, allow_other_identity=True)


def test_a_changed_data_set_is_refused_at_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path / "run", stop=3)
    changed = TensorDataset(DATA.tensors[0], torch.where(torch.arange(20) % 4 == 0, 2, DATA.tensors[1]))
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "DATA", changed)
        for world_size in (1, 2):
            with pytest.raises(
                IdentityError, match=r"\d of 16 samples that were looked at .*(?s:.*)--allow-other-ident"
            ):
                run_ranks(lambda: small(tmp_path / "run"), world_size)
    with training_run(tmp_path / "run", global_batch=6) as run:
        model = run.prepare(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        run.restore(model=model, optimizer=optimizer, scheduler=scheduler, best=9.0, seen=[])
        with pytest.raises(IdentityError, match="samples: 20; now it is 10"):
            next(iter(run.steps([DATA[i] for i in range(10)], epochs=3)))
        run._close(failed=True)


# ---- a full disk


def test_a_full_disk_is_said_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = save_tree, []

    def full(folder: Path, tree: object) -> None:
        calls.append(folder)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(folder))
        real(folder, tree)

    monkeypatch.setattr("evenstep.train.checkpoint.save_tree", full)
    small(tmp_path / "run")
    err = capsys.readouterr().err
    assert "checkpoint 4 could not be written" in err
    assert "No space left on device" in err
    assert "the checkpoint before it is untouched, and training goes on" in err
    assert end(small(tmp_path / "run")) == end(small(tmp_path / "other"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_at_the_end_is_an_error(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, tree: object) -> None:
        if folder.name.startswith(".step-0000000012"):
            raise OSError(28, "No space left on device", str(folder))
        save_tree(folder, tree)

    monkeypatch.setattr("evenstep.train.checkpoint.save_tree", full)
    with pytest.raises(MachineError, match=r"the last checkpoint could not be written.*No space left on device"):
        run_ranks(lambda: small(tmp_path / "run").close(), world_size)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step-0000000008",
        "step-0000000010",
    ]
    monkeypatch.undo()
    assert end(small(tmp_path / "run")) == end(small(tmp_path / "other"))


def test_a_finished_run_without_restore_is_not_trained_over(tmp_path: Path) -> None:
    def work() -> None:
        with begin(tmp_path) as run:
            run.prepare(nn.Linear(2, 3))
            for step in run.steps(DATA, epochs=1):
                step.backward(loss_fn)

    work()
    before = (tmp_path / "run/model.safetensors").read_bytes()
    with pytest.raises(UsageError, match=r"is finished, and the script does not call run\.restore"):
        work()
    assert (tmp_path / "run/model.safetensors").read_bytes() == before


# ---- logs


def test_logged_values_go_everywhere(tmp_path: Path) -> None:
    heard: list[Any] = []
    with training_run(tmp_path / "run", global_batch=6) as run:
        run.on_log(lambda step, values: heard.append((step, dict(values))))
        model = run.prepare(nn.Linear(2, 3))
        for step in run.steps(DATA, epochs=1):
            result = step.backward(loss_fn)
            model.zero_grad()
            run.log(loss=result.loss, twice=torch.tensor(2.0))
        with pytest.raises(UsageError, match="expected a number"):
            run.log(loss="much")  # type: ignore[arg-type]
    assert [step for step, _ in heard] == [1, 2, 3, 4]
    rows = (tmp_path / "run/metrics.csv").read_text().splitlines()
    assert rows[0] == "step,epoch,loss,twice"
    assert len(rows) == 5
    assert list((tmp_path / "run/tensorboard").iterdir())


def test_a_tracker_hears_again_what_was_logged_before_the_resume(tmp_path: Path) -> None:
    def train(stop: int | None = None) -> list[tuple[int, float]]:
        heard: list[tuple[int, float]] = []
        with training_run(tmp_path / "run", global_batch=6, checkpoint_every=2) as run:
            model = run.prepare(nn.Linear(2, 3))
            steps = run.steps(DATA, epochs=2)
            with pytest.raises(UsageError, match=r"before run\.restore"):
                run.on_log(print, replay=True)
            run.restore(model=model)
            run.on_log(lambda step, values: heard.append((step, values["loss"])), replay=True)
            for step in steps:
                result = step.backward(loss_fn)
                model.zero_grad()
                run.log(loss=result.loss)
                if step.number == stop:
                    raise RuntimeError("stop")
        return heard

    with pytest.raises(RuntimeError, match="stop"):
        train(stop=4)
    heard = train()
    assert [step for step, _ in heard] == list(range(1, 9))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert heard == [(row["step"], row["values"]["loss"]) for row in rows]


# ---- what is refused, before any step


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def begin(tmp_path: Path, **options: Any) -> Run:
    return training_run(tmp_path / "run", **{"global_batch": 6, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 2, "micro_batch": 4}, r"global_batch=2 is smaller than micro_batch=4(.|\n)*--global-batch"),
        ({"global_batch": 0}, "global_batch=0, expected a whole number"),
        ({"micro_batch": 1.5}, r"micro_batch=1\.5"),
        ({"seed": -1}, "seed=-1"),
        ({"backend": "smoke"}, "backend 'smoke' is unknown"),
        ({"backend": "nccl"}, "has no nccl backend|needs GPUs"),
        ({"backend": "mpi"}, "has no mpi backend(.|\n)*--backend gloo"),
        ({"keep": 0}, "keep=0"),
        ({"global_batch": np.float64(6)}, r"global_batch=np.float64\(6.0\), expected a whole number"),
        ({"keep": np.bool_(True)}, r"keep=np.True_"),
        ({"keep": torch.tensor(True)}, r"keep=tensor\(True\)"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        begin(tmp_path, **options)


def test_whole_numbers_may_be_of_any_make(tmp_path: Path) -> None:
    def train(n: Callable[[int], Any], place: str) -> list[str]:
        names = ("seed", "threads", "keep", "stages", "replicas", "thread_replicas", "split", "checkpoint_every")
        options = {"global_batch": n(6), "micro_batch": n(2), **{name: n(1) for name in names}, "replicas": None}
        with training_run(tmp_path / place, **options) as run:
            model = run.prepare(nn.Linear(2, 3))
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            steps = run.steps(DATA, steps=n(2), weights=[1.0] * 20, num_samples=n(8), loaders=n(0))
            run.restore(model=model, optimizer=optimizer)
            for step in steps:
                step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()
            assert run.broadcast(1, source=n(0)) == 1
            assert run.gather(1, to=n(0)) == [1]
            part = evenstep.stream(lambda lane, lanes, epoch: [DATA[lane]], block=n(4))
            assert run.evaluate(part, loss_fn, loaders=n(0)) > 0
        return fingerprints(run)

    assert train(np.int64, "numpy") == train(torch.tensor, "torch") == train(int, "python")


def test_more_processes_than_micro_batches(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"3 processes for 2 micro-batches(.|\n)*--processes"):
        run_ranks(lambda: begin(tmp_path, global_batch=8, micro_batch=4).close(), 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((x for x in range(3)), "has no length"),
        ([], "is empty"),
        (Stream(), "IterableDataset"),
        ((torch.zeros(4), torch.zeros(4)), r"TensorDataset"),
        ([1], "micro_batch=2 is larger than an epoch"),
    ],
)
def test_data_that_cannot_be_read(tmp_path: Path, data: Any, message: str) -> None:
    with begin(tmp_path) as run, pytest.raises(UsageError, match=message):
        run.steps(data, epochs=1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b[0]), r"a tensor of shape \(2, 3\) alone; expected \(sum over samples, weight\)"),
        (lambda m, b: F.cross_entropy(m(b[0]), b[1]), r"return loss \* n, n"),
        (lambda m, b: (m(b[0]), len(b[1])), r"a sum of shape \(2, 3\)"),
        (lambda m, b: (m(b[0]).sum(), float("nan")), "the weight nan"),
        (lambda m, b: (m(b[0]).sum(), -1), r"the weight -1\.0"),
        (lambda m, b: (m(b[0]).sum(), 0), "the total weight of step 0 is zero"),
        (lambda m, b: (m(b[0]).sum().item(), 1), "expected a tensor"),
        (lambda m, b: (m(b[0]).square().mean(), len(b[1])), "not additive over samples"),
        (lambda m, b: (m(b[0]).sum(), 1), "the weight is not additive"),
        (lambda m, b: (m(b[0]).square().sum() + 5.0, len(b[1])), "not additive over samples"),
    ],
)
def test_losses_that_are_refused(tmp_path: Path, loss: Callable[..., Any], message: str) -> None:
    def work(directory: Path) -> None:
        with training_run(directory, global_batch=6) as run:
            model = run.prepare(nn.Linear(2, 3))
            for step in run.steps(DATA, epochs=1):
                with pytest.raises((LossError, PeerFailed), match=message):
                    step.backward(loss)
                assert all(p.grad is None for p in model.parameters())
                break

    work(tmp_path / "alone")
    run_ranks(work, 2, tmp_path / "run")


def test_a_tensor_is_answered_with_the_function_form(tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        model = run.prepare(nn.Linear(2, 3))
        for step in run.steps(DATA, epochs=1):
            with pytest.raises(LossError, match=r"def loss_fn\(model, batch\)"):
                step.backward(model(torch.ones(2, 2)).sum())
            break


def test_losses_that_draw_random_numbers_are_additive_in_the_mean(tmp_path: Path) -> None:
    def noisy(model: nn.Module, batch: Any) -> Any:
        noise = torch.rand(len(batch[0]), 3)
        return (model(batch[0] + torch.randn_like(batch[0])) - noise).square().sum(), len(batch[0])

    def noisy_mean(model: nn.Module, batch: Any) -> Any:
        return (model(batch[0] + 0.01 * torch.randn_like(batch[0])) - 1).square().mean() + 1, len(batch[0])

    with begin(tmp_path) as run:
        run.prepare(nn.Linear(2, 3))
        for step in run.steps(DATA, epochs=1):
            step.backward(noisy)
            break
    with training_run(tmp_path / "other", global_batch=6) as run:
        run.prepare(nn.Linear(2, 3))
        for step in run.steps(DATA, epochs=1):
            with pytest.raises(LossError, match="not additive"):
                step.backward(noisy_mean)
            break


def test_a_loss_that_needs_gradients_or_training_mode_is_fine(tmp_path: Path) -> None:
    def penalised(model: nn.Module, batch: Any) -> Any:
        x = batch[0].clone().requires_grad_()
        assert model.training
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum() + model(x).square().sum(), len(x)

    with begin(tmp_path) as run:
        run.prepare(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
        for step in run.steps(DATA, steps=1):
            step.backward(penalised)


def test_operations_without_a_deterministic_form_are_named(tmp_path: Path) -> None:
    def unpools(model: nn.Module, batch: Any) -> Any:
        x = model(batch[0])[:, None]
        pooled, indices = F.max_pool1d(x, 3, return_indices=True)
        return F.max_unpool1d(pooled, indices, [3]).sum(), len(x)

    with begin(tmp_path) as run:
        run.prepare(nn.Linear(2, 3))
        for step in run.steps(DATA, epochs=1):
            with pytest.raises(UsageError, match=r"max_unpool(.|\n)*test_run\.py(.|\n)*--no-exact"):
                step.backward(unpools)
            break


def test_reentrant_checkpointing_is_refused(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    def twice(model: nn.Module, batch: Any) -> Any:
        x = batch[0].requires_grad_()
        return sum(checkpoint(model, x, use_reentrant=True).sum() for _ in range(2)), len(x)

    with begin(tmp_path) as run:
        run.prepare(nn.Linear(2, 3))
        for step in run.steps(DATA, epochs=1):
            with pytest.raises(LossError, match="use_reentrant=False"):
                step.backward(twice)
            break


def test_an_item_that_raises_names_the_sample(tmp_path: Path) -> None:
    class Broken(Pictures):
        def __getitem__(self, index: int) -> Any:
            if index == 11:
                raise OSError("cannot open image 11")
            return super().__getitem__(index)

    def work(loaders: int) -> None:
        with training_run(tmp_path / f"run{loaders}") as run:
            model = run.prepare(Convolutions())
            for step in run.steps(Broken(), epochs=1, loaders=loaders):
                step.backward(classification)
                model.zero_grad()

    for loaders in (0, 1):
        with pytest.raises((DataError, PeerFailed), match=r"sample 11(.|\n)*cannot open image 11"):
            run_ranks(work, 2, loaders)


def test_parameters_that_differ_between_processes(tmp_path: Path) -> None:
    def work() -> None:
        run = begin(tmp_path)
        torch.manual_seed(run.rank)
        run.prepare(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)))

    with pytest.raises(UsageError, match=r"1\.weight of Sequential is not the same on every process(.|\n)*rank 0"):
        run_ranks(work, 2)


def test_processes_that_freeze_different_parameters(tmp_path: Path) -> None:
    def work() -> None:
        run = begin(tmp_path)
        model = run.prepare(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)))
        model[run.rank].requires_grad_(False)
        for step in run.steps(DATA, epochs=1):
            step.backward(loss_fn)

    with pytest.raises(UsageError, match="requires_grad is not the same everywhere"):
        run_ranks(work, 2)


def test_processes_with_different_data(tmp_path: Path) -> None:
    def work(differ: str) -> None:
        run = begin(tmp_path)
        run.prepare(nn.Linear(2, 3))
        data = [DATA[i] for i in range(20 - run.rank)] if differ == "length" else DATA
        order = None if differ == "length" else list(range(run.rank, 20)) + list(range(run.rank))
        for step in run.steps(data, epochs=1, order=order):
            step.backward(loss_fn)

    for differ in ("length", "order"):
        with pytest.raises(UsageError, match="differs between processes"):
            run_ranks(work, 2, differ)


def test_what_restore_refuses(tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        model = run.prepare(nn.Linear(2, 3))
        other = nn.Linear(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(UsageError, match=r"Linear, number 0.* was not given"):
            run.restore(optimizer=optimizer)
        with pytest.raises(UsageError, match="other was not prepared"):
            run.restore(model=model, other=other, optimizer=torch.optim.SGD(other.parameters(), 0.1))
        with pytest.raises(UsageError, match="updates 2 parameters that belong to no prepared model"):
            run.restore(model=model, optimizer=torch.optim.SGD(other.parameters(), 0.1))
        with pytest.raises(UsageError, match="function, which cannot be saved"):
            run.restore(model=model, fn=lambda: 1)


@pytest.mark.parametrize("kind", ["StepLR", "ReduceLROnPlateau", "SequentialLR"])
def test_a_scheduler_that_is_left_out(tmp_path: Path, kind: str) -> None:
    with begin(tmp_path) as run:
        model = run.prepare(nn.Linear(2, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedulers = torch.optim.lr_scheduler
        scheduler: Any
        if kind == "StepLR":
            scheduler = schedulers.StepLR(optimizer, 2)
        elif kind == "ReduceLROnPlateau":
            scheduler = schedulers.ReduceLROnPlateau(optimizer)
        else:
            parts = [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
            scheduler = schedulers.SequentialLR(optimizer, parts, [2])
        with pytest.raises(UsageError, match=r"is driven by a \w+ that restore was not given"):
            run.restore(model=model, optimizer=optimizer)
        run.restore(model=model, optimizer=optimizer, scheduler=scheduler)


@pytest.mark.parametrize("change", ["shuffle", "scheduler", "order"])
def test_what_would_change_a_resume_silently(change: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kept: list[Any] = []

    def work(stop: int | None, **how: Any) -> None:
        with begin(tmp_path, checkpoint_every=1) as run:
            model = run.prepare(nn.Linear(2, 3))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            steps = run.steps(DATA, epochs=2, **how)
            run.restore(model=model, optimizer=optimizer)
            if change == "scheduler":
                kept.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(steps)))
            for step in steps:
                step.backward(loss_fn)
                optimizer.step()
                optimizer.zero_grad()
                if step.number == stop:
                    raise KeyboardInterrupt

    if change == "scheduler":
        with pytest.raises(UsageError, match="is driven by a OneCycleLR that restore was not given"):
            work(None)
    elif change == "order":
        with pytest.raises(UsageError, match="two different orders for epoch 0"):
            work(None, order=lambda epoch: rng.permutation(20))
    else:
        with pytest.raises(KeyboardInterrupt):
            work(2)
        with pytest.raises(IdentityError, match="made with order: shuffled; now it is not shuffled"):
            work(None, shuffle=False)


def test_what_trains_or_saves_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(what: str) -> str:
        with training_run(tmp_path / what, global_batch=60 if what == "all" else 6) as run:
            model = run.prepare(nn.Linear(2, 3))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            steps = run.steps(DATA, epochs=2)
            if what != "unsaved":
                run.restore(model=model, optimizer=optimizer)
            for step in steps:
                if what != "idle":
                    step.backward(loss_fn)
                if what not in ("idle", "unstepped"):
                    optimizer.step()
                if what in ("all", "zeros"):
                    optimizer.zero_grad(set_to_none=what == "all")
        return capsys.readouterr().err

    everything = said("all")
    assert "the global batch of 60 is more than an epoch has" in everything
    for words in ("nothing is saved", "trained nothing"):
        assert words not in everything
    adds = "the second step adds to the gradients of the first, which an optimizer has used already (weight)"
    assert said("unzeroed").count(adds) == 1
    unstepped = said("unstepped")
    for text in (everything, said("zeros"), unstepped):
        assert adds not in text
    assert "does not call run.restore" in said("unsaved")
    assert "step 0 ended without step.backward: it has trained nothing" in said("idle")
    assert "step 0 ended without an optimizer's step: it has trained nothing" in unstepped


def test_order_of_calls(tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        with pytest.raises(UsageError, match="no model was prepared"):
            next(iter(run.steps(DATA, epochs=1)))
        with pytest.raises(UsageError, match=r"run\.steps was called twice"):
            run.steps(DATA, epochs=1)
        with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module"):
            run.prepare(torch.optim.SGD([torch.zeros(1)], 0.1))  # type: ignore[call-overload]
    small(tmp_path / "saved", stop=3)
    with training_run(tmp_path / "saved", global_batch=6) as run:
        run.prepare(nn.Linear(2, 3))
        with pytest.raises(UsageError, match=r"does not call run\.restore"):
            next(iter(run.steps(DATA, epochs=1)))
    with training_run(tmp_path / "third", checkpoint_every=1) as run:
        run.prepare(nn.Linear(2, 3))
        with pytest.raises(UsageError, match=r"checkpoints were asked for"):
            next(iter(run.steps(DATA, epochs=1)))


# ---- processes at different calls


def test_a_reduce_that_only_one_rank_calls_ends_with_both_lines(tmp_path: Path) -> None:
    def work(where: str) -> str:
        run = begin(tmp_path)
        model = run.prepare(nn.Linear(2, 3))
        try:
            for step in run.steps(DATA, epochs=1):
                result = step.backward(loss_fn)
                model.zero_grad()
                if run.rank == 0 and (where == "loop" or step.ends_epoch):
                    run.reduce(result.loss)
            run.close()
        except MismatchError as error:
            return str(error)
        return "nothing"

    for where in ("loop", "end"):
        first, second, third = run_ranks(work, 3, where)
        assert first == second == third
        assert "rank 0: reduce (test_run.py:" in first
        others = "the end of step 0" if where == "loop" else "the end of step 3"
        assert f"ranks 1, 2: {others}" in first
        assert "if rank == 0" in first


def test_start_alone_twice_ends_the_first(tmp_path: Path) -> None:
    first = evenstep.start(global_batch=4, run=tmp_path / "a")
    second = evenstep.start(global_batch=4, run=tmp_path / "b")
    assert first._closed
    second.close()


def test_fingerprints_every_step_or_only_at_checkpoints(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    assert len(set(fingerprints(run))) == 12
    small(tmp_path / "few", fingerprints=False)
    events = read_events(tmp_path / "few/events/rank-0.jsonl")
    assert not any("fingerprint" in e for e in events if e["kind"] == "step")
    found = [e["fingerprint"] for e in events if e["kind"] == "checkpoint"]
    assert found == fingerprints(run)[1::2]
