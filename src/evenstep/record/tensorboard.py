"""Scalars in TensorBoard's event files.

Events and records are the tensorboard package's, the file is ours. The package's own EventFileWriter does not do for a
long training: on a full disk its thread prints a traceback and dies, and what it cut short hides all that follows.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from evenstep.record.append import AppendFile


class ScalarWriter:
    """Adds scalars to one new event file in `folder`; the file is made with the first of them."""

    def __init__(
        self,
        folder: Path,
        *,
        on_error: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        # TensorBoard reads files in the order of their names; two starts in one second differ in nanoseconds.
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(folder / name, on_error)
        self._begun = False
        self._purge: int | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the point (`step`, value) to the curve of each name."""
        # Imported only now: it takes a quarter of a second, and not every process or run logs values.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = self._clock()
        events = []
        if not self._begun:
            events.append(Event(wall_time=now, file_version="brain.Event:2"))
        if self._purge is not None:
            events.append(Event(wall_time=now, step=self._purge, session_log=SessionLog(status=SessionLog.START)))
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        events.append(Event(wall_time=now, step=step, summary=Summary(value=points)))
        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        if self._file.append(records.getvalue()):
            self._begun, self._purge = True, None

    def purge(self, step: int) -> None:
        """Let readers drop what was written for `step` and later ones before, as soon as there are new values."""
        self._purge = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()
