"""Files and Hugging Face data sets as streams: every record once, from any place on, and the same model."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch import nn

import evenstep
from evenstep.errors import DataError, IdentityError, UsageError
from evenstep.plan.lanes import Lanes
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from evenstep.train.data.lane import Lane
from evenstep.train.data.lane_reader import LaneReader, LaneSamples
from tests.ranks import run_ranks
from tests.train.scripts import adamw, fingerprints, training_run

datasets.IterableDataset.from_generator(lambda: iter(()))  # once, before the forks: it imports much

SIZES = [7, 12, 0, 9, 5]  # records of each file


def numbers(file: int) -> range:
    return range(100 * file, 100 * file + SIZES[file])


def text(folder: Path) -> list[Path]:
    for file in range(len(SIZES)):
        mark = "\ufeff" if file % 2 else ""  # as Windows writes it
        (folder / f"{file}.txt").write_text(mark + "".join(f"{n}é\r\n" for n in numbers(file)), newline="")
    return sorted(folder.glob("*.txt"))


def jsonl(folder: Path) -> list[Path]:
    for file in range(len(SIZES)):
        lines = "".join(json.dumps({"n": n}) + "\n\n" for n in numbers(file)).rstrip("\n")
        (folder / f"{file}.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" * (file % 2) + lines.encode()))
    return sorted(folder.glob("*.jsonl.gz"))


def parquet(folder: Path) -> list[Path]:
    for file in range(len(SIZES)):
        table = pa.table({"n": pa.array(list(numbers(file)), pa.int64()), "more": pa.array([0.5] * SIZES[file])})
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=4)
    return sorted(folder.glob("*.parquet"))


def tar(folder: Path) -> list[Path]:
    """Some are several archives, one behind the other."""
    for file in range(len(SIZES)):
        parts = [numbers(file)] if file % 2 else [numbers(file)[k::4] for k in range(4)]
        (folder / f"{file}.tar").write_bytes(b"".join(map(archive_of, parts)))
    return sorted(folder.glob("*.tar"))


def archive_of(samples: Sequence[int]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for n in samples:
            long = "x" * (120 if n % 3 == 0 else 0)  # some names need a header of their own
            for suffix in ("cls", "seg.png"):
                member = tarfile.TarInfo(f"part/{long}{n}.{suffix}")
                member.size = len(str(n))
                archive.addfile(member, io.BytesIO(str(n).encode()))
    return written.getvalue()


def number_of(record: Any) -> int:
    if isinstance(record, str):
        return int(record.removesuffix("é"))
    if "__key__" in record:
        assert set(record) == {"__key__", "cls", "seg.png"}
        assert record["cls"] == record["seg.png"]
        return int(record["cls"])
    return int(record["n"])


FORMATS: dict[str, Callable[[Path], list[Path]]] = {"text": text, "jsonl": jsonl, "parquet": parquet, "tar": tar}


def lane_of(stream: evenstep.Stream, lane: int, lanes: int, start: int = 0, mark: Any = None) -> Lane:
    return Lane(stream, lane, lanes, 0, seed=0, shuffle=True, start=start, mark=mark)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lanes", [2, 5, 8])
def test_each_record_is_in_one_lane_and_every_place_can_be_gone_on_from(kind: str, lanes: int, tmp_path: Path) -> None:
    stream = evenstep.stream(FORMATS[kind](tmp_path), share=True, block=3, transform=number_of)
    found: Counter[int] = Counter()
    for number in range(lanes):
        whole, marks = [], []
        lane = lane_of(stream, number, lanes)
        while lane.more():
            whole += list(lane.take(1))
            marks.append(lane.mark)
        lane.close()
        found.update(whole)
        for start in range(1, len(whole)):
            mark = marks[start - 1]
            assert mark is not None
            assert (mark.state is not None) == (start > 3)
            rest = lane_of(stream, number, lanes, start, mark)
            assert list(rest.take(100)) == whole[start:]
            assert rest.again is not None
            assert rest.again.records <= 7  # two blocks, and one to see whether there is more
            rest.close()
    assert sorted(found) == [n for file in range(len(SIZES)) for n in numbers(file)]
    assert set(found.values()) == {1}


def test_files_that_changed_are_named_and_so_are_torn_records(tmp_path: Path) -> None:
    paths = jsonl(tmp_path)
    stream = evenstep.stream(paths, block=3)
    lane = lane_of(stream, 1, 5)
    list(lane.take(5))
    lane.close()
    paths[1].write_bytes(gzip.compress(b"1\n" * 50))
    with pytest.raises(ValueError, match=r"1.jsonl.gz, record 3: ValueError: it has \d+ bytes, and had \d+ when"):
        lane_of(stream, 1, 5, 5, lane.mark)
    with pytest.raises(DataError, match=r"lane 1 of the stream does not give the same samples again"):
        lane_of(evenstep.stream(paths, block=3), 1, 5, 5, lane.mark)
    paths[1].write_bytes(gzip.compress(b'{"n": 1}\n{"n": 2'))
    with pytest.raises(ValueError, match=r"1.jsonl.gz, record 1: JSONDecodeError"):
        list(lane_of(evenstep.stream(paths, block=3), 1, 5).take(9))


def test_a_file_that_grows_is_named_and_so_is_what_is_no_utf8(tmp_path: Path) -> None:
    lines = tmp_path / "a.txt"
    lines.write_text("1\n2\n")
    lane = lane_of(evenstep.stream(lines, block=1), 0, 1)
    assert list(lane.take(1)) == ["1"]
    with lines.open("a") as file:
        file.write("3\n")
    with pytest.raises(ValueError, match=r"a.txt, record 3: ValueError: it has 6 bytes, and had 4 when the stream was"):
        list(lane.take(9))
    for name, content in {"b.txt": "1\né\n".encode("latin1"), "b.jsonl": '1\n"é"\n'.encode("latin1")}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}, record 1: it is not UTF-8 .*iconv"):
            list(lane_of(evenstep.stream(tmp_path / name), 0, 1).take(9))


def test_a_sample_of_a_tar_file_ends_with_its_archive_and_has_no_links(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(archive_of([4]) * 3)
    assert [record["cls"] for record in lane_of(evenstep.stream(path), 0, 1).take(9)] == [b"4"] * 3
    path.write_bytes(archive_of([4]) + b"more")
    with pytest.raises(ValueError, match=r"record 0: ValueError: there is no member of a tar file at byte 10240, nor"):
        list(lane_of(evenstep.stream(path), 0, 1).take(9))
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("b.cls")
        link.type, link.linkname = tarfile.LNKTYPE, "a.cls"
        archive.addfile(link)
    with pytest.raises(ValueError, match=r"'b.cls' is not a file but refers to 'a.cls': write links out"):
        list(lane_of(evenstep.stream(path), 0, 1).take(9))


def test_a_file_that_is_torn_or_none_of_its_kind_is_named(tmp_path: Path) -> None:
    whole = Path(tar(tmp_path)[0]).read_bytes()
    with tarfile.open(tmp_path / "0.tar") as archive:
        second = archive.getmembers()[2].offset  # of the second sample
    torn = {
        "a.tar": (
            whole[: second + 300],
            rf"record \d: ValueError: there is no member of a tar file at byte {second}, nor",
        ),
        "b.tar": (whole[:second], "nor its end: it is torn"),  # tarfile takes both for the end
        "c.tar": (b"text" * 1000, "record 0: ReadError"),
        "d.parquet": (b"PAR1" * 10, "record 0: ArrowInvalid"),
        "e.jsonl.gz": (b'{"n": 1}', "record 0: BadGzipFile"),
    }
    for name, (content, words) in torn.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{tmp_path / name}, {words}" if "record" in words else words):
            list(lane_of(evenstep.stream(tmp_path / name), 0, 1).take(99))
    with pytest.raises(ValueError, match=r"record 0: ValueError: it has no column m, but n"):
        list(lane_of(evenstep.stream(parquet(tmp_path)[:1], columns=["m"]), 0, 1).take(1))


def test_what_files_cannot_be_is_said(tmp_path: Path) -> None:
    paths = text(tmp_path)
    refused = {
        "expected one format": [paths[0], "b.jsonl"],
        "does not say what it holds": ["data.bin"],
        r"in a way that is not read \(.zst\)": [tmp_path / "a.jsonl.zst"],
        "cannot be read: No such file": [tmp_path / "missing.txt"],
        r"{0..4}.txt cannot be read: .*(?s:.*)braces are not expanded": [tmp_path / "{0..4}.txt"],
        "https://host/a.txt is an address": "https://host/a.txt",
        "no file is like": str(tmp_path / "*.tar"),
        "is an empty list": [],
        "is a folder, expected files": [tmp_path],
        "expected a function make": 3,
        "which does not say what one lane of it is": torch.utils.data.ChainDataset([]),
    }
    for words, source in refused.items():
        with pytest.raises(UsageError, match=words):
            evenstep.stream(source)
    with pytest.raises(UsageError, match=r"returned str, expected an iterator over records"):
        lane_of(evenstep.stream(lambda lane, lanes, epoch: "a.txt"), 0, 1)
    with pytest.raises(UsageError, match=r"format='csv', expected one of text, jsonl, parquet, tar"):
        evenstep.stream(paths, format="csv")
    with pytest.raises(UsageError, match=r"columns=.* is for parquet"):
        evenstep.stream(paths, columns=["n"])
    with pytest.raises(UsageError, match="share=True is for files"):
        evenstep.stream(lambda lane, lanes, epoch: [], share=True)
    with pytest.raises(UsageError, match=r"columns='n', expected a list"):
        evenstep.stream(paths, columns="n")
    assert evenstep.stream([str(tmp_path / "*.txt")]).source.about() == evenstep.stream(paths).source.about()
    assert evenstep.stream(str(tmp_path / "*.txt")).source.about() == evenstep.stream(paths).source.about()
    with pytest.raises(UsageError) as caught:
        evenstep.stream(paths).source.notes(8)
    assert "the stream has 5 files for 8 lanes" in str(caught.value)
    for way in ("write it as 8 files or more", "a larger micro_batch", "share=True", "read 2 times in all"):
        assert way in str(caught.value)
    (note,) = evenstep.stream(paths, share=True).source.notes(8)
    assert note.startswith("5 files for 8 lanes: each is read by 2 lanes, some by 1")
    (note,) = evenstep.stream(paths).source.notes(3)
    assert note.startswith("5 files do not divide by 3 lanes: 2 lanes have one more")
    assert evenstep.stream(paths).source.notes(5) == []
    (note,) = evenstep.stream([str(tmp_path / "*.txt"), paths[0]]).source.notes(6)
    assert note == f"{paths[0]} is in the list more than once, and so are its records in an epoch"


def test_a_file_that_is_gone_is_named_at_a_resume(tmp_path: Path) -> None:
    for file in range(5):
        rows = [json.dumps({"n": n, "x": [n % 7, file]}) for n in range(6)]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(rows))

    def again(stop: int | None = None) -> Any:
        return train(tmp_path / "run", evenstep.stream(f"{tmp_path}/*.jsonl", transform=in_tensors), stop)

    again(1)
    (tmp_path / "3.jsonl").rename(tmp_path / "7.jsonl")
    with pytest.raises(IdentityError, match=r"gone: 3.jsonl \(\d+ bytes\); new: 7.jsonl \(\d+ bytes\): the rest would"):
        again()
    (tmp_path / "7.jsonl").unlink()
    with pytest.raises(IdentityError, match=r"gone: 3.jsonl \(\d+ bytes\): the rest would"):
        again()


def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for n in numbers(shard % len(SIZES)):
            yield {"n": n + 1000 * (shard // len(SIZES)), "x": [n % 7 + 0.5, float(shard)]}


def hugging_face(shards: int) -> Any:
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(shards))})


def in_tensors(row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.tensor(row["x"]) + 0.1 * torch.randn(2), row["n"]


def loss_fn(model: nn.Module, batch: Any) -> Any:
    values, labels = batch
    return (model(values).squeeze(1) - labels % 5).square().sum(), len(labels)


def train(directory: Path, data: evenstep.Stream, stop: int | None = None, loaders: int = 0) -> tuple[list[str], int]:
    with training_run(directory, global_batch=10, micro_batch=2, checkpoint_every=1) as run:
        model = run.prepare(nn.Linear(2, 1))
        optimizer = adamw(model.parameters())
        steps = run.steps(data, epochs=2, loaders=loaders)
        run.restore(model=model, optimizer=optimizer)
        samples = 0
        for step in steps:
            if step.number == stop:
                run._close(failed=True)
                return [], samples
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            samples += step.samples
    return fingerprints(run), samples


def shuffled(shards: int, share: bool, buffer: bool) -> evenstep.Stream:
    data = hugging_face(shards)
    if buffer:
        data = data.shuffle(seed=1, buffer_size=4)
    stream = evenstep.stream(data, share=share, block=2, transform=in_tensors)
    (line,) = stream.source.notes(5) or [""]
    assert ("the data set has a shuffle buffer" in line) == buffer
    return stream


@pytest.mark.parametrize(("shards", "share", "buffer"), [(10, False, False), (3, True, False), (10, False, True)])
def test_a_hugging_face_stream_trains_one_model_through_kills(
    shards: int, share: bool, buffer: bool, tmp_path: Path
) -> None:
    def body(directory: Path, stop: int | None = None, loaders: int = 0) -> tuple[list[str], int]:
        return train(directory, shuffled(shards, share, buffer), stop, loaders)

    ((alone, samples),) = run_ranks(body, 1, tmp_path / "1")
    assert samples == 2 * sum(SIZES[shard % 5] for shard in range(shards))
    run_ranks(body, 2, tmp_path / "2", 2)
    marks = Checkpoints(RunPaths(tmp_path / "2")).about(2)["stream"]["marks"]
    assert any(state is not None for _, _, state, _ in marks.values()) != buffer
    if not buffer:
        run_ranks(body, 3, tmp_path / "2", len(alone) - 2, 1)
    for found, _ in run_ranks(body, 3 if buffer else 5, tmp_path / "2"):
        assert found[-2:] == alone[-2:]


def test_a_map_over_batches_that_draws_is_read_again_and_take_is_told_of() -> None:
    """...from the beginning: what it draws follows from where in a batch it is begun."""

    def body() -> None:
        for draw, seeks in ((torch.rand, False), (torch.zeros, True)):
            mapped = hugging_face(6).map(lambda rows, draw=draw: {"r": draw(len(rows["n"])).tolist()}, batched=True)
            stream = evenstep.stream(mapped, block=3)
            lane, marks, whole = lane_of(stream, 1, 3), [], []
            while lane.more():
                whole += list(lane.take(1))
                marks.append(lane.mark)
            assert any(mark.state is not None for mark in marks if mark) == seeks
            assert list(lane_of(stream, 1, 3, 8, marks[7]).take(99)) == whole[8:]
        (note,) = evenstep.stream(hugging_face(6).skip(2).take(9)).source.notes(3)
        assert note.startswith("each lane does .skip() and .take() by itself, over its shards, with its part of the")

    run_ranks(body, 1)


def test_a_hugging_face_stream_with_fewer_shards_than_lanes_says_so() -> None:
    def body() -> None:
        with pytest.raises(UsageError, match=r"is split by node \(split_dataset_by_node\)"):
            evenstep.stream(split_dataset_by_node(hugging_face(4), rank=0, world_size=2))
        with pytest.raises(UsageError, match="is a Dataset, which has a length"):
            evenstep.stream(datasets.Dataset.from_dict({"n": [1]}))
        with pytest.raises(UsageError, match="the stream has 3 shards for 5 lanes"):
            evenstep.stream(hugging_face(3)).source.notes(5)

    run_ranks(body, 1)


def test_a_shuffle_without_a_seed_is_named(tmp_path: Path) -> None:
    def body() -> str:
        data = hugging_face(10).shuffle(buffer_size=20)
        with pytest.raises(UsageError) as caught:
            train(tmp_path, evenstep.stream(data, transform=in_tensors))
        return caught.value.message

    for message in run_ranks(body, 2):
        assert message.endswith("the stream is not the same on all processes")


def read_with_loaders() -> None:
    lanes = Lanes(4, 1)
    stream = evenstep.stream(hugging_face(10), block=2, transform=number_of)
    found: Counter[int] = Counter()
    samples = LaneSamples(stream, lanes, seed=0, shuffle=True, collate=list, marks={}, epoch=0, ended=[])
    reader = LaneReader(samples, lanes, range(4), seed=0, rank=0, loaders=3, say=print)
    for turn in range(100):
        read = reader.read(0, turn)
        for _, batch in read.values():
            found.update(batch or [])
        if not any(part.more for part, _ in read.values()):
            break
    first = reader.read(1, 0)  # asked for while the loader processes were ahead in epoch 0
    assert [part.size for part, _ in first.values()] == [1] * 4
    reader.close()
    assert sum(found.values()) == 2 * sum(SIZES)
    assert set(found.values()) == {1}


def test_loader_processes_read_whole_lanes() -> None:
    """A data set that looks at torch's worker would leave records out."""
    run_ranks(read_with_loaders, 1)
