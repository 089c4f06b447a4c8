"""Reading data: the same bits for any share and any number of loader processes, and errors that name the sample."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from evenstep.errors import DataError, UsageError
from evenstep.plan.grid import Grid
from evenstep.plan.order import Fixed, Natural, Shuffled
from evenstep.plan.schedule import Schedule
from evenstep.train.batch import split_batch, tensors, to_device
from evenstep.train.data.dataset import checked_dataset
from evenstep.train.data.orders import choose_order
from evenstep.train.data.probing import probe
from evenstep.train.data.reading import Reader, shares
from evenstep.train.data.samples import MicroBatch
from evenstep.train.randomness import kept_generators, seed_generators
from tests.ranks import run_ranks


class Drawing(Dataset[Any]):
    """Each sample: its index and a draw from each generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(3), random.random(), np.random.rand(2)


class DrawingMany(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        noise = torch.rand(len(indices))
        return [(index, noise[j]) for j, index in enumerate(indices)]


def mixing(samples: list[Any]) -> Any:
    images = torch.stack([s[1] for s in samples])
    return {"index": torch.tensor([s[0] for s in samples]), "mixed": images * torch.rand(()) + random.random()}


def read(data: Any, schedule: Schedule, world_size: int = 1, loaders: int = 0, first_step: int = 0, **kw: Any) -> Any:
    """{(step, micro-batch): batch} as all ranks read it, and how many times each was read."""
    order = kw.pop("order", None) or Shuffled(schedule.samples, 7)
    found = {}
    for rank in range(world_size):
        with Reader(
            data, order, shares(schedule, Grid(world_size), rank, first_step), seed=7, rank=rank, loaders=loaders, **kw
        ) as reader:
            for micro_batch, batch in reader:
                assert (micro_batch.step, micro_batch.index) not in found
                found[micro_batch.step, micro_batch.index] = batch
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("data", [Drawing(37), DrawingMany(37), Subset(Drawing(50), range(5, 42))])
@pytest.mark.parametrize("collate", [None, mixing])
def test_the_same_bits_for_any_share_and_any_number_of_loader_processes(data: Any, collate: Any) -> None:
    schedule = Schedule(37, global_batch=12, micro_batch=5, epochs=2)
    alone = read(data, schedule, collate=collate)
    assert len(alone) == 2 * (3 * 3 + 1)
    for world_size, loaders in [(1, 1), (1, 2), (2, 0), (3, 2)]:
        other = read(data, schedule, world_size, loaders, collate=collate)
        assert other.keys() == alone.keys()
        assert all(same(alone[k], other[k]) for k in alone)


@settings(max_examples=60)
@given(st.data())
def test_each_sample_once_an_epoch_in_the_same_order_on_every_layout(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 120))
    micro = data.draw(st.integers(1, samples))
    schedule = Schedule(samples, data.draw(st.integers(micro, 3 * samples + 3)), micro, epochs=2)
    world_size = data.draw(st.integers(1, 9))
    order = Shuffled(samples, data.draw(st.integers(0, 9)))
    first = data.draw(st.integers(0, len(schedule)))
    alone = read(list(range(samples)), schedule, order=order)
    spread = read(list(range(samples)), schedule, world_size, order=order)
    assert {k: v.tolist() for k, v in spread.items()} == {k: v.tolist() for k, v in alone.items()}
    for epoch in range(2):
        steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
        visited = [i for k in sorted(alone) if k[0] in steps for i in alone[k].tolist()]
        assert sorted(visited) == list(range(samples))
    rest = read(list(range(samples)), schedule, world_size, order=order, first_step=first)
    assert {k: v.tolist() for k, v in rest.items()} == {k: v.tolist() for k, v in alone.items() if k[0] >= first}


@settings(max_examples=6)
@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 20), st.integers(1, 4), st.integers(1, 3))
def test_loader_processes_read_what_none_reads(samples: int, micro: int, more: int, world: int, loaders: int) -> None:
    schedule = Schedule(samples, min(micro, samples) + more, min(micro, samples), epochs=2)
    alone = read(Drawing(samples), schedule)
    spread = read(Drawing(samples), schedule, world, loaders)
    assert spread.keys() == alone.keys()
    assert all(same(alone[k], spread[k]) for k in alone)


