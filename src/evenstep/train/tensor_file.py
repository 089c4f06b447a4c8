"""A safetensors file, written as its bytes come: they need not be in memory at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What every version of safetensors keeps, by its name there, in the order in which it lays them out (from the last to
# the first). Tensors of another dtype are written as bytes, with the dtype in the JSON.
_KEPT = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32", torch.float64: "F64",
    torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
_PART = 1 << 24  # bytes that are copied from a device, or sent, at a time


class Entry(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Entry:
        """How `tensor` is written."""
        if tensor.dtype in _KEPT:
            return Entry(tensor.dtype, tuple(tensor.shape))
        return Entry(torch.uint8, (tensor.numel() * tensor.dtype.itemsize,))

    @staticmethod
    def read(stored: Any) -> Entry:
        """How a tensor was written; `stored` is safetensors' own handle of it."""
        kept = {name: dtype for dtype, name in _KEPT.items()}
        return Entry(kept[stored.get_dtype()], tuple(stored.get_shape()))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def is_kept(dtype: torch.dtype) -> bool:
    """Whether every version of safetensors keeps tensors of this dtype."""
    return dtype in _KEPT


def in_file_order(entries: Mapping[str, Entry]) -> list[str]:
    """The names in the order in which safetensors lays tensors out: wide dtypes first, so that all are aligned."""
    places = {dtype: place for place, dtype in enumerate(_KEPT)}
    return sorted(entries, key=lambda name: (-places[entries[name].dtype], name.encode()))


def write_tensors(
    path: Path, entries: Mapping[str, Entry], data: Iterable[memoryview], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; `data` has the bytes of the tensors `in_file_order`, in any parts, which are written
    as they come. OSError if the disk does not take it."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name in in_file_order(entries):
        entry = entries[name]
        end = at + entry.bytes
        header[name] = {"dtype": _KEPT[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    try:
        with path.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in data:
                written += file.write(part)
    except OSError as error:  # that of a write does not say where
        raise OSError(error.errno, error.strerror, str(path)) from error
    if written != at:
        raise AssertionError(f"{path} got {written} bytes of tensors instead of {at}")


def raw_parts(tensor: Tensor, first: int = 0, last: int | None = None) -> Iterator[memoryview]:
    """The bytes of the elements from `first` to `last`, in C order, copied from the device in parts."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    last = flat.numel() if last is None else last
    for count in part_sizes(last - first, tensor.dtype.itemsize):
        yield raw_bytes(flat[first : first + count])
        first += count


def part_sizes(elements: int, size: int) -> Iterator[int]:
    """How many elements of `size` bytes go into each part."""
    step = max(1, _PART // size)
    for start in range(0, elements, step):
        yield min(step, elements - start)


def raw_bytes(flat: Tensor) -> memoryview:
    """The memory of a plain tensor of one dimension, copied to the CPU if it is not there."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    data: Any = flat.cpu().contiguous().view(torch.uint8).numpy()
    return memoryview(data)
