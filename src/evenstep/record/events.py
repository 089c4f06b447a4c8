"""What a process did, as it happened: one JSON object a line, for `report`, `check` and people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenstep.record.append import AppendFile
from evenstep.record.lines import SCHEMA, read_lines, to_line


class EventWriter:
    """Adds events to `path`. May be used from several threads.

    An event is there for readers as soon as `emit` returns. A disk that does not take it never raises out of
    `emit`: `on_error` is told once, with the reason.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        *,
        on_error: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._file = AppendFile(path, on_error, line_end=b"\n")

    def emit(self, kind: str, **fields: object) -> None:
        """Record that `kind` happened now (seconds since 1970), with `fields` of plain values."""
        record = {"v": SCHEMA, "time": self._clock(), "rank": self._rank, "kind": kind, **fields}
        with self._lock:
            self._file.append(to_line(record))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events in `path`, in order: each has v, time, rank, kind and its own fields. A torn line is skipped."""
    return list(read_lines(path))