def test_a_window_of_indices_does_not_show() -> None:
    schedule = Schedule(5000, 700, 350, epochs=2)
    order = Shuffled(5000, 1)
    found = read(list(range(5000)), schedule, 2, order=order)
    for number in range(len(schedule)):
        step = schedule.step(number)
        got = [i for m in range(step.micro_batches) for i in found[number, m].tolist()]
        assert got == order.indices(step.epoch, step.start, step.stop).tolist()


def test_a_repeated_index_is_drawn_anew_at_each_position() -> None:
    found = read(Drawing(4), Schedule(6, 6, 6, epochs=1), order=Fixed(np.array([2, 2, 2, 0, 0, 2])))
    index, noise, *_ = found[0, 0]
    assert index.tolist() == [2, 2, 2, 0, 0, 2]
    assert len({tuple(row.tolist()) for row in noise}) == 6


@pytest.mark.parametrize("loaders", [0, 2])
def test_the_users_generators_do_not_see_the_reading(loaders: int) -> None:
    with kept_generators():
        seed_generators(3)
        expected = torch.rand(()).item(), random.random(), np.random.rand()
        seed_generators(3)
        read(Drawing(9), Schedule(9, 4, 2, epochs=1), loaders=loaders, collate=mixing)
        assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected


def test_columns_of_tensors_give_what_collating_their_rows_gives() -> None:
    data = TensorDataset(torch.randn(20, 3, 2), torch.arange(20), torch.randn(20).bfloat16())

    class Rows(TensorDataset):
        pass

    schedule = Schedule(20, 8, 3, epochs=1)
    fast, slow = read(data, schedule), read(Rows(*data.tensors), schedule)
    assert all(same(fast[k], slow[k]) and type(fast[k]) is type(slow[k]) for k in slow)


def test_reading_ends_with_stop_iteration_and_leaves_no_process() -> None:
    with Reader(Drawing(4), Natural(4), shares(Schedule(4, 2, 2, epochs=1), Grid(1), 0), seed=0, loaders=2) as reader:
        assert len(list(reader)) == 2
        assert multiprocessing.active_children() == []
        assert list(reader) == []


def test_closing_early_joins_the_loader_processes() -> None:
    reader = Reader(Drawing(400), Natural(400), shares(Schedule(400, 2, 2, epochs=9), Grid(1), 0), seed=0, loaders=2)
    next(reader)
    assert len(multiprocessing.active_children()) == 2
    reader.close()
    assert multiprocessing.active_children() == []
    reader.close()
    assert list(reader) == []


def test_a_forgotten_reader_takes_its_processes_along() -> None:
    reader = Reader(Drawing(400), Natural(400), shares(Schedule(400, 2, 2, epochs=9), Grid(1), 0), seed=0, loaders=2)
    next(reader)
    del reader
    assert multiprocessing.active_children() == []


