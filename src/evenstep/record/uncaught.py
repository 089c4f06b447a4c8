"""The exception that a training process ended with, written by itself beside its log."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_SCHEMA = 1


@dataclass(frozen=True)
class Uncaught:
    """The exception that a process ended with."""

    rank: int
    type: str
    message: str
    traceback: str  # as Python prints it, without the launcher's frames; "" for sys.exit
    secondary: bool  # another process's end is the likely cause
    exit_code: int  # by the table in cli/exits.py
    shown: bool  # already on the process's own error stream
    time: float  # seconds since 1970


def type_name(error: BaseException) -> str:
    """The name of its class, with the module but for Python's own and the script's."""
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def error_path(log: Path) -> Path:
    """Where a process records its uncaught exception: beside its log."""
    return log.with_suffix(".error.json")


def write_uncaught(path: Path, uncaught: Uncaught) -> None:
    """Publish the record whole. A disk that does not take it is no reason to fail in another way."""
    aside = path.with_suffix(".tmp")
    with suppress(OSError):
        aside.write_text(json.dumps({"schema": _SCHEMA, **asdict(uncaught)}))
        os.replace(aside, path)


def read_uncaught(path: Path) -> Uncaught | None:
    """The record, or None if the process left none."""
    try:
        fields = json.loads(path.read_text())
        if fields.pop("schema") != _SCHEMA:
            return None
        return Uncaught(**fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None
