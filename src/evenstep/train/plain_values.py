"""Plain values, those that are neither containers nor have a tensor's bytes, as JSON without a loss."""

from __future__ import annotations

import base64
import math
import re
import struct
from typing import Any

import numpy as np
import torch

from evenstep.errors import UsageError


def join_path(path: str, key: object) -> str:
    """The path of what lies under `key` of the container at `path`: `scheduler.foo[2]`."""
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    if re.fullmatch(r"[\w.-]+", key):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def encode_leaf(value: object, path: str) -> object:
    """A value that is neither a container nor has a tensor's bytes, as JSON. UsageError if it is of no type known."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, str) and kind is str:
        return value if is_text(value) else {"str": value.encode("utf-32-le", "surrogatepass").hex()}
    if isinstance(value, int) and kind is int:
        return value if abs(value) < 1 << 53 else {"int": hex(value)}  # JSON's numbers are float64 for many readers
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, complex) and kind is complex:
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if isinstance(value, (bytes, bytearray)) and kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode()}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, np.generic) and is_plain(value.dtype):
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    raise refused(value, path)


def decode_leaf(tag: str, content: Any) -> object:
    """The value that `encode_leaf` turned into {tag: content}. ValueError, or another error, if that is damaged."""
    match tag:
        case "int":
            return int(content, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(content)))
        case "str":
            return bytes.fromhex(content).decode("utf-32-le", "surrogatepass")
        case "bytes":
            return base64.b64decode(content)
        case "bytearray":
            return bytearray(base64.b64decode(content))
        case "size":
            return torch.Size(content)
        case "dtype":
            return getattr(torch, content)
        case "device":
            return torch.device(content)
        case "scalar":
            return np.frombuffer(bytes.fromhex(content[1]), content[0])[0]
    raise ValueError(f"unknown tag {tag!r}")


def is_text(value: str) -> bool:
    """Whether JSON keeps `value`: half a surrogate pair, as file names may hold, can come back as something else."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype's name is all there is to know about it."""
    return dtype.names is None and not dtype.hasobject and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype


def refused(value: object, path: str) -> UsageError:
    """The error for a value at `path` that is of no type known."""
    kind = type(value)
    return UsageError(
        f"the state at {path or 'the top'} holds a {kind.__module__}.{kind.__qualname__}, which cannot be kept "
        "without running code to load it",
        do="have state_dict return numbers, str, bytes, tensors and arrays in dicts, lists and tuples",
    )