class Stuck(Drawing):
    """Never gets past sample 3."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            threading.Event().wait()
        return index


def test_closing_does_not_wait_for_ever_for_a_sample_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    reader = Reader(
        Stuck(9), Natural(9), shares(Schedule(9, 1, 1, epochs=1), Grid(1), 0), seed=0, loaders=1, prefetch=4
    )
    next(reader)
    reader.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("pin", [False, True])
def test_a_loader_process_that_gets_no_further_is_named_and_given_up(
    pin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"_LOOK": 0.05, "_SAY": 0.1, "_GIVE_UP": 0.5}.items():
        monkeypatch.setattr(f"evenstep.train.data.loading.{name}", seconds)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # a stuck one ends by SIGTERM, then
    if pin:
        pinning_without_a_gpu(monkeypatch)
    said: list[str] = []
    micro_batches = shares(Schedule(9, 2, 2, epochs=1), Grid(1), 0)
    with Reader(
        Stuck(9), Natural(9), micro_batches, seed=0, rank=2, loaders=2, say=said.append, pin=pin, collate=list
    ) as reader:
        next(reader)
        message = (
            r"loader process 1 \(pid \d+\) has come no further for \d+ s on rank 2, "
            r"while it read sample 3 \(position 3 of epoch 0\)(?s:.*)look at this sample"
        )
        with pytest.raises(DataError, match=message):
            list(reader)
    stuck = [line for line in said if line.endswith("while it read sample 3 (position 3 of epoch 0)")]
    assert 1 <= len(stuck) <= 3  # after 0.1, 0.2 and 0.4 s
    assert all(line.startswith("rank 2 has waited 0 s for loader process 1 (pid") for line in stuck)
    assert multiprocessing.active_children() == []


def test_a_loader_process_that_is_stopped_after_it_has_read_is_named_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared memory is fetched from it, which has no time-out."""
    for name, seconds in {"_LOOK": 0.05, "_SAY": 0.1, "_GIVE_UP": 0.5}.items():
        monkeypatch.setattr(f"evenstep.train.data.loading.{name}", seconds)
    said: list[str] = []
    micro_batches = shares(Schedule(9, 1, 1, epochs=1), Grid(1), 0)
    with Reader(Drawing(9), Natural(9), micro_batches, seed=0, loaders=1, say=said.append) as reader:
        next(reader)
        assert reader._loading is not None
        assert multiprocessing.connection.wait([reader._loading._iterator._data_queue._reader], 30)
        os.kill(reader._loading._processes[0].pid, signal.SIGSTOP)
        message = r"loader process 0 \(pid \d+\) has come no further for \d+ s on rank 0, while it (handed|was to|read)"
        with pytest.raises(DataError, match=message):
            list(reader)
    assert 1 <= len(said) <= 3
    assert multiprocessing.active_children() == []


def test_a_slow_loader_process_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, seconds in {"_LOOK": 0.05, "_SAY": 0.1, "_GIVE_UP": 60.0}.items():
        monkeypatch.setattr(f"evenstep.train.data.loading.{name}", seconds)
    os.mkfifo(tmp_path / "fifo")

    class Slow(Drawing):
        def __getitem__(self, index: int) -> Any:
            return index if index != 3 else (tmp_path / "fifo").read_bytes()[0]

    def say(line: str) -> None:
        if "while it read sample 3" in line and not said:
            (tmp_path / "fifo").write_bytes(b"\x07")
            said.append(line)

    said: list[str] = []
    micro_batches = shares(Schedule(9, 2, 2, epochs=1), Grid(1), 0)
    with Reader(Slow(9), Natural(9), micro_batches, seed=0, loaders=2, say=say) as reader:
        assert [batch.tolist() for _, batch in reader] == [[0, 1], [2, 7], [4, 5], [6, 7], [8]]
    assert len(said) == 1


class Large(Drawing):
    def __getitem__(self, index: int) -> Any:
        about = get_worker_info()
        assert about is not None
        return {"image": torch.full((64, 1024), float(index)), "text": "x" * 100_000, "loader": about.id}


def test_large_tensors_and_texts_travel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = read(Large(6), Schedule(6, 2, 2, epochs=1), loaders=2, order=Natural(6))
    for (step, _), batch in found.items():
        assert batch["image"].shape == (2, 64, 1024)
        assert batch["image"][:, 0, 0].tolist() == [2.0 * step, 2.0 * step + 1]
        assert batch["text"] == ["x" * 100_000] * 2
        assert batch["loader"].tolist() == [step % 2] * 2
    assert list(tmp_path.iterdir()) == []  # nothing is left of the sockets over which they travelled


