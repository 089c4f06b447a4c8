"""Processes that hold parts of the state: one fingerprint, one checkpoint, whatever the cut."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from evenstep.errors import CheckpointError, MismatchError, PeerFailed, UsageError
from evenstep.train.pieces import piece
from evenstep.train.state import Stored
from tests.ranks import run_ranks
from tests.train.splits import GRIDS, Net, Training, ranks_of

CUTS = [name for name in GRIDS if name != "plain"]


class Found(NamedTuple):
    """What a process saw: fingerprints, and what was written."""

    begin: str
    stepped: str
    again: str
    failure: str | None


def train(name: str, directory: Path) -> Found:
    """One step, a checkpoint, and another step."""
    with ranks_of(name) as rank:
        training = Training(name, rank, directory)
        begin, stepped = training.saved.fingerprint("the start"), training.step(0)
        failure = training.save()
        assert training.saved.save_model(directory / "model.safetensors") == []
        return Found(begin, stepped, training.step(1), failure)


def resume(name: str, directory: Path) -> str:
    """The second step after a restore, from a model of other weights."""
    with ranks_of(name) as rank:
        training = Training(name, rank, directory, seed=2)
        training.saved.load_newest()
        rows = {name: piece(p.grad) for name, p in training.model.named_parameters() if p.grad is not None}
        expected = Training(name, rank, directory)
        expected.step(0)
        for name, p in expected.model.named_parameters():
            assert (p.grad is None) == (name not in rows)
            if p.grad is not None:
                assert _equal(piece(p.grad).values, rows[name].values)
        return training.step(1)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or b is None or torch.equal(a, b)


def files(directory: Path) -> dict[str, bytes]:
    folder = directory / "checkpoints" / "step-0000000001"
    paths = [folder / "tree.json", folder / "tensors.safetensors", folder / "manifest.json"]
    return {path.name: path.read_bytes() for path in [*paths, directory / "model.safetensors"]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """The training of one process that has everything."""
    directory = tmp_path_factory.mktemp("plain")
    return directory, run_ranks(train, 1, "plain", directory)[0]


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_state_has_the_fingerprint_and_the_checkpoint_of_a_whole_one(
    name: str, plain: tuple[Path, Found], tmp_path: Path
) -> None:
    found = run_ranks(train, GRIDS[name].processes, name, tmp_path)
    assert set(found) == {plain[1]}
    assert files(tmp_path) == files(plain[0])


@pytest.mark.parametrize("name", GRIDS)
def test_what_any_cut_wrote_goes_on_in_any_other(name: str, plain: tuple[Path, Found]) -> None:
    """The files are the same whoever wrote them (above), so one of them stands for all."""
    assert set(run_ranks(resume, GRIDS[name].processes, name, plain[0])) == {plain[1].again}


def test_the_files_are_those_of_safetensors(plain: tuple[Path, Found]) -> None:
    models = load_file(plain[0] / "model.safetensors")
    model = {name.removeprefix("Net."): value for name, value in models.items() if name.startswith("Net.")}
    Net(3).load_state_dict(model, strict=True)
    assert torch.equal(model["embed.weight"], model["head.weight"])
    kept = load_file(plain[0] / "checkpoints" / "step-0000000001" / "tensors.safetensors")
    assert torch.equal(kept["objects.model.embed.weight"], model["embed.weight"])
    assert "objects.model.head.weight" not in kept  # one tensor, once


# ---- processes that have come apart


def change_copy(training: Training) -> None:
    p = dict(training.model.named_parameters())["wide.weight"]
    mine = piece(p).values
    assert mine is not None
    mine[-1] += 1


def change_tied(training: Training) -> None:
    training.model.embed.weight.data[3] += 1


def change_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] /= 2


def forget_state(training: Training) -> None:
    del training.optimizer.state[next(iter(training.optimizer.state))]


def change_small(training: Training) -> None:
    training.average.n_averaged += 1


@pytest.mark.parametrize(
    ("name", "odd", "change", "message"),
    [
        ("2 x shard 2", 3, change_copy, r"model\.wide\.weight: rank 1 and rank 3 differ"),
        ("2 x stages 2", 2, change_copy, r"model\.wide\.weight: rank 0 and rank 2 differ"),
        ("stages 3", 2, change_tied, r"model\.embed\.weight: rank 0 and rank 2 differ"),
        ("shard 3", 1, change_rate, r"optimizer\.param_groups\[0\]\.lr: ranks 0, 2 and rank 1 differ"),
        ("2 x stages 2", 2, forget_state, r"optimizer\.state\[0\]\.exp_avg: there is none on rank 2"),
        ("shard 2", 1, change_small, r"average\.n_averaged: rank 0 and rank 1 differ"),
    ],
)
def test_what_differs_between_copies_is_named(
    name: str, odd: int, change: Callable[[Training], None], message: str, tmp_path: Path
) -> None:
    def work() -> str:
        with ranks_of(name) as rank:
            training = Training(name, rank, tmp_path)
            training.step(0)
            if rank == odd:
                change(training)
            with pytest.raises(MismatchError, match=message) as caught:
                training.saved.fingerprint("the end")
            return str(caught.value)

    assert len(set(run_ranks(work, GRIDS[name].processes))) == 1


def test_what_no_process_has_is_refused(tmp_path: Path) -> None:
    def work() -> None:
        with ranks_of("stages 2") as rank:
            training = Training("stages 2", rank, tmp_path)
            training.model.norm.running_mean = torch.empty(103, device="meta")
            with pytest.raises(UsageError, match=r"no process has the values of model\.norm\.running_mean"):
                training.saved.fingerprint("the end")

    run_ranks(work, 2)


def test_what_does_not_come_back_is_named_on_every_process(plain: tuple[Path, Found]) -> None:
    class Forgets(torch.optim.AdamW):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            for p, state in self.state.items():
                if p.shape == (103,):
                    state["exp_avg"].zero_()

    def work(name: str) -> str:
        with ranks_of(name) as rank:
            training = Training(name, rank, plain[0])
            training.optimizer = Forgets(training.model.parameters(), 0.1, amsgrad=True)
            training.saved.objects["optimizer"] = training.optimizer
            with pytest.raises(CheckpointError, match=r"optimizer \(Forgets\) does not come back.*changed optim") as e:
                training.saved.load_newest()
            return str(e.value)

    for name in ("stages 3", "shard 2"):
        assert len(set(run_ranks(work, GRIDS[name].processes, name))) == 1


# ---- a disk that fails, and memory


@pytest.mark.parametrize("name", ["stages 2", "2 x shard 2"])
def test_a_failed_disk_is_told_to_all_and_nobody_waits(name: str, tmp_path: Path) -> None:
    def work() -> list[Any]:
        with ranks_of(name) as rank:
            training = Training(name, rank, tmp_path)
            training.step(0)
            if rank == 0:
                tmp_path.joinpath("checkpoints").write_text("in the way")
            found = [training.save()]
            if rank == 0:
                tmp_path.joinpath("checkpoints").unlink()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("evenstep.train.checkpoint.write_tensors", _full)
                found.append(training.save())
            return [*found, training.save(), training.step(1)]

    found = run_ranks(work, GRIDS[name].processes)
    assert [one == found[0] for one in found] == [True] * len(found)
    in_the_way, full, written, _ = found[0]
    assert "cannot write" in in_the_way
    assert "No space left" in full
    assert written is None
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000001"]


def _full(path: Path, entries: object, data: Any) -> None:
    next(data)
    raise OSError(28, "No space left on device")


def test_a_process_that_has_gone_is_told(tmp_path: Path) -> None:
    """The others do not wait for the tensors that it would have sent, and nothing of the checkpoint is left."""

    def gone(*_: object, **__: object) -> None:
        raise KeyError("gone")

    def work() -> None:
        with ranks_of("stages 3") as rank, pytest.MonkeyPatch.context() as patch:
            training = Training("stages 3", rank, tmp_path)
            if rank == 2:
                patch.setattr(dist, "send", gone)
            with pytest.raises({0: PeerFailed, 1: (PeerFailed, KeyError), 2: KeyError}[rank]):  # type: ignore[call-overload]
                training.save()

    run_ranks(work, 3)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_no_process_holds_more_than_its_own_and_one_part(tmp_path: Path) -> None:
    """Counted: the bytes that lie in rank 0's buffers at a time, and that each process sends."""
    live: list[int] = [0, 0]  # now, at most
    sent: list[int] = []

    def received(buffer: Tensor, **more: Any) -> None:
        live[0] += buffer.numel()
        live[1] = max(live)
        weakref.finalize(buffer.untyped_storage(), freed, buffer.numel())  # the memory, not what looks at it
        recv(buffer, **more)

    def freed(size: int) -> None:
        live[0] -= size

    def sending(buffer: Tensor, **more: Any) -> None:
        sent.append(buffer.numel())
        send(buffer, **more)

    recv, send = dist.recv, dist.send

    def work(name: str) -> tuple[int, int, int]:
        with ranks_of(name) as rank, pytest.MonkeyPatch.context() as patch:
            training = Training(name, rank, tmp_path)
            training.step(0)
            fingerprint = training.saved.fingerprint("saving")
            patch.setattr("evenstep.train.tensor_file._PART", 4096)
            patch.setattr(dist, "recv", received)
            patch.setattr(dist, "send", sending)
            training.saved.save(1, {"fingerprint": fingerprint}, 1)
            return live[1], max(sent, default=0), sum(sent)

    for name in ("shard 3", "stages 3"):
        first, *others = run_ranks(work, GRIDS[name].processes, name)
        size = (tmp_path / "checkpoints" / "step-0000000001" / "tensors.safetensors").stat().st_size
        assert 0 < first[0] <= 2 * 4096
        assert first[2] == 0
        for _, largest, total in others:
            assert 0 < largest <= 4096
            assert total < size / 2


