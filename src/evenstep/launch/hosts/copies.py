"""A run directory that some hosts do not share: what they need of it goes there, and what they write comes back.

The launcher that started the hosts has the run directory; the others have copies under the same path, made known by the
run's random name. Files go as a tar stream through a connection of their own (ssh, srun), never whole in memory.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from evenstep.errors import MachineError
from evenstep.launch.hosts.line import GREETING
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths, newest_checkpoint
from evenstep.record.publish import fsync_tree, remove_directory
from evenstep.record.uncaught import error_path

_CHUNK = 1 << 20
_HERE, _WANTED, _RECEIVED = b"here\n", b"wanted\n", b"received\n"
_END = ".end"  # the last entry: tarfile takes a stream that is cut between two entries for a whole one
_ADDED = "evenstep.added"  # in the stream: what is to be added to a file, not to replace it


@dataclass(frozen=True)
class Copy:
    """What a host has of the run directory."""

    shared: bool = True  # it sees the launcher's own
    run_id: str | None = None
    step: int | None = None  # of its newest checkpoint


def look(paths: RunPaths, *, shared: bool) -> Copy:
    """What this host has."""
    return Copy() if shared else Copy(False, run_id(paths), Checkpoints(paths).newest_whole()[0])


def glance(paths: RunPaths) -> Copy:
    """What this host has, which may be shared or not. The checkpoint is not read, so it may be damaged."""
    return Copy(False, run_id(paths), newest_checkpoint(paths))


def run_id(paths: RunPaths) -> str | None:
    """The run's random name, if the directory has one."""
    with suppress(OSError):
        return paths.run_id.read_text().strip()
    return None


def state(paths: RunPaths) -> dict[str, None]:
    """What a run needs to go on, but for checkpoints."""
    return _names(paths, paths.identity, paths.finished, paths.metrics_jsonl, paths.metrics_csv)


def results(paths: RunPaths) -> dict[str, None]:
    """What a run leaves besides."""
    return _names(paths, paths.model, paths.tensorboard)


def checkpoint(paths: RunPaths, step: int | None) -> dict[str, None]:
    """The checkpoint of a step."""
    return {} if step is None else _names(paths, paths.checkpoint(step))


def _names(paths: RunPaths, *places: Path) -> dict[str, None]:
    return dict.fromkeys(str(place.relative_to(paths.root)) for place in places)


def written(paths: RunPaths, ranks: Iterable[int], node: int) -> dict[str, int]:
    """What the processes of one node add to, and how long each is now."""
    found = [paths.node_events(node)]
    for rank in ranks:
        found += [paths.log(rank), error_path(paths.log(rank)), paths.events(rank)]
    return {str(path.relative_to(paths.root)): path.stat().st_size if path.exists() else 0 for path in found}


# ---- the launcher's side

Reach = Callable[[int], list[str]]
"""The command that starts `evenstep node` on a node, with our pipes."""


@dataclass
class Carrier:
    """Takes files to and from the copies. Its functions are called in any thread."""

    paths: RunPaths
    reach: Reach
    _running: dict[subprocess.Popen[bytes], int] = field(default_factory=dict)  # with its node
    _lost: set[int] = field(default_factory=set)

    def give(self, node: int, step: int) -> None:
        """Copy the checkpoint of a step, and what else is needed to go on, to a node, unless it has them (where several
        nodes share what this host does not see). MachineError where it is not all received."""
        with self._helper(node, {"take": str(self.paths.root), "step": step}) as (into, out):
            names = state(self.paths)
            if out.readline() == _WANTED:
                names |= checkpoint(self.paths, step)
            write_stream(into, self.paths.root, names)
            into.close()
            if out.read() != _RECEIVED:
                raise OSError("it did not say that all was received")

    def fetch(self, node: int, names: Mapping[str, int | None], *, above: int | None = None) -> None:
        """Copy files and folders of a node's run directory here. With a number, what follows after so many bytes of
        the file is added to ours. `above`: and its newest checkpoint, if of a later step. MachineError where it does
        not all come."""
        with self._helper(node, {"give": str(self.paths.root), "names": dict(names), "above": above}) as (into, out):
            into.close()
            read_stream(out, self.paths.root)

    def stop(self, nodes: Iterable[int]) -> None:
        """End what is under way to and from these nodes, and begin nothing more."""
        self._lost.update(nodes)
        for child, node in list(self._running.items()):
            if node in self._lost:
                child.kill()

    @contextmanager
    def _helper(self, node: int, told: Mapping[str, Any]) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        child = subprocess.Popen(
            self.reach(node),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._running[child] = node
        if node in self._lost:
            child.kill()
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        said: list[bytes] = []
        errors = child.stderr
        listening = threading.Thread(target=lambda: said.append(errors.read()[-2000:]), daemon=True)
        listening.start()
        try:
            child.stdin.write(json.dumps(told).encode() + b"\n")
            child.stdin.flush()
            while (line := child.stdout.readline()) != GREETING.lstrip():
                if not line:
                    raise OSError(f"it ended with code {child.wait()}")
            yield child.stdin, child.stdout
        except (OSError, ValueError, EOFError, tarfile.TarError) as error:
            child.kill()
            listening.join(1.0)
            why = b"".join(said).decode(errors="replace").strip() or str(error)
            raise MachineError(f"files of {self.paths.root} could not be copied: {why}") from error
        finally:
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):
                    pipe.close()
            child.kill()  # all has been said
            child.wait()
            listening.join(1.0)
            errors.close()
            self._running.pop(child)