class Odd(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def odd_batch(samples: list[Any]) -> Any:
    return Odd(torch.ones(2, 3).t(), torch.tensor([]).reshape(0, 4)), torch.tensor(True), torch.tensor(2 + 1j), [None]


def test_odd_tensors_travel_as_they_are() -> None:
    found = read(Drawing(1), Schedule(1, 1, 1, epochs=1), loaders=1, collate=odd_batch)
    odd, true, number, none = found[0, 0]
    assert type(odd) is Odd
    assert torch.equal(odd.a, torch.ones(3, 2))
    assert odd.b.shape == (0, 4)
    assert (true.item(), number.item(), none) == (True, 2 + 1j, [None])


class Bad(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise OSError(f"no such image: {index}.png")
        return torch.zeros(2 if index != 17 else 3)


class BadMany(Bad):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("kind", [Bad, BadMany])
def test_a_sample_that_raises_is_named(loaders: int, kind: type[Bad]) -> None:
    where = r"in loader process \d" if loaders else "in the training process"
    message = rf"sample 13 \(position 13 of epoch 0\) could not be read on rank 2, {where}: OSError: no such image: 13"
    micro_batches = (MicroBatch(s, 0, 0, s * 4, s * 4 + 4) for s in range(4))
    with (
        Reader(kind(16), Natural(16), micro_batches, seed=0, rank=2, loaders=loaders) as reader,
        pytest.raises(DataError, match=message) as raised,
    ):
        list(reader)
    cause = raised.value.__cause__
    assert cause is not None
    assert "no such image: 13.png" in str(cause)
    if loaders:
        assert "test_reading.py" in str(cause)  # the traceback's own lines
        assert "self.data[" not in str(cause)  # ours are peeled off
    else:
        assert isinstance(cause, OSError)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("loaders", [0, 2])
def test_what_ended_the_reading_is_raised_again_and_is_no_end_of_the_data(loaders: int) -> None:
    with Reader(
        Bad(16), Natural(16), shares(Schedule(16, 4, 4, epochs=1), Grid(1), 0), seed=0, loaders=loaders
    ) as reader:
        with pytest.raises(DataError, match="sample 13") as first:
            list(reader)
        for _ in range(2):
            with pytest.raises(DataError) as again:
                next(reader)
            assert again.value is first.value
            assert again.value.__cause__ is not None
    order = choose_order(range(4), seed=0, order=lambda epoch: [0, 1, 2, 3][: 4 - epoch])
    with Reader(
        range(4), order, shares(Schedule(4, 4, 4, epochs=2), Grid(1), 0), seed=0, loaders=loaders, prefetch=1
    ) as reader:
        for _ in range(2):
            with pytest.raises(UsageError, match=r"order\(1\) has 3 indices"):
                list(reader)


class Curriculum(Drawing):
    """Each sample: the epoch that it was told, a draw that was made then, and whether that was in this process."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epoch, self.noise, self.told = -1, -1.0, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.noise = epoch, random.random()
        self.told.append(epoch)

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch, self.noise, len(set(self.told)) == len(self.told)


@pytest.mark.parametrize("parts", [False, True])
def test_a_data_set_is_told_each_epoch_in_every_process_that_reads(parts: bool) -> None:
    def data() -> Any:
        return ConcatDataset([Subset(Curriculum(9), range(5)), Curriculum(3)]) if parts else Curriculum(8)

    schedule = Schedule(8, 4, 2, epochs=3)
    alone = read(data(), schedule)
    for (step, _), (_, epoch, _, once) in alone.items():
        assert epoch.tolist() == [step // 2] * 2
        assert once.all()
    noises = {noise.item() for batch in alone.values() for noise in batch[2]}
    assert len(noises) == (6 if parts else 3)  # one draw for each data set that is told
    for world_size, loaders in [(1, 2), (2, 0), (2, 1)]:
        other = read(data(), schedule, world_size, loaders)
        assert other.keys() == alone.keys()
        assert all(same(alone[k][:3], other[k][:3]) for k in alone)
    late = read(data(), schedule, loaders=2, first_step=3)
    assert all(same(alone[k], late[k]) for k in late)


@pytest.mark.parametrize("loaders", [0, 2])
def test_the_training_process_is_told_the_epoch_of_what_it_gets(loaders: int) -> None:
    data = Curriculum(4)
    with Reader(data, Natural(4), shares(Schedule(4, 2, 2, epochs=2), Grid(1), 0), seed=0, loaders=loaders) as reader:
        reader.begin_epoch(0)
        assert data.epoch == 0
        assert [(m.epoch, data.epoch) for m, _ in reader] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert data.told == [0, 1]


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_set_epoch_that_raises_is_named(loaders: int) -> None:
    class Unready(Drawing):
        def set_epoch(self, epoch: int) -> None:
            raise OSError("no file for it")

    where = "in loader process 0" if loaders else "in the training process"
    with Reader(Unready(4), Natural(4), [MicroBatch(0, 2, 0, 0, 4)], seed=0, loaders=loaders) as reader:
        with pytest.raises(
            DataError, match=rf"set_epoch\(2\) of the data set failed on rank 0, {where}: OSError: no f"
        ):
            next(reader)
        with pytest.raises(DataError, match=r"set_epoch\(1\).*in the training process: OSError"):
            reader.begin_epoch(1)


def test_samples_of_different_sizes_are_told_to_pad() -> None:
    micro_batches = [MicroBatch(0, 0, 0, 16, 20)]
    with (
        Reader(Bad(20), Natural(20), micro_batches, seed=0) as reader,
        pytest.raises(DataError, match=r"(?s)collate failed for micro-batch 0 of step 0 .*pads them"),
    ):
        next(reader)


class Fatal(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_loader_process_that_is_killed_is_named() -> None:
    with (
        Reader(
            Fatal(9), Natural(9), shares(Schedule(9, 1, 1, epochs=1), Grid(1), 0), seed=0, rank=1, loaders=2
        ) as reader,
        pytest.raises(
            DataError, match=r"loader process 1 \(pid \d+\) was ended by SIGKILL on rank 1, while it read sample 5"
        ),
    ):
        list(reader)
    assert multiprocessing.active_children() == []


def a_first_sample_that_ends_its_process(exitcode: int, started: Path | None = None) -> Any:
    class Leaving(Drawing):
        def __getitem__(self, index: int) -> Any:
            if started is not None and index == 2:
                with started.open("rb") as fifo:  # until the test opens it, too
                    fifo.read()
            if index == 2:
                os._exit(exitcode)
            return index

    return Leaving(9)


@pytest.mark.parametrize("exitcode", [0, 3])
def test_a_loader_process_that_exits_is_named_at_once(exitcode: int) -> None:
    start = time.monotonic()
    with (
        Reader(
            a_first_sample_that_ends_its_process(exitcode),
            Natural(9),
            shares(Schedule(9, 3, 3, epochs=1), Grid(1), 0),
            seed=0,
            loaders=1,
        ) as reader,
        pytest.raises(
            DataError,
            match=rf"loader process 0 \(pid \d+\) ended with exit code {exitcode} .* sample 2 \(position 2 of epoch",
        ),
    ):
        list(reader)
    assert time.monotonic() - start < 3


def end_of(pid: int | None) -> None:
    """Waits until a child process is dead, and leaves it to others to reap it."""
    assert pid is not None
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("exitcode", [0, 3])
def test_a_death_during_a_step_is_raised_where_the_next_batch_is_asked_for(exitcode: int, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    data = a_first_sample_that_ends_its_process(exitcode, fifo)
    with Reader(data, Natural(9), shares(Schedule(9, 1, 1, epochs=1), Grid(1), 0), seed=0, loaders=1) as reader:
        next(reader)
        (process,) = multiprocessing.active_children()
        fifo.open("wb").close()
        end_of(process.pid)
        assert [i for i in range(1000) if i % 500 == 0] == [0, 500]  # the rest of the step goes on undisturbed
        with pytest.raises(DataError, match=rf"exit code {exitcode} on rank 0, while it read sample 2"):
            list(reader)
    assert multiprocessing.active_children() == []


class Late:
    """An order whose second epoch is asked for while the loader processes are being started; the first is dead then."""

    length = 2
    name = "late"

    def digest(self, epoch: int) -> str:
        return ""

    def indices(self, epoch: int, start: int, stop: int) -> Any:
        if epoch == 1:
            end_of(multiprocessing.active_children()[0].pid)
        return np.arange(start, stop) + 2


def test_a_death_right_after_the_start_is_named() -> None:
    with (
        Reader(
            a_first_sample_that_ends_its_process(3),
            Late(),
            [MicroBatch(0, 0, 0, 0, 1), MicroBatch(1, 1, 0, 0, 1)],
            seed=0,
            loaders=1,
        ) as reader,
        pytest.raises(DataError, match=r"pid \d+.* exit.* code 3"),
    ):
        list(reader)
    assert multiprocessing.active_children() == []


def test_a_death_in_a_data_loader_of_the_users_stays_torchs_error() -> None:
    mine = Reader(Drawing(9), Natural(9), shares(Schedule(9, 1, 1, epochs=1), Grid(1), 0), seed=0, loaders=1)
    next(mine)
    theirs = iter(
        DataLoader(
            a_first_sample_that_ends_its_process(3), collate_fn=list, num_workers=1, multiprocessing_context="fork"
        )
    )
    try:
        with mine, pytest.raises(RuntimeError, match="DataLoader worker"):
            list(theirs)
    finally:
        theirs._shutdown_workers()  # type: ignore[attr-defined]


def pinning_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)


class Pinned:
    """A batch that notes which thread pinned it."""

    by = ""

    def pin_memory(self) -> Pinned:
        self.by = threading.current_thread().name
        return self


@pytest.mark.parametrize("data", [Drawing(9), Fatal(9)])
def test_batches_are_pinned_by_a_thread_which_keeps_nobody_when_a_process_dies(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinning_without_a_gpu(monkeypatch)
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.MP_STATUS_CHECK_INTERVAL", 0.1)
    micro_batches = shares(Schedule(9, 1, 1, epochs=1), Grid(1), 0)
    with Reader(
        data, Natural(9), micro_batches, seed=0, loaders=2, pin=True, collate=lambda samples: Pinned()
    ) as reader:
        assert next(reader)[1].by.startswith("Thread-")
        if isinstance(data, Fatal):
            with pytest.raises(DataError, match="SIGKILL"):
                list(reader)
        else:
            assert len(list(reader)) == 8
    assert multiprocessing.active_children() == []


class Telling(Drawing):
    def __getitem__(self, index: int) -> Any:
        about = get_worker_info()
        assert about is not None
        assert about.dataset is self
        assert (about.id in (0, 1), about.num_workers, torch.get_num_threads()) == (True, 2, 1)
        return index


def test_a_data_set_in_a_loader_process_knows_where_it_is() -> None:
    assert len(read(Telling(6), Schedule(6, 2, 2, epochs=1), loaders=2)) == 3


def test_a_batch_that_cannot_be_sent_is_refused() -> None:
    with (
        Reader(
            Drawing(4),
            Natural(4),
            shares(Schedule(4, 2, 2, epochs=1), Grid(1), 0),
            seed=0,
            loaders=1,
            collate=lambda samples: lambda: samples,
        ) as reader,
        pytest.raises(DataError, match="in loader process 0, cannot be sent to the training process"),
    ):
        next(reader)


def test_loader_processes_beside_the_threads_of_gloo_and_openmp() -> None:
    def train() -> int:
        torch.set_num_threads(2)
        dist.init_process_group("gloo")
        x = torch.randn(300, 300)
        (x @ x).relu().sum()
        pending = dist.all_reduce(x, async_op=True)

        class Heavy(Drawing):
            def __getitem__(self, index: int) -> Any:
                y = torch.randn(300, 300)
                return (y @ y).exp().sum().reshape(1)

        found = read(Heavy(12), Schedule(12, 4, 2, epochs=2), loaders=2)
        assert pending is not None
        pending.wait()
        dist.destroy_process_group()
        return len(found)

    assert run_ranks(train, 2) == [12, 12]


class Apart(Drawing):
    """Puts its loader process into a group of its own, where nobody who kills a group finds it."""

    def __getitem__(self, index: int) -> Any:
        os.setpgid(0, 0)
        return index


def test_loader_processes_die_with_a_training_process_that_is_killed() -> None:
    receive, send = os.pipe()

    def train() -> None:
        os.close(receive)
        reader = Reader(Apart(99), Natural(99), shares(Schedule(99, 1, 1, epochs=9), Grid(1), 0), seed=0, loaders=2)
        next(reader), next(reader)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError):
        run_ranks(train, 1)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        assert pipe.read() == b""  # its end: nobody holds the other one any more


def test_peers_notice_at_once_when_a_training_process_with_loader_processes_is_killed(tmp_path: Path) -> None:
    def train() -> None:
        dist.init_process_group("gloo")
        reader = Reader(Apart(99), Natural(99), shares(Schedule(99, 1, 1, epochs=9), Grid(1), 0), seed=0, loaders=2)
        next(reader), next(reader)
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        (tmp_path / "noticed").write_text(str(time.monotonic() - start))
        reader.close()
        os._exit(0)

    with pytest.raises(AssertionError):
        run_ranks(train, 2)
    assert float((tmp_path / "noticed").read_text()) < 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class NoIndex:
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(TensorDataset(torch.ones(2))), "loader.dataset"),
        ({"train": DrawingMany(3), "test": DrawingMany(2)}, r"give data\['train'\]"),
        ((np.ones(3), np.ones(3)), "StackDataset"),
        (Stream(), "a stream has no length"),
        (iter([1]), r"data is a list_iterator(.|\n)*evenstep.stream\(make\)"),
        (len, r"data is a builtin_function_or_method(.|\n)*evenstep.stream\(make\)"),
        ((torch.ones(3), torch.ones(3)), "TensorDataset"),
        ({"x": torch.ones(3)}, "TensorDataset"),
        ("train.csv", "open it first"),
        (NoLength(), "__len__"),
        ((i for i in range(3)), "evenstep.stream"),
        (NoIndex(), "__getitem__"),
        ([], "is empty"),
    ],
)
def test_what_is_no_data_set_is_refused_with_what_to_do(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked_dataset(data)


def test_anything_with_a_length_and_an_index_is_a_data_set() -> None:
    for data in ([1, 2], torch.ones(3, 2), np.ones((3, 2)), range(5), Drawing(3), Subset(Drawing(3), [0])):
        assert checked_dataset(data) is data


class OwnTorch(Drawing):
    generator = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2), torch.rand(2, generator=self.generator)


class OwnNumpy(Drawing):
    generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.generator.random(2)}


class Counting(Drawing):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return Sample(torch.ones(1), str(self.reads))


class InPlace(Drawing):
    array = np.zeros(2)

    def __getitem__(self, index: int) -> Any:
        self.array += 1
        return self.array


class OwnMany(OwnTorch):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


@pytest.mark.parametrize("kind", [OwnTorch, OwnNumpy, Counting, InPlace, OwnMany])
@pytest.mark.parametrize("subset", [False, True])
def test_a_data_set_with_randomness_or_state_of_its_own_is_found(kind: type[Drawing], subset: bool) -> None:
    data: Any = Subset(kind(9), range(9)) if subset else kind(9)
    with pytest.raises(UsageError, match=r"(?s)two different samples for sample 0 .*of its own.*torch.initial_seed"):
        probe(data, Natural(9), seed=3)


class OwnKeyed(Drawing):
    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(torch.initial_seed())
        return index, torch.rand(2, generator=generator), torch.tensor(float("nan")), float("nan"), None


def test_a_data_set_that_draws_from_keyed_generators_has_one_digest() -> None:
    kinds: list[Any] = [Drawing(9), DrawingMany(9), OwnKeyed(9), TensorDataset(torch.arange(9.0)), [np.nan] * 9]
    with kept_generators():
        seed_generators(4)
        expected = torch.rand(()).item(), random.random(), np.random.rand()
        seed_generators(4)
        digests = [probe(data, Natural(9), seed=3)[0] for data in kinds]
        assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected
    assert all(len(digest) == 32 for digest in digests)
    assert len(set(digests)) == len(kinds)
    assert [probe(data, Natural(9), seed=3)[0] for data in kinds] == digests
    assert probe(Drawing(9), Natural(9), seed=4)[0] != digests[0]
    assert probe(Drawing(9), Fixed(np.array([1])), seed=3)[0] != digests[0]


def test_a_probe_reads_what_the_reader_reads_first() -> None:
    seen: list[int] = []

    class Noting(Drawing):
        def __getitem__(self, index: int) -> Any:
            seen.append(torch.initial_seed())
            return index

    probe(Noting(9), Natural(9), seed=7)
    read(Noting(9), Schedule(9, 9, 9, steps=1), order=Natural(9))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen) == 2 + 9


class Opening(Drawing):
    """Opens its file at the first sample, as one does for loader processes."""

    file: IO[bytes] | None = None

    def __getitem__(self, index: int) -> bytes:
        if self.file is None:
            self.file = open(__file__, "rb")
        self.file.seek(index)
        return self.file.read(9)


def test_with_loader_processes_a_probe_opens_nothing_here() -> None:
    """...of which they would share the place."""
    there, here = Opening(9), Opening(9)
    found = probe(there, Natural(9), [3, 8], seed=3, loaders=2)
    assert found == probe(here, Natural(9), [3, 8], seed=3)
    assert len(set(found.values()) - {""}) == 3
    assert there.file is None
    assert here.file is not None
    here.file.close()
    assert list(probe(Drawing(9), Natural(9), [3, 8], seed=3, seconds=0)) == [0]


def test_a_probe_leaves_to_the_reader_what_cannot_be_read_or_encoded() -> None:
    assert probe(Bad(14), Fixed(np.array([13])), seed=0) == {}
    assert probe([Movable()], Natural(1), seed=0) == {0: ""}


@pytest.mark.parametrize("loaders", [-1, 1.5, True, "2"])
def test_a_number_of_loader_processes_is_checked(loaders: Any) -> None:
    with pytest.raises(UsageError, match="loaders="):
        Reader([1], Natural(1), [], seed=0, loaders=loaders)


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Movable:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: Any) -> Movable:
        return Movable(str(device))


def test_nests_move_whole() -> None:
    x = torch.ones(2)
    counts: collections.defaultdict[str, Any] = collections.defaultdict(list, a=x)
    batch = {
        "list": [x, 1, "text", None],
        "odd": Odd(x, x),
        "sample": Sample(x, "a"),
        "ordered": collections.OrderedDict(b=x, a=(x,)),
        "default": counts,
        "user": collections.UserDict({"x": x}),
        "movable": Movable(),
        "array": np.ones(2),
    }
    moved = to_device(batch, "meta")
    assert moved["list"][0].device.type == "meta"
    assert moved["list"][1:] == [1, "text", None]
    assert type(moved["odd"]) is Odd
    assert moved["odd"].b.device.type == "meta"
    assert moved["sample"].image.device.type == "meta"
    assert moved["sample"].name == "a"
    assert list(moved["ordered"]) == ["b", "a"]
    assert type(moved["ordered"]) is collections.OrderedDict
    assert moved["ordered"]["a"][0].device.type == "meta"
    assert moved["default"].default_factory is list
    assert moved["default"]["a"].device.type == "meta"
    assert moved["user"]["x"].device.type == "meta"
    assert moved["movable"].device == "meta"
    assert moved["array"] is batch["array"]
    assert x.device.type == "cpu"
    assert counts["a"] is x


def test_the_tensors_of_a_nest_are_found_in_order() -> None:
    a, b, c, d, e, f, g = (torch.full((1,), float(i)) for i in range(7))
    batch = {
        "list": [a, 1, "text", None, (b,)],
        "odd": Odd(c, d),
        "sample": Sample(e, "a"),
        "user": collections.UserDict({"x": f}),
        "array": np.ones(2),
        "deep": [[{"y": (g,)}]],
    }
    found = tensors(batch)
    assert [id(t) for t in found] == [id(t) for t in (a, b, c, d, e, f, g)]
    assert [id(t) for t in tensors(a)] == [id(a)]
    assert tensors(["text", Sample]) == []


def test_a_batch_splits_where_every_part_has_its_samples_along_dimension_0() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "names": list("abcde"), "pair": (torch.arange(5), None), "task": "sum"}
    halves = split_batch(batch, 5)
    assert halves is not None
    first, second = halves
    assert first["x"].tolist() == [[0, 1], [2, 3]]
    assert second["names"] == ["c", "d", "e"]
    assert second["pair"][0].tolist() == [2, 3, 4]
    assert second["pair"][1] is None
    assert first["task"] == "sum"
    two = split_batch([torch.ones(2, 3), torch.zeros(2)], 2)
    assert two is not None
    assert [t.shape for t in two[0]] == [(1, 3), (1,)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(1, 2), 1),
        ({"tokens": torch.ones(17), "lengths": torch.ones(3)}, 3),
        ({"x": torch.ones(3), "n": 3}, 3),
        ({"x": torch.ones(3), "scale": torch.tensor(1.0)}, 3),
        (Movable(), 3),
        (["a"], 3),
    ],
)
def test_a_batch_that_cannot_be_split_for_certain_is_not(batch: Any, size: int) -> None:
    assert split_batch(batch, size) is None
