"""Checkpoints: folders that are there whole or not at all, and say themselves whether they are damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from evenstep.errors import CheckpointError, UsageError
from evenstep.record.paths import RunPaths, checkpoint_step
from evenstep.record.publish import clean_up, remove_directory, write_directory

SCHEMA = 1
MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of one run directory. One process writes them; any may read them."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._whole: set[int] = set()  # written or verified by this process
        self._damaged: dict[int, str] = {}

    def clean_up(self) -> None:
        """Remove what a process that died while writing left. For the process that writes, at its start."""
        clean_up(self._paths.checkpoints)

    def write(self, step: int, write_files: Callable[[Path], object], about: dict[str, object]) -> None:
        """Publish the checkpoint of `step`: the files that `write_files` puts into the folder it is given.

        `about` (plain JSON values) can be read without the files. With any error nothing new is left and the other
        checkpoints are untouched; an OSError, such as a full disk, comes out as a MachineError that names the path.
        """

        def write_all(folder: Path) -> None:
            write_files(folder)
            manifest = _render({"step": step, "about": json.loads(json.dumps(about)), "files": _sums(folder)})
            (folder / MANIFEST).write_bytes(manifest)

        write_directory(self._paths.checkpoint(step), write_all)
        self._damaged.pop(step, None)
        self._whole.add(step)

    def folder(self, step: int) -> Path:
        """Where the files of the checkpoint of `step` lie."""
        return self._paths.checkpoint(step)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged ones too, in rising order."""
        try:
            names = [path.name for path in self._paths.checkpoints.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(step for step in map(checkpoint_step, names) if step is not None)

    def verify(self, step: int) -> str | None:
        """Why the checkpoint of `step` is damaged, or None if it is whole. Reads every byte of it."""
        reason = self._reason(step)
        if reason is None:
            self._whole.add(step)
            self._damaged.pop(step, None)
        else:
            self._whole.discard(step)
            self._damaged[step] = reason
        return reason

    def newest_whole(self) -> tuple[int | None, dict[int, str]]:
        """The newest step whose checkpoint is whole (None: there is none), and why each newer one is damaged."""
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            reason = self.verify(step)
            if reason is None:
                return step, damaged
            damaged[step] = reason
        return None, damaged

    def about(self, step: int) -> dict[str, Any]:
        """What was said about the checkpoint of `step`. CheckpointError if its manifest cannot be read."""
        try:
            about = self._manifest(step)["about"]
        except _DamageError as damage:
            raise CheckpointError(f"{self.folder(step)} is damaged: {damage}", do="use an older checkpoint") from None
        assert isinstance(about, dict)
        return about

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints; the newest whole one always stays.

        Damaged ones do not count as kept. They go with the ones that are older than what is kept.
        """
        if keep < 1:
            raise UsageError(f"keep is {keep}; at least one checkpoint must stay", do="use --keep 1 or more")
        kept: list[int] = []
        for step in reversed(self.steps()):
            if step in self._damaged:
                continue
            if len(kept) >= keep and any(self._is_whole(one) for one in kept):
                break
            kept.append(step)
        oldest = min(kept, default=0)
        for step in self.steps():
            if step < oldest:
                remove_directory(self.folder(step))
                self._damaged.pop(step, None)
                self._whole.discard(step)

    def _is_whole(self, step: int) -> bool:
        """Whether `step` is whole; one that this process wrote or verified is not read again."""
        return step in self._whole or (step not in self._damaged and self.verify(step) is None)

    def _reason(self, step: int) -> str | None:
        folder = self.folder(step)
        try:
            manifest = self._manifest(step)
            for name, expected in manifest["files"].items():
                _check_file(folder / name, name, expected)
        except _DamageError as damage:
            return str(damage)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        return None

    def _manifest(self, step: int) -> dict[str, Any]:
        try:
            data = (self.folder(step) / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise _DamageError(f"{MANIFEST} is missing") from None
        manifest = _parse(data)
        if manifest["step"] != step:
            raise _DamageError(f"{MANIFEST} is that of step {manifest['step']}")
        return manifest


class _DamageError(Exception):
    """Why a checkpoint is damaged."""


def _render(body: Mapping[str, object]) -> bytes:
    """The manifest: with its own checksum, and in bytes that follow from its content, so that any flipped bit shows."""
    text = json.dumps(body, sort_keys=True, indent=1)
    total = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"v": {SCHEMA}, "sha256": "{total}", "body":\n{text}\n}}\n'.encode()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
        version = content["v"]
        if version == SCHEMA:
            body = content["body"]
            if _render(body) != data:
                _damaged(f"{MANIFEST} does not match its checksum")
            if isinstance(body, dict):
                return body
    except (ValueError, KeyError, TypeError, RecursionError):
        _damaged(f"{MANIFEST} is not a manifest (cut short or overwritten)")
    _damaged(f"{MANIFEST} has schema {version!r}; this evenstep reads {SCHEMA}")


def _damaged(reason: str) -> NoReturn:
    raise _DamageError(reason)


def _sums(folder: Path) -> dict[str, dict[str, object]]:
    sums: dict[str, dict[str, object]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sums[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return sums


def _check_file(path: Path, name: str, expected: Mapping[str, object]) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        _damaged(f"{name} is missing")
    if size != expected["bytes"]:
        cut = isinstance(expected["bytes"], int) and size < expected["bytes"]
        _damaged(f"{name} {'is cut short' if cut else 'is too long'}: {size} bytes instead of {expected['bytes']}")
    if _sha256(path) != expected["sha256"]:
        _damaged(f"{name} does not match its checksum")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