def test_each_process_reads_what_it_needs_and_copies_it_once(plain: tuple[Path, Found]) -> None:
    """Counted: the bytes that are asked for, as views of the file, and those that are copied aside."""
    size = (plain[0] / "checkpoints" / "step-0000000001" / "tensors.safetensors").stat().st_size
    asked: dict[str, int] = {}
    aside: set[str] = set()

    class Watched(Stored):
        def rows(self, start: int, stop: int) -> Tensor:
            found = super().rows(start, stop)
            asked[self._name] = max(asked.get(self._name, 0), found.numel() * found.element_size())
            return found

        def value(self) -> Any:
            aside.add(self._name)
            return super().value()

    def work(name: str) -> tuple[int, set[str]]:
        with ranks_of(name) as rank, pytest.MonkeyPatch.context() as patch:
            training = Training(name, rank, plain[0], seed=2)
            patch.setattr("evenstep.train.state.Stored", Watched)
            training.saved.load_newest()
            return sum(asked.values()), aside

    # The middle stage has small tensors only, the last one the tied weight and the frozen layer.
    for name, shares in {"plain": [1.0], "shard 3": [0.4, 0.4, 0.4], "stages 3": [0.95, 0.03, 0.15]}.items():
        for (bytes_, copied), share in zip(run_ranks(work, GRIDS[name].processes, name), shares, strict=True):
            assert 0 < bytes_ < size * share
            assert not any(path.startswith(("objects.model", "objects.average")) for path in copied)
            if "shard" in name:
                assert {path.rpartition(".")[2] for path in copied} == {"step"}