# ---- a host's side


def serve(told: Mapping[str, Any]) -> bool:
    """Give or take files, if that is what this process was started for."""
    if "give" in told:
        paths = RunPaths(Path(told["give"]))
        write_stream(sys.stdout.buffer, paths.root, told["names"], _newest(paths, told["above"]))
        sys.stdout.buffer.flush()
    elif "take" in told:
        paths = RunPaths(Path(told["take"]))
        os.write(1, _HERE if Checkpoints(paths).verify(told["step"]) is None else _WANTED)
        read_stream(sys.stdin.buffer, paths.root)
        os.write(1, _RECEIVED)
    return "give" in told or "take" in told


def _newest(paths: RunPaths, above: int | None) -> list[IO[bytes]]:
    """The files of the newest checkpoint above a step, opened before they are removed for a newer one."""
    while above is not None:
        step = max(Checkpoints(paths).steps(), default=-1)
        if step <= above:
            break
        try:
            return [path.open("rb") for path in sorted(paths.checkpoint(step).rglob("*")) if path.is_file()]
        except FileNotFoundError:
            continue
    return []


# ---- the stream


def write_stream(
    into: IO[bytes], root: Path, names: Mapping[str, int | None], opened: Iterable[IO[bytes]] = ()
) -> None:
    """Files and folders under `root`, a file with a number from that byte on, and files that are open; what there is
    none of is left out."""
    with tarfile.open(fileobj=into, mode="w|", bufsize=_CHUNK, format=tarfile.PAX_FORMAT) as stream:
        for file in opened:
            _add(stream, root, file, None)
        for name, start in names.items():
            place = root / name
            for path in sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]:
                with suppress(FileNotFoundError), path.open("rb") as file:
                    _add(stream, root, file, start)
        stream.addfile(tarfile.TarInfo(_END))


def _add(stream: tarfile.TarFile, root: Path, file: IO[bytes], start: int | None) -> None:
    entry = tarfile.TarInfo(str(PurePosixPath(Path(file.name).relative_to(root))))
    entry.size = max(0, os.fstat(file.fileno()).st_size - (start or 0))
    if start is not None:
        entry.pax_headers = {_ADDED: str(start)}
        file.seek(start)
    stream.addfile(entry, file)


def read_stream(source: IO[bytes], root: Path) -> None:
    """What `write_stream` wrote comes into `root`: all of it, or nothing."""
    root.mkdir(parents=True, exist_ok=True)
    aside = root / f".copying.{secrets.token_hex(4)}"
    added: list[str] = []
    ended = False
    try:
        with tarfile.open(fileobj=source, mode="r|", bufsize=_CHUNK) as stream:
            for entry in stream:
                ended = entry.name == _END
                if ended:
                    break
                path = aside / entry.name
                data = stream.extractfile(entry) if entry.isreg() else None
                if data is None or not path.resolve().is_relative_to(aside.resolve()):
                    raise OSError(f"{entry.name!r} is no file of a run directory")
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(data, file, _CHUNK)
                if _ADDED in entry.pax_headers:
                    added.append(entry.name)
        while source.read(_CHUNK):
            pass  # what fills up the last block
        if not ended:
            raise OSError("the connection ended too early")
        if aside.exists():
            _put(aside, root, added)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put(aside: Path, root: Path, added: Sequence[str]) -> None:
    """Publish what came: a checkpoint as a whole folder, anything else file by file."""
    for name in added:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (aside / name).open("rb") as source, (root / name).open("ab") as file:
            shutil.copyfileobj(source, file, _CHUNK)
        (aside / name).unlink()
    fsync_tree(aside)
    checkpoints = RunPaths(aside).checkpoints
    if checkpoints.exists():
        for folder in sorted(checkpoints.iterdir()):
            final = RunPaths(root).checkpoints / folder.name
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists():  # a damaged one
                remove_directory(final)
            with suppress(FileExistsError):  # put there at this very moment through another host
                os.rename(folder, final)
    for path in sorted(aside.rglob("*")):
        if path.is_file():
            final = root / path.relative_to(aside)
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, final)
