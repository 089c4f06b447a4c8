"""A file or a folder is published whole or not at all: written aside, fsynced, renamed, and its folder fsynced."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from evenstep.errors import MachineError

_ASIDE = ".aside"  # how the name of what is not yet published ends
_REPLACED = ".replaced"


def aside(path: Path) -> Path:
    """A name beside `path`, free and on the same file system, for what will be published as `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_ASIDE}")


def is_aside(path: Path) -> bool:
    """Whether `path` is something that a process which died was still writing."""
    return path.name.startswith(".") and path.name.endswith(_ASIDE)


def fsync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk (its files' content is theirs to sync)."""
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


def fsync_tree(folder: Path) -> None:
    """Put everything under `folder` on the disk: the files, then the folders from the leaves up."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _fsync(Path(root, name), os.O_RDONLY)
        fsync_folder(Path(root))


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A free path to write a file to; what is there when the block ends without an error replaces `path`.

    With an error, `path` stays what it was and nothing is left beside it. An OSError comes out as a MachineError.
    """
    with _as_machine_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = aside(path)
        try:
            yield beside
            _fsync(beside, os.O_RDONLY)
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes `path` as with `whole_path`."""
    with whole_path(path) as beside, beside.open("xb") as file:
        yield file


def write_whole(path: Path, data: bytes) -> None:
    """Publish `data` as the file `path`. MachineError if the disk does not take it."""
    with whole_file(path) as file:
        file.write(data)


def write_directory(final: Path, write_files: Callable[[Path], object]) -> None:
    """Let `write_files` fill a folder aside, then publish it as `final`.

    A `final` that is already there steps back under another name until the new one is in its place. With any
    error nothing of the new folder is left. An OSError comes out as a MachineError.
    """
    with _as_machine_error(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        beside = aside(final)
        old = replaced(final)
        try:
            beside.mkdir()
            write_files(beside)
            fsync_tree(beside)
            if final.exists():
                os.rename(final, old)
            os.rename(beside, final)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            with suppress(OSError):
                if old.exists() and not final.exists():
                    os.rename(old, final)
            raise
        fsync_folder(final.parent)
        shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a published folder. A crash in between leaves it whole, or as something aside, never in part.

    An OSError comes out as a MachineError.
    """
    with _as_machine_error(path, "remove"):
        beside = aside(path)
        os.rename(path, beside)
        shutil.rmtree(beside)


def clean_up(folder: Path) -> None:
    """Remove what a process that died left aside in `folder`.

    A folder that stepped back for one that never came returns to its place. Only for the process that owns the run
    directory: this would remove what another one is writing. An OSError comes out as a MachineError.
    """
    if not folder.is_dir():
        return
    with _as_machine_error(folder, "clean up"):
        for path in folder.iterdir():
            if is_aside(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.name.startswith(".") and path.name.endswith(_REPLACED):
                final = path.with_name(path.name[1 : -len(_REPLACED)])
                shutil.rmtree(path) if final.exists() else os.rename(path, final)


def replaced(path: Path) -> Path:
    """Where a published folder waits until the one that replaces it is in its place."""
    return path.with_name(f".{path.name}{_REPLACED}")


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _as_machine_error(path: Path, doing: str = "write") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"cannot {doing} {path}: {error.strerror or error}",
            do="free some space, or name a place that can be written (--run DIR); what was there is unchanged",
        ) from error
