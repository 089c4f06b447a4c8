"""Streams of files: text, JSON lines, parquet and tar files, cut into lanes."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstep.errors import UsageError
from evenstep.plan.lanes import Piece, pieces
from evenstep.train.data.file_readers import END, JsonLines, Parquet, Reader, Text, pyarrow_parquet
from evenstep.train.data.tar_reader import Tar

_SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".tar": "tar",
    ".tgz": "tar",
}
_UNREAD = (
    ".zst",
    ".zstd",
    ".bz2",
    ".tbz2",
    ".xz",
    ".txz",
    ".lz4",
    ".br",
    ".zip",
    ".7z",
)  # how else files are compressed
_READERS: dict[str, type[Reader]] = {"text": Text, "jsonl": JsonLines, "parquet": Parquet, "tar": Tar}


@dataclass(frozen=True)
class Files:
    """Files whose records are the stream's."""

    paths: Sequence[str]
    format: str | None
    share: bool
    columns: tuple[str, ...] | None
    _about: str = field(init=False, default="")
    _sizes: tuple[int, ...] = field(init=False, default=())  # in bytes
    _twice: tuple[str, ...] = field(init=False, default=())  # paths that come more than once
    draws_nothing = True
    reads_ahead = False

    def __post_init__(self) -> None:
        for path in self.paths:
            _refuse_unread(path)
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
            pyarrow_parquet()
        object.__setattr__(self, "format", kind)
        sizes = [_size(path) for path in self.paths]
        object.__setattr__(self, "_sizes", tuple(sizes))
        object.__setattr__(self, "_twice", tuple(path for path, often in Counter(self.paths).items() if often > 1))
        names = [(Path(path).name, size) for path, size in zip(self.paths, sizes, strict=True)]
        digest = hashlib.blake2b(repr(names).encode(), digest_size=4).hexdigest()
        about = f"{len(sizes)} {kind} files, {sum(sizes)} bytes, names and sizes {digest}"
        object.__setattr__(self, "_about", about)

    def about(self) -> str:
        return self._about

    def parts(self) -> list[str]:
        return [f"{Path(path).name} ({size} bytes)" for path, size in zip(self.paths, self._sizes, strict=True)]

    def notes(self, lanes: int) -> list[str]:
        said = share_out(len(self.paths), lanes, self.share, "files")
        if self._twice:
            said.append(f"{self._twice[0]} is in the list more than once, and so are its records in an epoch")
        return said

    def open(self, lane: int, lanes: int, epoch: int) -> FilesOfLane:
        self.notes(lanes)
        return FilesOfLane(self, pieces(len(self.paths), lanes, lane))

    def reader(self, file: int, at: Any) -> Reader:
        """File number `file`, at the beginning (None) or at a place that its reader has named."""
        assert self.format is not None
        kind = _READERS[self.format]
        self.refuse_changed(file)
        return kind(self.paths[file], at, self.columns)

    def refuse_changed(self, file: int) -> None:
        """ValueError where file number `file` has not the size any more that it had when the stream was made."""
        size, before = os.stat(self.paths[file]).st_size, self._sizes[file]
        if size != before:
            raise ValueError(
                f"it has {size} bytes, and had {before} when the stream was made: files must not change while they are "
                "read; write what comes later to others"
            )


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
                if record is END:
                    self._files.refuse_changed(piece.file)
            except Exception as error:
                self.close()
                path = self._files.paths[piece.file]
                raise ValueError(f"{path}, record {self._number}: {_told(error)}") from error
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


def _told(error: Exception) -> str:
    """What a reader raised, for people."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 ({error}): convert the file (iconv -f latin1 -t utf-8), or give a make of your own"
    return f"{type(error).__name__}: {error}"


def _refuse_unread(path: str) -> None:
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _UNREAD:
        raise UsageError(
            f"{path} is compressed in a way that is not read ({suffix}); plain files are, and those of gzip (.gz)",
            do="decompress it, or give a function that opens it: evenstep.stream(make)",
        )


def _format(path: str) -> str:
    stem = path.removesuffix(".gz")
    suffix = os.path.splitext(stem)[1].lower()
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"the name of {path} does not say what it holds (known are {', '.join(_SUFFIXES)}, with .gz behind)",
            do="give format='text', 'jsonl', 'parquet' or 'tar'; what is none of these, Hugging Face's "
            "load_dataset(..., streaming=True) may read, or a make of your own",
        )
    return _SUFFIXES[suffix]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        do = "check the paths of the stream"
        if "{" in path:
            do = "braces are not expanded: give a pattern (data/*.tar), or a list of paths"
        raise UsageError(f"{path} cannot be read: {error.strerror}", do=do) from error
