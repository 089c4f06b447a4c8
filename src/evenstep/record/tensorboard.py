"""Scalars in TensorBoard's event files, written directly.

The form is small and has been the same since 2015: records of length, checksum, an `Event` message, checksum.
Writing it here costs no import (tensorboard's takes a quarter of a second) and no thread.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from evenstep.record.append import AppendFile

_WAS_STARTED = 1  # SessionLog.START: readers drop what older files say from its step on


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

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the point (`step`, value) to the curve of each name."""
        self._put(step, b"".join(_field(1, _scalar(name, value)) for name, value in values.items()), field=5)

    def purge(self, step: int) -> None:
        """Tell readers to drop what was written for `step` and later ones before."""
        self._put(step, bytes((1 << 3, _WAS_STARTED)), field=7)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, step: int, message: bytes, *, field: int) -> None:
        if not self._begun:
            self._begun = self._file.append(_record(self._event(None, 3, b"brain.Event:2")))
        self._file.append(_record(self._event(step, field, message)))

    def _event(self, step: int | None, field: int, message: bytes) -> bytes:
        number = b"" if step is None else bytes((2 << 3,)) + _varint(step)
        return bytes((1 << 3 | 1,)) + struct.pack("<d", self._clock()) + number + _field(field, message)


def _scalar(name: str, value: float) -> bytes:
    return _field(1, name.encode()) + bytes((2 << 3 | 5,)) + _float32(value)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _field(number: int, message: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(message)) + message


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # CRC-32C, Castagnoli
        table.append(value)
    return table


_CRC = _table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
