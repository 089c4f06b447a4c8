"""Streams: the same model on every layout and through a kill, each sample once, and what is refused by name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import evenstep
from evenstep.errors import DataError, IdentityError, PeerFailed, UsageError
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from evenstep.train.data.lane import Lane
from evenstep.train.data.lane_beginnings import begin
from tests.ranks import run_ranks
from tests.train.scripts import adamw, fingerprints, training_run

LENGTHS = [10, 7, 0, 13, 9, 1, 12]  # of the lanes: an empty one, and one that ends in the middle of a micro-batch
BATCH = {"global_batch": 20, "micro_batch": 3}  # 7 lanes, the last of which takes 2 samples a step
STEPS = 6  # of an epoch: lane 6 has 12 samples


def make(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
    """Samples with noise from two of the global generators, and their numbers."""
    assert lanes == len(LENGTHS)
    for k in range(LENGTHS[lane]):
        yield torch.randn(4) * 0.1 + k + np.random.rand(), epoch * 1000 + lane * 100 + k


STREAM = evenstep.stream(make, block=4)


class Seeking(Iterator[tuple[Tensor, int]]):
    """The same samples, from any place on."""

    opened: ClassVar[list[int]] = []  # how many samples each iterator gave

    def __init__(self, lane: int, lanes: int, epoch: int) -> None:
        self.lane, self.epoch, self.k = lane, epoch, 0
        self.opened.append(0)
        self.place = len(self.opened) - 1

    def __next__(self) -> tuple[Tensor, int]:
        if self.k == LENGTHS[self.lane]:
            raise StopIteration
        self.k += 1
        self.opened[self.place] += 1
        k = self.k - 1
        return torch.randn(4) * 0.1 + k + np.random.rand(), self.epoch * 1000 + self.lane * 100 + k

    def state_dict(self) -> dict[str, int]:
        return {"k": self.k}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.k = state["k"]


def loss_fn(model: nn.Module, batch: Any) -> Any:
    values, numbers = batch
    return (model(values).squeeze(1) - (numbers % 3)).square().sum(), len(numbers)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 1)))


def train(
    directory: Path,
    data: evenstep.Stream,
    stop: int | None = None,
    *,
    epochs: int | None = 2,
    steps: int | None = None,
    loaders: int = 0,
    shuffle: bool = True,
    **options: Any,
) -> tuple[list[str], list[int], list[tuple[int, bool]]]:
    """The fingerprints of the steps done, the numbers of the samples that this process read for them, and the samples
    and the end of the epoch that each step has. `stop`: dies in the step of that number."""
    seen: list[int] = []
    told: list[tuple[int, bool]] = []

    def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        seen.extend(number for _, number in samples)
        return torch.stack([value for value, _ in samples]), torch.tensor([number for _, number in samples])

    with training_run(directory, **{**BATCH, "checkpoint_every": 1, **options}) as run:
        prepared = run.prepare(net())
        optimizer = adamw(prepared.parameters())
        turns = run.steps(data, epochs=epochs, steps=steps, collate=collate, loaders=loaders, shuffle=shuffle)
        run.restore(model=prepared, optimizer=optimizer)
        for step in turns:
            if step.number == stop:
                run._close(failed=True)
                return [], seen, told
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            told.append((step.samples, step.ends_epoch))
    return fingerprints(run), seen, told


EXPECTED = {epoch * 1000 + lane * 100 + k for epoch in range(2) for lane, n in enumerate(LENGTHS) for k in range(n)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[tuple[int, bool]]]:
    """The training in one process: fingerprints and what steps say of themselves."""
    (done,) = run_ranks(train, 1, tmp_path_factory.mktemp("alone"), STREAM)
    found, seen, told = done
    assert len(seen) == len(EXPECTED) == len(set(seen))
    assert set(seen) == EXPECTED
    assert seen != sorted(seen)
    assert told == [(15, False), (14, False), (12, False), (6, False), (3, False), (2, True)] * 2
    assert len(set(found)) == 12
    return found, told


Alone = tuple[list[str], list[tuple[int, bool]]]

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {"loaders": 2}),
    (5, {}),
    (1, {"thread_replicas": 3}),
    (4, {"shard": True, "replicas": 2}),
    (4, {"stages": 2}),
    (1, {"split": 2, "loaders": 3}),
]


@pytest.mark.parametrize(("processes", "options"), LAYOUTS, ids=str)
def test_a_stream_trains_the_same_model_on_every_layout(
    processes: int, options: dict[str, Any], alone: Alone, tmp_path: Path
) -> None:
    done = run_ranks(partial(train, **options), processes, tmp_path, STREAM, timeout=100)
    for found, _, told in done:
        assert (found, told) == alone
    if "loaders" not in options and "stages" not in options:
        taken = Counter(number for _, seen, _ in done for number in seen)
        assert set(taken) == EXPECTED
        assert set(taken.values()) == {1}


def even(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
    for k in range((4, 0, 2, 6, 2)[lane]):
        yield torch.randn(4) + k, lane * 10 + k


def contrast(model: nn.Module, embeddings: Tensor) -> Tensor:
    return torch.logsumexp(embeddings @ embeddings.T / 4, 0).sum()


def train_otherwise(directory: Path, **options: Any) -> tuple[list[str], list[float], list[int]]:
    """What else a step can do, with lanes that are missing: batch statistics, totals, losses over the whole batch."""
    losses, totals = [], []
    with training_run(directory, global_batch=10, micro_batch=2, **options) as run:
        model = run.prepare(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))
        optimizer = adamw(model.parameters())
        for step in run.steps(evenstep.stream(even, block=3), epochs=2):
            totals.append(int(step.total(lambda batch: len(batch[1]))))
            losses.append(step.backward(loss_fn).loss)
            losses.append(step.backward_whole(lambda model, batch: model(batch[0]), contrast).loss)
            run.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return fingerprints(run), losses, totals


def test_whatever_a_step_does_goes_with_lanes_that_are_missing(tmp_path: Path) -> None:
    (alone,) = run_ranks(train_otherwise, 1, tmp_path / "alone")
    assert alone[2] == [8, 4, 2] * 2
    layouts: list[tuple[int, dict[str, Any]]] = [(1, {"thread_replicas": 2}), (3, {}), (2, {"shard": True})]
    for processes, options in layouts:
        place = tmp_path / f"{processes}{options}"
        for found in run_ranks(partial(train_otherwise, **options), processes, place):
            assert found == alone
    for processes, options in layouts[:2]:
        place = tmp_path / f"{processes}{options} rounded"
        for _, losses, _ in run_ranks(partial(train_otherwise, exact=False, **options), processes, place):
            assert losses == pytest.approx(alone[1], rel=1e-3)


# ---- killed and resumed


@pytest.mark.parametrize(("processes", "stop", "then"), [(1, 3, 2), (2, 9, 5), (3, 5, 1), (5, 2, 3)])
def test_a_killed_run_goes_on_on_another_number_of_processes(
    processes: int, stop: int, then: int, alone: Alone, tmp_path: Path
) -> None:
    """In the middle of an epoch, at its end and with lanes that have ended; what was taken is not taken again."""
    fingerprint, told = alone
    before = run_ranks(train, processes, tmp_path, STREAM, stop)
    after = run_ranks(partial(train, loaders=2 * (then == 2)), then, tmp_path, STREAM)
    for found, _, rest in after:
        assert found[-(len(told) - stop) :] == fingerprint[stop:]
        assert rest == told[stop:]
    if then != 2:
        samples = Counter(number for _, seen, _ in after for number in seen)
        assert set(samples.values()) == {1}
        assert sum(samples.values()) == sum(size for size, _ in told[stop:])
        done = Counter(number for _, seen, _ in before for number in seen)
        # The step that died had read its samples, and nobody else's.
        assert sum((done & samples).values()) == told[stop][0]
        assert set(done) | set(samples) == EXPECTED


def test_going_on_seeks_where_the_source_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """...and else reads again from the beginning of the epoch, with the cost told; block by block the same samples."""
    made = {"reads again": evenstep.stream(make, block=4), "seeks": evenstep.stream(Seeking, block=4)}
    lines, found = {}, {}
    for name, stream in made.items():
        directory = tmp_path / name
        train(directory, stream, 4)
        capsys.readouterr()
        Seeking.opened.clear()
        found[name], _, _ = train(directory, stream)
        (lines[name],) = (line for line in capsys.readouterr().err.splitlines() if "goes on at turn" in line)
    assert found["seeks"] == found["reads again"]
    assert len(found["seeks"]) == 12
    assert "the source cannot seek, up to 12 records of a lane are read again" in lines["reads again"]
    assert "2 of 2 lanes go on from a mark, up to 4 records of a lane are read again" in lines["seeks"]
    # Lane 3 had given 12 of 13 samples, lane 6 8 of 12: the marks lie a block before. The first two are the check's.
    assert Seeking.opened[2:4] == [5, 8]


class Changing:
    """Gives other samples each time, from `lane` on."""

    def __init__(self, lane: int) -> None:
        self.lane, self.calls = lane, itertools.count()

    def __call__(self, lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        more = next(self.calls) if lane >= self.lane else 0
        for k in range(LENGTHS[lane]):
            yield torch.full((4,), float(k + more)), lane * 100 + k


def test_a_stream_that_is_not_the_same_again_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not give the same samples again: lane 0 of epoch 0 was begun twice"):
        train(tmp_path / "a", evenstep.stream(Changing(0), block=4))
    once = [iter([(torch.ones(4), 1), (torch.zeros(4), 2)]) for _ in LENGTHS]
    with pytest.raises(UsageError, match=r"was begun twice(.|\n)*must return a new iterator each time"):
        train(tmp_path / "b", evenstep.stream(lambda lane, lanes, epoch: once[lane]))


def test_a_stream_that_is_not_the_same_again_is_named_at_a_resume(tmp_path: Path) -> None:
    stream = evenstep.stream(Changing(3), block=4)
    train(tmp_path, stream, 3)
    with pytest.raises(DataError, match=r"lane 3 of the stream does not give the same samples again: block"):
        train(tmp_path, stream)


def test_a_stream_that_changed_is_named_at_a_resume_between_epochs(tmp_path: Path) -> None:
    train(tmp_path, STREAM, STEPS)

    def make(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        return ((torch.zeros(4), k) for k in range(LENGTHS[lane]))

    make.__qualname__ = "make"
    with pytest.raises(IdentityError, match=r"made with a stream of first samples=\w+, now it is \w+: the rest"):
        train(tmp_path, evenstep.stream(make, block=4))


def of_rank(folder: Path) -> list[str]:
    """Each process has other streams."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def own(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        return ((torch.full((4,), float(rank + k)), k) for k in range(3))

    def own_later(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        other = rank if lane else 0
        return ((torch.full((4,), float(lane + other + k)), k) for k in range(3))

    for number in range(7):
        (folder / str(rank)).mkdir(exist_ok=True)
        (folder / str(rank) / f"{number if number < 6 else number + rank}.txt").write_text("1\n")
    said: list[str] = []
    for data in (evenstep.stream(own), evenstep.stream(own_later), evenstep.stream(f"{folder}/{rank}/*.txt")):
        with pytest.raises(UsageError) as caught:
            train(folder / str(len(said)), data)
        said.append(caught.value.message)
    dist.destroy_process_group()
    return said


def test_processes_with_different_streams_are_named(tmp_path: Path) -> None:
    """...be it a lane that only one of them reads: another one looks at its beginning."""
    for first, later, files in run_ranks(of_rank, 3, tmp_path):
        assert first.startswith("rank 1 has {'failed': None, 'source': 'of_rank.<locals>.own'")
        assert first.endswith("the stream is not the same on all processes")
        assert later.startswith("lane 4 of the stream begins with other samples on rank 1 than on rank 0 (epoch 0: ")
        assert "only on rank 0: 6.txt (2 bytes); only on rank 1: 7.txt (2 bytes): the stream is not" in files


def test_with_loader_processes_lanes_are_begun_elsewhere() -> None:
    """...so that what a stream opens and keeps is not open yet when loader processes begin."""
    opened = []

    def noting(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        opened.append(lane)
        return make(lane, lanes, epoch)

    def begun(loaders: int) -> list[str]:
        which = [(0, 0), (3, 1), (len(opened) and 9, 0)]
        return begin(evenstep.stream(noting), 7, which, seed=0, rank=2, loaders=loaders, say=print)

    there = begun(2)
    assert opened == []
    assert there == begun(0)
    assert opened == [0, 3, 0]
    for loaders in (0, 2):
        with pytest.raises(DataError, match=r"record 0 of lane 9 \(epoch 0\) could not be .*IndexError.*\(on rank 2\)"):
            begun(loaders)


def test_a_checkpoint_of_another_stream_is_refused(tmp_path: Path) -> None:
    train(tmp_path, STREAM, 3)
    with pytest.raises(IdentityError, match=r"made with a stream of block=4, now it is 5"):
        train(tmp_path, evenstep.stream(make, block=5))
    with pytest.raises(IdentityError, match=r"made with a stream of shuffle=True, now it is False"):
        train(tmp_path, STREAM, shuffle=False)
    with training_run(tmp_path, **BATCH) as run:
        model = run.prepare(net())
        optimizer = adamw(model.parameters())
        steps = run.steps([(torch.ones(4), 1)] * 30, epochs=1)
        run.restore(model=model, optimizer=optimizer)
        with pytest.raises(IdentityError):
            next(iter(steps))
        run._close(failed=True)


def test_a_damaged_mark_does_not_matter_where_the_source_cannot_seek(alone: Alone, tmp_path: Path) -> None:
    train(tmp_path, STREAM, 7)
    about = Checkpoints(RunPaths(tmp_path)).about(7)
    assert (about["stream"]["epoch"], about["stream"]["turn"]) == (1, 1)
    assert about["stream"]["ended"] == [2, 5]
    assert set(about["stream"]["marks"]) == {"0", "1", "3", "4", "6"}
    assert train(tmp_path, STREAM)[0] == alone[0]


def test_a_finished_stream_goes_on_for_more_epochs(alone: Alone, tmp_path: Path) -> None:
    first, _, told = train(tmp_path, STREAM, epochs=1)
    assert (first, told) == (alone[0][:6], alone[1][:6])
    assert train(tmp_path, STREAM, epochs=1)[2] == []
    assert train(tmp_path, STREAM, epochs=2)[0] == alone[0]


# ---- random numbers


def noise(lane: int, epoch: int, start: int = 0) -> list[float]:
    """What the records of a lane draw, and what transform does for each."""

    def draws(lane: int, lanes: int, epoch: int) -> Iterator[list[float]]:
        files = torch.randperm(1000)[0].item()
        for _ in range(12):
            yield [files, torch.rand(()).item(), np.random.rand()]

    stream = evenstep.stream(draws, block=4, transform=lambda record: [*record, torch.rand(()).item()])
    read = Lane(stream, lane, 3, epoch, seed=5, shuffle=True, start=start)
    return [value for sample in read.take(99) for value in sample]


def test_each_record_and_sample_draws_for_itself_and_all_lanes_begin_alike() -> None:
    found = {(lane, epoch): noise(lane, epoch) for lane in range(3) for epoch in range(2)}
    assert found[1, 1] == noise(1, 1)
    assert found[1, 1][4 * 7 :] == noise(1, 1, 7)
    assert found[0, 0][0] == found[1, 0][0] == found[2, 0][0] != found[0, 1][0]  # a list of files, in one order
    values = [value for drawn in found.values() for k, value in enumerate(drawn) if k % 4]
    # The first record of all lanes has the same key: two draws, three lanes, two epochs.
    assert len(set(values)) == len(values) - 2 * 2 * 2


# ---- lengths


def test_an_infinite_stream_ends_after_its_steps(tmp_path: Path) -> None:
    def counting(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        return ((torch.randn(4), lane + lanes * k) for k in itertools.count())

    stream = evenstep.stream(counting)
    done = [
        run_ranks(partial(train, epochs=None, steps=5, loaders=n % 2), n, tmp_path / str(n), stream) for n in (1, 2, 3)
    ]
    for ranks in done:
        for found, _, told in ranks:
            assert found == done[0][0][0]
            assert told == [(20, False)] * 5


def test_a_scheduler_that_needs_the_length_gets_a_clear_error(tmp_path: Path) -> None:
    with training_run(tmp_path, **BATCH) as run:
        model = run.prepare(net())
        optimizer = adamw(model.parameters())
        steps = run.steps(STREAM, epochs=2)
        with pytest.raises(UsageError, match=r"a stream has no length(.|\n)*run.steps\(stream, steps=1000\)"):
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(steps))
        assert len(list(steps)) == 12  # list asks for a length, too


def test_an_empty_stream_is_named(tmp_path: Path) -> None:
    def once(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        return make(lane, lanes, epoch) if epoch == 0 else iter(())

    for data, where in ((lambda *_: iter(()), "epoch 0"), (once, "epoch 1")):
        with pytest.raises(UsageError, match=rf"{where} of the stream has no sample in any of its 7 lanes"):
            train(tmp_path / where, evenstep.stream(data))


# ---- what is refused, and what is said


AUTO = {"micro_batch": "auto", "memory": "2GiB"}
SYNC = {"batchnorm": "sync"}


def test_what_does_not_go_with_a_stream_is_refused_by_name(tmp_path: Path) -> None:
    def said(**given: Any) -> str:
        arguments: dict[str, Any] = {"epochs": 1, **given}
        with training_run(tmp_path, **BATCH) as run, pytest.raises(UsageError) as caught:
            run.steps(STREAM, **arguments)
        return caught.value.message

    assert said(order=[1]) == "order= is for data sets with a length, and data is a stream"
    assert said(weights=[1]).startswith("weights= is for")
    assert said(drop_last=True).startswith("drop_last= is for")
    assert said(lengths=[1]).startswith("lengths= is for")
    assert "either epochs= or steps=" in said(steps=3)
    for options, words in ((AUTO, 'micro_batch="auto" with a stream'), (SYNC, 'batchnorm="sync" with a stream')):
        with (
            training_run(tmp_path / words[:4], **{**BATCH, **options}) as run,
            pytest.raises(UsageError, match=words),
        ):
            run.steps(STREAM, epochs=1)


def test_lanes_that_begin_alike_are_refused(tmp_path: Path) -> None:
    records = [(torch.full((4,), float(k)), k) for k in range(40)]
    with pytest.raises(UsageError, match=r"lanes 0 and 1 of the stream begin with the same samples(.|\n)*islice"):
        train(tmp_path / "a", evenstep.stream(lambda lane, lanes, epoch: iter(records)))
    with pytest.raises(UsageError, match="lanes 0 and 1 of the stream begin with the same samples"):
        train(tmp_path / "c", evenstep.stream(lambda lane, lanes, epoch: iter(records), block=2))  # < micro_batch
    later = evenstep.stream(lambda lane, lanes, epoch: iter(records if epoch else records[lane::lanes]))
    with pytest.raises(UsageError, match="lanes 0 and 1 of the stream begin with the same samples"):
        train(tmp_path / "d", later)
    same = evenstep.stream(lambda lane, lanes, epoch: itertools.repeat((torch.ones(4), 1), 5))
    assert len(train(tmp_path / "b", same)[0]) == 6  # all alike: made up


def test_lanes_that_begin_alike_are_refused_in_an_evaluation_too(tmp_path: Path) -> None:
    """...though each process reads one lane only."""

    def body() -> None:
        with training_run(tmp_path, global_batch=4, micro_batch=2) as run:
            run.prepare(net())
            alike = evenstep.stream(lambda lane, lanes, epoch: [(torch.full((4,), float(k)), k) for k in range(9)])
            with pytest.raises(UsageError, match="lanes 0 and 1 of the stream begin with the same samples"):
                run.evaluate(alike, lambda model, batch: (batch[1].sum(), 1))
            with pytest.raises(UsageError, match="lanes 0 and 1 of the stream begin with the same samples"):
                run.predict(alike, lambda model, batch: batch[1])

    run_ranks(body, 2)


def test_an_evaluation_of_an_empty_stream_is_refused(tmp_path: Path) -> None:
    with training_run(tmp_path, **BATCH) as run:
        run.prepare(net())
        for use in (run.evaluate, run.predict):
            with pytest.raises(UsageError, match="epoch 0 of the stream has no sample in any lane"):
                use(evenstep.stream(lambda lane, lanes, epoch: []), loss_fn)


def test_one_object_that_changes_is_refused(tmp_path: Path) -> None:
    def again(lane: int, lanes: int, epoch: int) -> Iterator[list[Any]]:
        sample: list[Any] = [None, None]
        for k in range(8):
            sample[:] = torch.full((4,), float(k + lane)), k
            yield sample

    with pytest.raises(UsageError, match=r"lane 0 of the stream hands out one object again and again"):
        train(tmp_path, evenstep.stream(again))


def test_what_cannot_be_read_at_the_start_is_named_on_every_process(tmp_path: Path) -> None:
    def torn(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        yield torch.randn(4), lane
        if __import__("os").environ["RANK"] == "1":
            raise OSError("torn")

    def body() -> str:
        with pytest.raises((DataError, PeerFailed)) as caught:
            train(tmp_path, evenstep.stream(torn))
        return f"{type(caught.value).__name__}: {caught.value.message}"

    told = "record 1 of lane 0 (epoch 0) could not be read: OSError: torn (on rank 1)"
    assert run_ranks(body, 2) == [f"PeerFailed: rank 1 cannot begin: {told}", f"DataError: {told}"]


def test_a_collate_function_that_fails_is_named(tmp_path: Path) -> None:
    with training_run(tmp_path / "a", **BATCH) as run:
        run.prepare(net())
        with pytest.raises(UsageError, match="collate=3, expected a function"):
            run.steps(STREAM, epochs=1, collate=3)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"lane 0 from sample 0 of epoch 0 on could not be collated: ZeroDivision"):
            next(iter(run.steps(STREAM, epochs=1, collate=lambda samples: 1 / 0)))
        run._close(failed=True)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_record_that_cannot_be_read_is_named_on_every_process(loaders: int, tmp_path: Path) -> None:
    def broken(lane: int, lanes: int, epoch: int) -> Iterator[tuple[Tensor, int]]:
        for k in range(9):
            if lane == 5 and k == 4:
                raise OSError("torn")
            yield torch.randn(4), lane + 7 * k

    def body() -> str:
        with pytest.raises((DataError, PeerFailed)) as caught:
            train(tmp_path, evenstep.stream(broken, block=3), loaders=loaders)
        return f"{type(caught.value).__name__}: {caught.value.message}"

    here, there = sorted(run_ranks(body, 2))
    assert here.startswith("DataError: record 4 of lane 5 (epoch 0) could not be read: OSError: torn (on rank 1")
    assert "rank 1 could not read the batch of step 1: DataError: record 4 of lane 5" in there


# ---- evaluation


def evaluated(**options: Any) -> tuple[Any, Any, Any]:
    with training_run(Path("run"), **{**BATCH, **options}) as run:
        model = run.prepare(net())
        optimizer = adamw(model.parameters())
        steps = run.steps(STREAM, steps=2)
        run.restore(model=model, optimizer=optimizer)
        found: list[Any] = []
        for step in steps:
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            mean = run.evaluate(STREAM, lambda model, batch: {"loss": loss_fn(model, batch)}, loaders=step.number)
            out = run.predict(STREAM, lambda model, batch: (model(batch[0]), batch[1]))
            found.append((mean, out[0].flatten().tolist(), out[1].tolist()))

        def fails(model: nn.Module, batch: Any) -> Any:
            if (batch[1] == 605).any():
                raise ValueError("sample 605")
            return loss_fn(model, batch)

        with pytest.raises((ValueError, PeerFailed, RuntimeError), match="605"):
            run.evaluate(STREAM, fails)
    assert [step[2] for step in found] == [[lane * 100 + k for lane, n in enumerate(LENGTHS) for k in range(n)]] * 2
    return found[0][:2], found[1][:2], model.training


@pytest.mark.parametrize(
    ("processes", "options"),
    [(3, {}), (2, {"shard": True}), (4, {"stages": 2})],
    ids=str,
)
def test_evaluation_over_lanes_is_the_same_on_every_layout(
    processes: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    (expected,) = run_ranks(evaluated, 1)
    monkeypatch.chdir(tmp_path)
    for found in run_ranks(partial(evaluated, **options), processes, timeout=150):
        assert found == expected