# ---- checkpoints of what trains


def test_a_checkpoint_of_what_trains_goes_with_its_base(tmp_path: Path) -> None:
    def work(name: str, what: str) -> str:
        with ranks_of(name) as rank:
            training = Training(name, rank, tmp_path, seed=1, save="all" if what == "all" else "trained")
            if what == "other base":
                training.model.frozen.bias.data.add_(1)
            if what == "resume":
                for p in training.model.parameters():
                    if p.requires_grad:
                        p.data.mul_(2)
            if what == "save":
                training.step(0)
                training.save()
                training.saved.save_model(tmp_path / "model.safetensors")
            else:
                training.saved.load_newest()
            found = training.step(1)
            if what == "resume":
                training.model.frozen.requires_grad_(True)
                with pytest.raises(UsageError, match=r"frozen\.weight was frozen when the model was prepared"):
                    training.save(2)
            return found

    whole = run_ranks(work, 1, "plain", "save")[0]
    before = files(tmp_path)
    for name in ("shard 2", "stages 3"):
        assert set(run_ranks(work, GRIDS[name].processes, name, "save")) == {whole}
        assert files(tmp_path) == before
        assert set(run_ranks(work, GRIDS[name].processes, name, "resume")) == {whole}
    with pytest.raises(CheckpointError, match="goes with other base weights of model"):
        run_ranks(work, 2, "shard 2", "other base")
    with pytest.raises(CheckpointError, match="holds model as prepared with save='trained', now"):
        run_ranks(work, 2, "stages 2", "all")
    kept = load_file(tmp_path / "checkpoints" / "step-0000000001" / "tensors.safetensors").keys()
    assert {n for n in kept if n.startswith("objects.model.frozen")} == set()
    assert {"objects.model.wide.weight", "objects.model.norm.running_mean"} < kept
    names = {n.removeprefix("Net.") for n in load_file(tmp_path / "model.safetensors") if n.startswith("Net.")}
    assert names == {name for name in Net(1).state_dict() if not name.startswith("frozen")}


def test_only_all_and_what_trains_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="save='none', expected 'all' or 'trained'"):
        Training("plain", 0, tmp_path, save="none")
