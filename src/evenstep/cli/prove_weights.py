"""`evenstep prove --tolerance`: two commands of any kind, and whether the weights that they write are equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click

from evenstep.cli import exits
from evenstep.errors import MachineError, UsageError

_FORM = 'evenstep prove --tolerance 1e-6 "cmd A" "cmd B" --weights a.pt b.pt'
_LAST_LINES = 15
_SHOWN = 8
_PATIENCE = 3.0  # seconds that a command gets to end after Ctrl-C
_SIDES = (("missing", "A"), ("extra", "B"))


def prove_weights(tolerance: float, words: Sequence[str], weights: tuple[str, str] | None, *, as_json: bool) -> int:
    """Run two commands one after the other, compare what they write, and return the exit code.

    `words`: the commands, and --weights A B if that stands behind them.
    """
    commands, files = _parsed(words, weights)
    stamps = []
    for name, command, file in zip("AB", commands, files, strict=True):
        before = _stamp(file)
        code = _run(name, command)
        if code != 0:
            return exits.SCRIPT_FAILED
        stamps.append(_stamp(file))
        if stamps[-1] in (None, before):
            raise UsageError(
                f"command {name} ended well and has not written {file}", do="see the names after --weights, from here"
            )
    if _stamp(files[0]) != stamps[0]:
        raise UsageError(f"command B has written {files[0]} too", do="give each command a file of its own")
    found = _compare(files, tolerance)
    if as_json:
        about = {"tolerance": tolerance, "commands": commands, "equal": _is_equal(found)}
        click.echo(json.dumps({**about, **found, "summary": _summary(found, tolerance)}, indent=2))
    else:
        for line in (*_lines(found, files), _summary(found, tolerance)):
            click.echo(line)
    return exits.DONE if _is_equal(found) else exits.FOUND


def _parsed(words: Sequence[str], weights: tuple[str, str] | None) -> tuple[list[str], list[Path]]:
    rest = list(words)
    if "--weights" in rest:
        at = rest.index("--weights")
        given = rest[at + 1 : at + 3]
        del rest[at : at + 3]
        if weights is not None or len(given) != 2:
            raise UsageError("--weights takes two files, once", do=_FORM)
        weights = given[0], given[1]
    if weights is None:
        raise UsageError("--tolerance compares files of weights, and --weights names none", do=_FORM)
    if len(rest) != 2:
        many = "1 command" if len(rest) == 1 else f"{len(rest)} commands"
        raise UsageError(f"--tolerance got {many}, expected 2, each in quotes", do=_FORM)
    files = [Path(one) for one in weights]
    if files[0].absolute() == files[1].absolute():
        raise UsageError(f"--weights names {files[0]} twice", do="give each command a file of its own")
    return rest, files


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """By which a file that was written anew is known; None where there is none."""
    try:
        about = path.stat()
    except OSError:
        return None
    if path.is_dir():
        inner = [one for child in sorted(path.iterdir()) if (one := _stamp(child)) is not None]
        return (len(inner), max((at for at, _, _ in inner), default=0), sum(size for _, _, size in inner))
    return (about.st_mtime_ns, about.st_ino, about.st_size)


def _run(name: str, command: str) -> int:
    """Run a command line to its end, in a process group of its own; its output is shown only where it fails."""
    click.echo(f"command {name}: {command}", err=True)
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"cannot start a process: {error}", do="see `ulimit -u` and free memory") from error
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C
            _end(process)
            raise
        if code != 0:
            _tell_failure(name, code, output)
        else:
            click.echo(f"command {name}: done in {time.monotonic() - began:.1f} s", err=True)
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)


def _tell_failure(name: str, code: int, output: IO[bytes]) -> None:
    output.seek(0)
    for line in output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]:
        click.echo(f"  {line}", err=True)
    how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    click.echo(f"evenstep: command {name} {how}: nothing was compared", err=True)


def _compare(files: Sequence[Path], tolerance: float) -> dict[str, Any]:
    """In a process of its own: the command line does not import torch."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), root])
    words = [sys.executable, "-P", "-m", "evenstep.train.compare", *map(str, files), "--tolerance", repr(tolerance)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise MachineError("the comparison of the weights failed", do="see the lines above") from None
    if "error" in found:
        raise UsageError(found["error"], do=found["do"])
    return found


def _is_equal(found: dict[str, Any]) -> bool:
    return not (found["differ"] or found["missing"] or found["extra"])


def _lines(found: dict[str, Any], files: Sequence[Path]) -> Iterator[str]:
    for one in found["differing"][:_SHOWN]:
        first = "the first that differs: " if one is found["differing"][0] else ""
        yield f"{first}{one['name']}: {one['why']}"
    if found["differ"] > _SHOWN:
        yield f"and {found['differ'] - _SHOWN} more"
    for kind, file in (("missing", files[1]), ("extra", files[0])):
        if found[kind]:
            names = ", ".join(found[kind][:_SHOWN]) + (", ..." if len(found[kind]) > _SHOWN else "")
            yield f"not in {file}: {names}"
    if found["nan"]:
        yield f"NaN in {', '.join(found['nan'][:_SHOWN])}"


def _summary(found: dict[str, Any], tolerance: float) -> str:
    said = f"2 commands, {found['compared']} tensors: "
    if not _is_equal(found):
        parts = [f"{found['differ']} differ{'s' if found['differ'] == 1 else ''}" if found["differ"] else ""]
        parts += [f"{len(found[kind])} only in {side}" if found[kind] else "" for kind, side in _SIDES]
        return said + ", ".join(filter(None, parts))
    if found["largest"] == 0.0:
        return said + "identical"
    return said + f"equal within {tolerance:g} (the largest difference is {found['largest']:.2g})"
