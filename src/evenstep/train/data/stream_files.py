"""Streams of files: text, JSON lines, parquet and tar files (webdataset's layout), each with a place to go on from."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from evenstep.errors import UsageError
from evenstep.plan.lanes import Piece, pieces

_SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".tar": "tar",
    ".tgz": "tar",
}
_ROWS = 256  # of a parquet file that are made Python objects at a time
_TAR_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # as webdataset has it: the key ends at the first dot

END = object()


@dataclass(frozen=True)
class Files:
    """Files whose records are the stream's."""

    paths: Sequence[str]
    format: str | None
    share: bool
    columns: tuple[str, ...] | None
    _about: str = field(init=False, default="")
    draws_nothing = True

    def __post_init__(self) -> None:
        kinds = {self.format or _format(path) for path in self.paths}
        if len(kinds) > 1:
            raise UsageError(
                f"the files of the stream are {' and '.join(sorted(kinds))}, expected one format",
                do="give files of one format, or format=",
            )
        (kind,) = kinds
        if kind not in _READERS:
            raise UsageError(f"format={kind!r}, expected one of {', '.join(_READERS)}")
        if self.columns is not None and kind != "parquet":
            raise UsageError(f"columns={list(self.columns)} is for parquet files, these are {kind}", do="leave it out")
        if kind == "parquet":
            _parquet()
        object.__setattr__(self, "format", kind)
        sizes = [(Path(path).name, _size(path)) for path in self.paths]
        names = hashlib.blake2b(repr(sizes).encode(), digest_size=4).hexdigest()
        total = sum(size for _, size in sizes)
        object.__setattr__(self, "_about", f"{len(sizes)} {kind} files, {total} bytes, names and sizes {names}")

    def about(self) -> str:
        return self._about

    def notes(self, lanes: int) -> list[str]:
        return share_out(len(self.paths), lanes, self.share, "files")

    def open(self, lane: int, lanes: int, epoch: int) -> FilesOfLane:
        self.notes(lanes)
        return FilesOfLane(self, pieces(len(self.paths), lanes, lane))

    def reader(self, file: int, at: Any) -> Reader:
        """File number `file`, at the beginning (None) or at a place that its reader has named."""
        assert self.format is not None
        kind = _READERS[self.format]
        return kind(self.paths[file], at, self.columns)


