"""Carry the processes' output to their logs, and rank 0's to the terminal, byte for byte."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import select
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.record.append import AppendFile

Say = Callable[[str], None]
"""Prints one of our own lines for the user."""

_LONGEST_LINE = 1 << 16  # a line is passed on at this length, ended or not
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


class Log:
    """What one process writes, over all launches of the run directory.

    A log that holds something already gets a line first that says when, what and who, so that launches are told apart.
    """

    def __init__(self, path: Path, who: str, on_error: Callable[[str], None] | None = None) -> None:
        """`who`: the process's rank and its command, for the start line."""
        self.start = 0  # bytes that are not this launch's output
        self._file = AppendFile(path, on_error)
        self._line = b""
        self._begun = False
        with suppress(OSError), path.open("rb") as file:
            self.start = file.seek(0, os.SEEK_END)
            if self.start > 0:
                file.seek(-1, os.SEEK_END)
                torn = file.read() != b"\n"
                text = f"--- evenstep: {time.strftime('%Y-%m-%d %H:%M:%S %z')}, {who} ---\n"
                self._line = (b"\n" if torn else b"") + text.encode(errors="backslashreplace")

    def begin(self) -> None:
        """Write the start line, once. Not before the launch has started, since it may be refused."""
        if self._begun:
            return
        self._begun = True
        if self._file.append(self._line):  # one that writes nothing has a log too
            self.start += len(self._line)

    def append(self, data: bytes) -> None:
        """Add output."""
        self.begin()
        self._file.append(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass
class Stream:
    """One process's output (or error) stream on its way."""

    source: int  # read here
    log: Log
    terminal: int | None  # written there too
    prefix: bytes = b""  # before each line on the terminal
    by_line: bool = False  # whole lines only, so that several streams' lines do not mix on the terminal
    is_terminal: bool = False  # the process sees a terminal: `source` is a pty's master
    _line: bytes = field(default=b"", repr=False)
    _last: bytes = field(default=b"", repr=False)  # the start of an escape sequence may be in it
    _hidden: bool = field(default=False, repr=False)  # the process has hidden the terminal's cursor

    def carry(self) -> bool:
        """Pass on what is there. False at the end of the stream."""
        try:
            data = os.read(self.source, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # a pty's way of saying that nobody holds its other end
                raise
            data = b""
        if data:
            self.log.append(data)
        text = self._whole_lines(data) if self.by_line else data
        if self.is_terminal:
            text += self._cursor_again(data)
        if self.terminal is not None and text and not write_all(self.terminal, text):
            self.terminal = None  # who read it is gone (`| head`); training goes on, and so does the log
        return bool(data)

    def _cursor_again(self, data: bytes) -> bytes:
        """What shows the cursor behind a progress bar again, at the end (no data) of a process that was killed."""
        seen = self._last + data
        hidden, shown = seen.rfind(_HIDE_CURSOR), seen.rfind(_SHOW_CURSOR)
        if hidden != shown:
            self._hidden = hidden > shown
        self._last = seen[1 - len(_HIDE_CURSOR) :]
        return b"\n" + _SHOW_CURSOR if self._hidden and not data else b""

    def _whole_lines(self, data: bytes) -> bytes:
        """Whole lines, prefixed; the rest is kept until its line, or the stream (no data), ends."""
        text = self._line + data
        end = text.rfind(b"\n") + 1
        if not data or len(text) - end > _LONGEST_LINE:
            end = len(text)
        self._line = text[end:]
        if not self.prefix or end == 0:
            return text[:end]
        return b"".join(self.prefix + line + b"\n" for line in text[:end].removesuffix(b"\n").split(b"\n"))


def descriptors(processes: int) -> int:
    """How many files the launcher of so many processes has open: each one's log and both ends of its output."""
    return 3 * processes + 64


def open_streams(logs: Sequence[Log], *, first: int, show: str) -> tuple[list[Stream], list[tuple[int, int]]]:
    """The streams to carry, and by rank the descriptors that become its stdout and stderr; `logs` are those of the
    ranks from `first` on.

    `show`: whose output reaches the terminal: "first" (the first rank's), "all" or "none".

    The first of them gets what the launcher has: a terminal where the launcher's stream is one, else a pipe; the two
    streams stay apart unless both are terminals. The others get one pipe for both.
    """
    out_fd, err_fd = 1, 2
    streams: list[Stream] = []
    show_all = show == "all"
    if show == "none" or (show_all and first > 0):
        return _piped(logs, first, out_fd if show_all else None)
    if os.isatty(out_fd) and os.isatty(err_fd):
        source, out = _terminal(out_fd)
        streams.append(Stream(source, logs[0], out_fd, is_terminal=True))
        ends = [(out, out)]
    else:
        pair: list[int] = []
        for descriptor in (out_fd, err_fd):
            is_terminal = os.isatty(descriptor)
            source, end = _terminal(descriptor) if is_terminal else os.pipe()
            by_line = show_all and not is_terminal  # on a terminal a progress bar has no line ends
            streams.append(Stream(source, logs[0], descriptor, by_line=by_line, is_terminal=is_terminal))
            pair.append(end)
        ends = [(pair[0], pair[1])]
    more, theirs = _piped(logs[1:], first + 1, out_fd if show_all else None)
    return [*streams, *more], [*ends, *theirs]


def _piped(logs: Sequence[Log], first: int, terminal: int | None) -> tuple[list[Stream], list[tuple[int, int]]]:
    """One pipe for each process, whose lines are shown with its rank, if at all."""
    streams, ends = [], []
    for rank, log in enumerate(logs, first):
        source, end = os.pipe()
        prefix = b"" if terminal is None else f"[{rank}] ".encode()
        streams.append(Stream(source, log, terminal, prefix, by_line=terminal is not None))
        ends.append((end, end))
    return streams, ends


def resize(streams: list[Stream]) -> None:
    """Give the processes' terminals the size of ours."""
    for stream in streams:
        if stream.is_terminal and stream.terminal is not None:
            _copy_size(stream.terminal, stream.source)


def _terminal(model: int) -> tuple[int, int]:
    """A new pseudo-terminal like `model`: (our end, the process's end). It passes bytes through as they are."""
    ours, theirs = os.openpty()
    with suppress(termios.error):
        attributes = termios.tcgetattr(model)
        attributes[1] &= ~termios.OPOST  # the real terminal adds its carriage returns itself
        attributes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    _copy_size(model, ours)
    return ours, theirs


def _copy_size(model: int, other: int) -> None:
    with suppress(OSError):
        size = fcntl.ioctl(model, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(other, termios.TIOCSWINSZ, size)


class Writer:
    """Writes in a thread of its own, so that a terminal that stands still holds up nobody else."""

    def __init__(self) -> None:
        self.waits = 0  # bytes that are still to be written
        self._lock = threading.Lock()
        self._pieces: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="evenstep-output", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, data: bytes) -> None:
        """Have it written, after what was put before."""
        with self._lock:
            self.waits += len(data)
        self._pieces.put((descriptor, data))

    def finish(self, given_up: Callable[[], bool]) -> None:
        """Wait until all is written, or `given_up`."""
        self._pieces.put(None)
        while self._thread.is_alive() and not given_up():
            self._thread.join(0.05)

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            write_all(*piece)
            with self._lock:
                self.waits -= len(piece[1])


def write_all(descriptor: int, data: bytes) -> bool:
    """Write all of it, however slowly it is read. False if nobody reads any more."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # somebody made the shared terminal non-blocking
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True
