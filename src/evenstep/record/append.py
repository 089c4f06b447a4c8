"""Files that grow at the end, and never cost a training its life."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class AppendFile:
    """Adds pieces to a file, each in the kernel's hands before `append` returns, each whole or not at all.

    The file is opened by the first piece. A piece that the disk does not take is dropped, `on_error` is told why
    (once, until a piece gets through again), and nothing is raised. If the file was left by a process that died in the
    middle of a line, and `line_end` is given, the torn line is ended first.
    """

    def __init__(
        self, path: Path, on_error: Callable[[str], None] | None = None, *, line_end: bytes | None = None
    ) -> None:
        self.path = path
        self._on_error = on_error
        self._line_end = line_end
        self._descriptor = -1
        self._size = 0
        self._failing = False

    def append(self, piece: bytes) -> bool:
        """Add `piece`. False if it was dropped."""
        try:
            if self._descriptor < 0:
                piece = self._open() + piece
            self._put(piece)
        except OSError as error:
            if not self._failing and self._on_error is not None:
                self._on_error(f"cannot write {self.path}: {error.strerror or error}; training goes on without it")
            self._failing = True
            return False
        self._failing = False
        return True

    def close(self) -> None:
        """Close the file; a later piece opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> bytes:
        """Open the file; what must come before the first piece."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        if self._line_end is None or self._size == 0:
            return b""
        end = os.pread(self._descriptor, len(self._line_end), max(0, self._size - len(self._line_end)))
        return b"" if end == self._line_end else self._line_end

    def _put(self, piece: bytes) -> None:
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # A full disk takes a part first.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            self.close()
            raise
        self._size += len(piece)