def share_out(files: int, lanes: int, share: bool, what: str) -> list[str]:
    """What to say of so many files (shards) in so many lanes. UsageError where lanes would have nothing to read."""
    most = -(-lanes // files)
    if files < lanes and not share:
        raise UsageError(
            f"the stream has {files} {what} for {lanes} lanes (one for each micro-batch of a step): some lanes would "
            "have nothing to read",
            do=f"write it as {lanes} {what} or more, best a multiple of that; or take fewer lanes, by a larger "
            f"micro_batch (global_batch / micro_batch = {lanes}); or evenstep.stream(..., share=True): several lanes "
            f"read one and take turns at its records, and so each is read {most} times in all",
        )
    if files < lanes:
        uneven = "" if lanes % files == 0 else f", some by {most - 1}: lanes end at different steps"
        return [f"{files} {what} for {lanes} lanes: each is read by {most} lanes{uneven}, in whole by each of them"]
    if files % lanes:
        return [
            f"{files} {what} do not divide by {lanes} lanes: {files % lanes} lanes have one more, and the last steps "
            "of an epoch are of those lanes alone"
        ]
    return []


class FilesOfLane(Iterator[Any]):
    """The records of a lane, file after file."""

    def __init__(self, files: Files, mine: Sequence[Piece]) -> None:
        self._files, self._mine = files, mine
        self._piece = self._number = 0  # of the next record, and its number in that file
        self._at: Any = None
        self._reader: Reader | None = None

    def __next__(self) -> Any:
        while self._piece < len(self._mine):
            piece = self._mine[self._piece]
            try:
                record = self._record(piece)
            except Exception as error:
                self.close()
                path = self._files.paths[piece.file]
                raise ValueError(f"{path}, record {self._number}: {type(error).__name__}: {error}") from error
            if record is not END:
                self._number += 1
                return record
            self.close()
            self._piece, self._number, self._at = self._piece + 1, 0, None
        raise StopIteration

    def _record(self, piece: Piece) -> Any:
        """The next one of this lane in the file, or END."""
        if self._reader is None:
            self._reader = self._files.reader(piece.file, self._at)
        while self._number % piece.parts != piece.part:
            if not self._reader.skip():
                return END
            self._number += 1
        return self._reader.read()

    def close(self) -> None:
        if self._reader is not None:
            self._at = self._reader.at
            self._reader.close()
            self._reader = None

    def state_dict(self) -> dict[str, Any]:
        at = self._at if self._reader is None else self._reader.at
        return {"piece": self._piece, "number": self._number, "at": at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self._piece, self._number, self._at = state["piece"], state["number"], state["at"]


class Reader(ABC):
    """One file, from a place (None: its beginning) on."""

    @abstractmethod
    def __init__(self, path: str, at: Any, columns: Sequence[str] | None) -> None: ...

    @property
    @abstractmethod
    def at(self) -> Any:
        """The place of the next record, as plain values."""

    @abstractmethod
    def read(self) -> Any:
        """The next record, or END."""

    @abstractmethod
    def skip(self) -> bool:
        """Passes over the next record. False if there is none."""

    @abstractmethod
    def close(self) -> None: ...


class Text(Reader):
    """Lines, without their ends."""

    def __init__(self, path: str, at: Any, columns: Sequence[str] | None) -> None:
        self._file, self._at = _open(path), at or 0
        if self._at:
            self._file.seek(self._at)

    @property
    def at(self) -> int:
        return self._at

    def read(self) -> Any:
        line = self._line()
        return line.decode().rstrip("\r\n") if line else END

    def skip(self) -> bool:
        return bool(self._line())

    def close(self) -> None:
        self._file.close()

    def _line(self) -> bytes:
        line = self._file.readline()
        self._at += len(line)
        return line


class JsonLines(Text):
    """A JSON value a line; blank lines are no records."""

    def read(self) -> Any:
        line = self._line()
        return json.loads(line) if line else END

    def _line(self) -> bytes:
        line = super()._line()
        while line and not line.strip():
            line = super()._line()
        return line


class Parquet(Reader):
    """Rows, as dicts."""

    def __init__(self, path: str, at: Any, columns: Sequence[str] | None) -> None:
        self._file = _parquet().ParquetFile(path)
        self._columns = columns
        names = self._file.schema_arrow.names
        missing = [name for name in columns or () if name not in names and name.partition(".")[0] not in names]
        if missing:  # pyarrow would leave them out
            self._file.close()
            raise ValueError(f"it has no column {', '.join(missing)}, but {', '.join(names)}")
        self._group: int = at[0] if at else 0  # of the next record
        self._row: int = at[1] if at else 0
        self._rows: list[Any] = []
        self._taken = 0
        self._batches = self._from(self._group, self._row)

    @property
    def at(self) -> list[int]:
        return [self._group, self._row]

    def read(self) -> Any:
        if self._taken == len(self._rows):
            found = next(self._batches, None)
            if found is None:
                return END
            self._group, self._row, self._rows = found
            self._taken = 0
        record = self._rows[self._taken]
        self._taken += 1
        self._row += 1
        return record

    def skip(self) -> bool:
        return self.read() is not END

    def close(self) -> None:
        self._batches.close()
        self._file.close()

    def _from(self, group: int, row: int) -> Any:
        for g in range(group, self._file.num_row_groups):
            at = 0
            for batch in self._file.iter_batches(_ROWS, row_groups=[g], columns=self._columns):
                skipped = max(0, min(row - at, len(batch))) if g == group else 0
                if skipped < len(batch):
                    yield g, at + skipped, batch.slice(skipped).to_pylist()
                at += len(batch)


class Tar(Reader):
    """Samples: the neighbouring members of one key, {"__key__": key, suffix: bytes}."""

    def __init__(self, path: str, at: Any, columns: Sequence[str] | None) -> None:
        self._file = _open(path)
        if at:
            self._file.seek(at)
        try:
            self._tar = tarfile.open(fileobj=self._file, mode="r:")  # what is compressed is opened as such
            self._member = self._advance()
        except Exception:
            self._file.close()
            raise

    @property
    def at(self) -> int:
        return self._tar.offset if self._member is None else self._member.offset

    def read(self) -> Any:
        return self._sample(keep=True)

    def skip(self) -> bool:
        return self._sample(keep=False) is not END

    def close(self) -> None:
        self._tar.close()
        self._file.close()

    def _sample(self, keep: bool) -> Any:
        if self._member is None:
            return END
        key = _split(self._member.name)[0]
        sample: dict[str, Any] = {"__key__": key}
        while self._member is not None:
            there, suffix = _split(self._member.name)
            if there != key:
                break
            if suffix in sample:
                raise ValueError(f"two members of {key!r} have the suffix {suffix!r}")
            opened = self._tar.extractfile(self._member) if keep else None
            sample[suffix] = opened.read() if opened is not None else None
            self._member = self._advance()
        return sample

    def _advance(self) -> tarfile.TarInfo | None:
        """The next member that is part of a sample."""
        while True:
            member = self._tar.next()
            self._tar.members.clear()  # type: ignore[attr-defined]  # a large file has many
            if member is None:
                self._refuse_torn()
                return None
            if member.isfile() and _TAR_NAME.fullmatch(member.name):
                return member

    def _refuse_torn(self) -> None:
        """ValueError where the file does not end as tar files do, with zeros: all else is an end for tarfile, too."""
        self._file.seek(self._tar.offset)
        block = self._file.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE or any(block):
            raise ValueError(f"there is no member of a tar file at byte {self._tar.offset}, nor its end: it is torn")


_READERS: dict[str, type[Reader]] = {"text": Text, "jsonl": JsonLines, "parquet": Parquet, "tar": Tar}


def _split(name: str) -> tuple[str, str]:
    found = _TAR_NAME.fullmatch(name)
    assert found is not None
    return found[1], found[2].lower()


def _format(path: str) -> str:
    stem = path.removesuffix(".gz")
    suffix = os.path.splitext(stem)[1].lower()
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"the name of {path} does not say what it holds (known are {', '.join(_SUFFIXES)}, with .gz behind)",
            do="give format='text', 'jsonl', 'parquet' or 'tar'",
        )
    return _SUFFIXES[suffix]


def _open(path: str) -> IO[bytes]:
    if path.endswith((".gz", ".tgz")):
        return gzip.open(path)  # type: ignore[return-value]
    return open(path, "rb", buffering=1 << 16)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", do="check the paths of the stream") from error


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError("parquet files need pyarrow, which is not installed", do="pip install pyarrow") from error
    return pyarrow.parquet
