"""micro_batch="auto": the largest micro-batch that fits, and nothing of how it was found is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.environment import Settings
from evenstep.errors import IdentityError, UsageError
from evenstep.record.events import read_events
from evenstep.record.identity import read_identity
from evenstep.train.auto import Choice, Need, Search, _peak_of, size_text
from evenstep.train.meeting import Meeting
from evenstep.train.options import Options, choose
from tests.ranks import run_ranks
from tests.train.scripts import fingerprints

WIDTH = 4096  # of the activations: 16 KiB each, of a model with few parameters
BATCH = 24


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        wide = x.repeat(1, WIDTH // 6).sigmoid().square()
        result: Tensor = self.last(F.dropout(wide, 0.1, self.training).unflatten(1, (6, -1)).mean(2))
        return result


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(8)
    return TensorDataset(torch.randn(60, 6, generator=generator), torch.randint(0, 3, (60,), generator=generator))


def loss_fn(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def train(directory: Path, loaders: int = 0, steps: int = 4, loss: Any = loss_fn, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"micro_batch": "auto", "memory": "400KiB", "seed": 3, "fingerprints": True, **options}
    with evenstep.start(run=directory, global_batch=BATCH, **given) as run:
        model = run.prepare(Wide())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loop = run.steps(samples(), steps=steps, loaders=loaders)
        assert len(loop) == steps
        run.restore(model=model, optimizer=optimizer)
        drawn = []
        for step in loop:
            step.backward(loss)
            drawn.append(torch.rand(()).item())
            optimizer.step()
            optimizer.zero_grad()
    identity = read_identity(directory / "identity.json")
    assert identity is not None
    return {"size": identity["micro_batch"], "fingerprints": fingerprints(run), "drawn": drawn}


def test_the_choice_is_the_same_on_every_layout_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = train(tmp_path / "alone")
    assert alone["size"] in (2, 3, 4, 6, 8)
    said = capsys.readouterr().err
    assert "the micro-batch is chosen at the first step.backward, by trial" in said
    assert f"micro-batch {alone['size']}, the largest that fits: a trial took " in said
    assert "of 400 KiB" in said
    assert f"global batch 24: {24 // alone['size']} micro-batches of {alone['size']}" in said
    given = train(tmp_path / "given", micro_batch=alone["size"])
    assert given == alone, "as if the number had been given"
    for world_size, loaders in ((2, 0), (3, 2)):
        assert run_ranks(train, world_size, tmp_path / f"run{world_size}", loaders) == [alone] * world_size


def test_more_memory_gives_more_samples_up_to_one_micro_batch_a_process(tmp_path: Path) -> None:
    sizes = [train(tmp_path / text, memory=text, steps=1)["size"] for text in ("200KiB", "400KiB", "1MiB", "1GiB")]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == BATCH
    assert {found["size"] for found in run_ranks(lambda: train(tmp_path / "3", memory="1GiB", steps=1), 3)} == {8}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_real_step_stays_below_the_limit(world_size: int, tmp_path: Path) -> None:
    limit = 3 * 2**20

    def script() -> tuple[int, int]:
        with evenstep.start(run=tmp_path, global_batch=64, micro_batch="auto", memory=limit) as run:
            model = run.prepare(nn.Sequential(nn.Linear(64, 256), *[nn.Tanh() for _ in range(80)], nn.Linear(256, 64)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

            def whole_step() -> None:
                step.backward(lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])))
                optimizer.step()

            peaks = []
            for step in run.steps(TensorDataset(torch.rand(128, 64)), steps=3):
                if step.number == 0:
                    whole_step()
                else:
                    peaks.append(_peak_of(whole_step))
                optimizer.zero_grad()
            held = 3 * sum(p.numel() * p.element_size() for p in model.parameters())  # with Adam's two
            (size,) = {
                event["size"]
                for event in read_events(run.directory / "events" / f"rank-{run.rank}.jsonl")
                if event["kind"] == "micro-batch"
            }
            return size, max(peaks) + held

    for size, most in run_ranks(script, world_size):
        assert 1 < size < 32
        assert 0.4 * limit < most < limit


def test_the_smallest_of_what_processes_found_is_taken(tmp_path: Path) -> None:
    def one_has_less() -> Any:
        return train(tmp_path / "run", memory="1GiB" if os.environ["RANK"] == "0" else "400KiB", steps=2)

    alone = train(tmp_path / "alone", steps=2)
    assert run_ranks(one_has_less, 2) == [alone, alone]


def test_a_resume_takes_the_recorded_number(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")

    def watched(model: nn.Module, batch: Any) -> Any:
        """Sees no trial."""
        assert len(batch[0]) in (alone["size"], BATCH % alone["size"], alone["size"] // 2)
        return loss_fn(model, batch)

    alone = train(tmp_path / "run", steps=2)
    (tmp_path / "run" / "finished.json").unlink()
    for rest in run_ranks(lambda: train(tmp_path / "run", loss=watched, memory=None, shard=True), 2):
        assert rest["size"] == alone["size"] == whole["size"]
        assert rest["fingerprints"][-2:] == whole["fingerprints"][-2:]
    with pytest.raises(IdentityError, match="micro_batch: "):
        train(tmp_path / "run", micro_batch=alone["size"] * 2)


def test_too_little_memory_for_one_sample_is_said_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a micro-batch of 2 does not fit on rank 0: a trial took [\d.]+ KiB.*30 KiB"):
        train(tmp_path / "alone", memory=30 * 1024)

    def one_has_none() -> str:
        try:
            train(tmp_path / "run", memory="1GiB" if os.environ["RANK"] == "0" else "30KiB")
        except UsageError as error:
            return str(error)
        return ""

    first, second = run_ranks(one_has_none, 2)
    assert first == second
    assert "does not fit on rank 1" in first


def test_a_failing_loss_is_told_to_all(tmp_path: Path) -> None:
    def failing() -> str:
        def loss(model: nn.Module, batch: Any) -> Any:
            if os.environ["RANK"] == "1":
                raise ValueError("not here")
            return loss_fn(model, batch)

        try:
            train(tmp_path / "run", loss=loss)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run_ranks(failing, 2)
    assert second == "ValueError: not here"
    assert first.startswith("PeerFailed: rank 1 failed while it tried micro-batches: ValueError: not here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": None}, r"on the CPU, and no limit.*\n.*--memory 2GiB"),
        ({"shard": True}, "not offered with --shard"),
        ({"batchnorm": "sync"}, "not offered with --batchnorm sync"),
        ({"memory": "a lot"}, "memory='a lot' is no amount of memory"),
        ({"micro_batch": "all"}, "micro_batch='all', expected a whole number"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        train(tmp_path, **options)


def test_what_needs_the_micro_batch_before_it_is_chosen_is_refused(tmp_path: Path) -> None:
    with evenstep.start(run=tmp_path, global_batch=BATCH, micro_batch="auto", memory="1GiB") as run:
        run.prepare(Wide())
        for step in run.steps(samples(), steps=1):
            with pytest.raises(UsageError, match=r"an evaluation before the first step\.backward"):
                run.evaluate(samples(), loss_fn)
            with pytest.raises(UsageError, match=r"step\.total was called before the first"):
                step.total(lambda batch: 1)
            step.backward(loss_fn)
            assert step.total(lambda batch: len(batch[0])) == BATCH
            assert run.evaluate(samples(), loss_fn) > 0
    with evenstep.start(run=tmp_path / "other", global_batch=BATCH, micro_batch="auto", memory="1GiB") as run:
        run.prepare(Wide())
        loop = iter(run.steps(samples(), steps=2))
        next(loop)
        with pytest.raises(UsageError, match=r"step 0 ended before the first step\.backward"):
            next(loop)


def test_a_loss_of_the_whole_batch_is_tried_by_its_embeddings(tmp_path: Path) -> None:
    with evenstep.start(run=tmp_path, global_batch=BATCH, micro_batch="auto", memory="400KiB") as run:
        model = run.prepare(Wide())
        for step in run.steps(samples(), steps=1):
            step.backward_whole(lambda model, batch: model(batch[0]), lambda model, e: (e @ e.T).logsumexp(1).mean())
            assert model.first.weight.grad is not None
    assert 1 < (read_identity(tmp_path / "identity.json") or {})["micro_batch"] < BATCH  # type: ignore[operator]


def test_the_peak_is_what_was_allocated_at_one_time() -> None:
    def work() -> None:
        for _ in range(3):
            one = torch.empty(1000)
            other = torch.empty(500)
            del one, other

    assert _peak_of(work) == 6000
    assert "KINETO_LOG_LEVEL" not in os.environ


def test_on_a_gpu_what_torch_counts_and_running_out_of_memory_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for torch's counters: this machine may have no GPU."""
    gpu, tried = torch.device("cuda", 0), []

    def passes(size: int) -> None:
        tried.append(size)
        if size > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for name, value in {
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "mem_get_info": (900, 5000),
        "memory_reserved": 100,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 70 * tried[-1])
    options = choose(Settings(), Options(24, "auto", 0, True, "gloo", 1, "cuda", None, None, 1, False, False), 1)
    search = Search(passes, [], [], lambda size: 24 // size, options, gpu)
    search._gpus = [gpu]
    choice = search.choose([1, 2, 3, 4, 6, 8, 12, 24], Meeting(0, 1), "")
    assert choice == Choice(12, Need(12, 840, 0, 1000), largest=False)
    assert tried == [1, 2, 4, 8, 12, 24]
    assert search._needs[24] == Need(24, 1680, 0, 1000)


def test_more_sums_of_gradients_may_leave_less_room_for_a_smaller_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with many parameters, the sums of 16 micro-batches take more than a micro-batch of 4 samples."""
    monkeypatch.setattr("evenstep.train.auto._peak_of", lambda work: 300 * work())
    parameters = [nn.Parameter(torch.empty(250))]  # 1000 bytes

    def choice(memory: int) -> Choice:
        options = choose(
            Settings(), Options(16, "auto", 0, True, "gloo", 1, "cpu", None, None, 1, False, False, memory=memory), 1
        )
        search = Search(lambda size: size, parameters, [], lambda size: -(-16 // size), options, torch.device("cpu"))  # type: ignore[arg-type]
        return search.choose([1, 2, 4, 8, 16], Meeting(0, 1), "")

    # 1000, 300 a sample, and 4000 with 1000 more for each doubling of the micro-batches: of 4 samples it is least. A
    # tenth is spare.
    assert choice(11000).size == 16
    assert choice(10000).need == Need(8, 3400, 5000, 10000)
    assert choice(9223).need == Need(4, 2200, 6000, 9223)
    with pytest.raises(UsageError, match=r"a micro-batch of 4 does not fit on rank 0: a trial took 2\.15 KiB"):
        choice(9000)


def test_sizes_are_said_for_people() -> None:
    assert [size_text(n) for n in (3, 2048, 1.5 * 2**20, 80 * 2**30)] == ["3 bytes", "2 KiB", "1.5 MiB", "80 GiB"]
