"""safetensors files, read and written in place.

The safetensors package reads what is written here, and the other way round. It is not used itself since it copies
every tensor to write it, refuses tensors that share memory, and hides a full disk behind an error of its own.

The form: the header's length (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor), data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

from evenstep.errors import CheckpointError

# The bytes of one element.
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 100_000_000  # the safetensors package refuses more


class Stored(NamedTuple):
    """A tensor to write: its dtype's code, its shape, and its elements in C order as a flat view of bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Place(NamedTuple):
    """A tensor in a file: its `size` bytes lie from `start`, counted from where the file's header begins."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def write_tensors(file: BinaryIO, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` by name. The same tensors in the same order give the same bytes."""
    # The widest first, as the safetensors package does: so each is aligned where the file is mapped into memory.
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name].dtype])
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(tensors[name].data)


def read_places(file: BinaryIO) -> dict[str, Place]:
    """What lies where in the file that begins at the current position. CheckpointError if it is none of these files."""
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= _MOST_HEADER_BYTES else b""
    if len(text) != length or not length:
        raise CheckpointError("the tensors are cut short, or the file is not a safetensors file")
    try:
        header = json.loads(text)
        header.pop(_METADATA, None)
        return {name: _place(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("the tensors' header is damaged") from error


def _place(entry: Mapping[str, object], base: int) -> Place:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError
    start, stop = offsets
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError
    return Place(dtype, tuple(shape), base + start, stop - start)
