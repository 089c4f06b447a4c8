"""Streams: data without a length or a sample number i, cut into lanes."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from evenstep.errors import UsageError
from evenstep.plan.integers import integer

Make = Callable[[int, int, int], Iterable[Any]]

BLOCK = 256


class Source(Protocol):
    """Where the records of a stream come from."""

    draws_nothing: bool
    """Whether reading it draws no random numbers, so that there is nothing to key."""

    @property
    def reads_ahead(self) -> bool:
        """Whether it may draw for records that are asked for later: then it cannot go on from within them."""
        ...

    def open(self, lane: int, lanes: int, epoch: int) -> Iterable[Any]:
        """The records of `lane`. With state_dict and load_state_dict it can go on from within."""
        ...

    def about(self) -> str:
        """What must be the same on every process and after a resume, for people."""
        ...

    def parts(self) -> list[str]:
        """What it consists of, in order, where that has names: a checkpoint keeps them, for people."""
        ...

    def notes(self, lanes: int) -> list[str]:
        """What to tell a person. UsageError where it cannot be cut into so many lanes."""
        ...


@dataclass(frozen=True)
class Stream:
    """A stream for `run.steps`, `run.evaluate` and `run.predict`. Made by `evenstep.stream`."""

    source: Source
    block: int = BLOCK
    transform: Callable[[Any], Any] | None = None

    def __repr__(self) -> str:
        return f"evenstep.stream({self.source.about()}, block={self.block})"


@dataclass(frozen=True)
class Made:
    """The user's own make(lane, lanes, epoch)."""

    make: Make
    draws_nothing = False
    reads_ahead = False

    def open(self, lane: int, lanes: int, epoch: int) -> Iterable[Any]:
        return self.make(lane, lanes, epoch)

    def about(self) -> str:
        return getattr(self.make, "__qualname__", type(self.make).__name__)

    def parts(self) -> list[str]:
        return []

    def notes(self, lanes: int) -> list[str]:
        return []


def stream(
    source: Any,
    *,
    transform: Callable[[Any], Any] | None = None,
    block: int = BLOCK,
    share: bool = False,
    format: str | None = None,
    columns: Sequence[str] | None = None,
) -> Stream:
    """A stream, for `run.steps` in place of a data set. It is cut into lanes, one for each micro-batch of a step.

    source: a function make(lane, lanes, epoch) that returns an iterator over the records of one lane: each record of
        the epoch in one lane. It is called again in each epoch, and after a resume, and must then give the same. An
        iterator (or iterable) with state_dict and load_state_dict goes on from where it was; another is read again.
        Or files: a path, a pattern ("data/*.jsonl"), or a list of these, whose records are lines of text (.txt, str),
        JSON lines (.jsonl), rows (.parquet: dicts; needs pyarrow), or samples of a tar file as webdataset writes them
        (.tar: dicts of bytes by suffix, and "__key__"); .gz behind it is understood. Or an IterableDataset of Hugging
        Face.
    transform: record -> sample, with keyed generators (decoding, augmentation). What is skipped is not transformed.
    block: records are read, and shuffled, so many at a time in each lane; a resume re-reads up to two blocks of a lane.
    share: where there are fewer files than lanes, several lanes read one file, and take turns at its records.
    format: of the files, where their names do not say it: "text", "jsonl", "parquet" or "tar".
    columns: of parquet files, those to read (all).
    """
    block = integer(block)
    if type(block) is not int or block < 1:
        raise UsageError(f"block={block!r}, expected a number of records, at least 1")
    if transform is not None and not callable(transform):
        raise UsageError(f"transform={transform!r}, expected a function record -> sample")
    found = _source(source, share, format, columns)
    return Stream(found, block, transform)


def _source(source: Any, share: bool, format: str | None, columns: Sequence[str] | None) -> Source:
    paths = source if isinstance(source, (list, tuple)) else [source]
    if all(isinstance(path, (str, os.PathLike)) for path in paths):
        from evenstep.train.data.stream_files import Files

        if isinstance(columns, str):
            raise UsageError(f"columns={columns!r}, expected a list of names", do=f"columns=[{columns!r}]")
        return Files(_paths(source), format, share, None if columns is None else tuple(columns))
    for name, given in (("format", format), ("columns", columns)):
        if given is not None:
            raise UsageError(f"{name}={given!r} is for files", do="leave it out, or give a list of paths")
    if type(source).__module__.startswith("datasets.") and isinstance(source, IterableDataset):
        from evenstep.train.data.hugging_face import HuggingFace

        return HuggingFace(source, share)
    if share:
        raise UsageError("share=True is for files and Hugging Face data sets", do="leave it out")
    if isinstance(source, (IterableDataset, DataLoader)):
        raise UsageError(
            f"the stream is a {type(source).__name__}, which does not say what one lane of it is",
            do="give a function: evenstep.stream(lambda lane, lanes, epoch: itertools.islice(iter(data), lane, None, "
            "lanes)), or better one that opens only the files of its lane",
        )
    if not callable(source) and hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        raise UsageError(
            f"the stream is a {type(source).__name__}, which has a length and samples by number",
            do="give it to run.steps, run.evaluate or run.predict as it is",
        )
    if not callable(source):
        raise UsageError(
            f"the stream is a {type(source).__name__}, expected a function make(lane, lanes, epoch) -> iterator, "
            "paths, or an IterableDataset of Hugging Face",
            do="def make(lane, lanes, epoch): return (read(file) for file in files[lane::lanes])",
        )
    return Made(source)


def _paths(source: Any) -> list[str]:
    names = [source] if isinstance(source, (str, os.PathLike)) else source
    if not names:
        raise UsageError("the stream is an empty list of files", do="give at least one path")
    return [path for name in names for path in _like(os.fspath(name))]


def _like(name: str) -> list[str]:
    """The files that a path, or a pattern, means."""
    if "://" in name:
        raise UsageError(
            f"{name} is an address, expected files",
            do="download them; or give Hugging Face's load_dataset(..., streaming=True), or a make of your own",
        )
    if os.path.isdir(name):
        raise UsageError(f"{name} is a folder, expected files", do=f"give a pattern of what is in it: {name}/*.jsonl")
    if not glob.has_magic(name) or os.path.exists(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        raise UsageError(f"no file is like {name!r}", do="check the pattern, and the folder it starts from")
    return found
