"""State on disk and on the wire without pickle: a nest of containers as JSON, its tensors as safetensors."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor, nn

from evenstep.errors import CheckpointError, UsageError
from evenstep.record.publish import whole_file
from evenstep.record.tensorfile import Place, Stored, read_places, write_tensors

SCHEMA = 1
TREE = "tree.json"
TENSORS = "tensors.safetensors"

# What safetensors has a code for. Tensors of another dtype are written as bytes, with the dtype in the JSON.
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None, "dict": dict, "list": list, "int": int, "float": float, "str": str, "set": set, "tuple": tuple,
}  # fmt: skip
_DEEPEST = 100


def save_tree(folder: Path, tree: object) -> None:
    """Write `tree` into `folder` as tree.json and tensors.safetensors; publishing the folder is the caller's.

    A tree is a nest of dict (any keys that are trees themselves), OrderedDict, defaultdict, Counter, list, tuple, set,
    of tensors and numpy arrays of any dtype and of plain values. It comes back with the same types and the same bits,
    tensors on the CPU. Tensors that are one and the same in `tree` are so again. UsageError names what cannot be kept
    by its path, for example `scheduler.foo[2]`. OSError if the disk does not take it.
    """
    encoder = _Encoder()
    text = encoder.document(tree)
    with (folder / TENSORS).open("wb") as file:
        write_tensors(file, encoder.tensors)
    (folder / TREE).write_bytes(text)


def load_tree(folder: Path) -> Any:
    """The tree that `save_tree` wrote into `folder`. CheckpointError if it is damaged or not all there."""
    try:
        text = (folder / TREE).read_bytes()
        with (folder / TENSORS).open("rb") as file:
            return _Decoder(file, 0).document(text)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing", do="use an older checkpoint") from error
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error.message}", do="use an older checkpoint") from error


def encode_tree(tree: object) -> bytes:
    """`tree` (see `save_tree`) as bytes: the length of the JSON in 8 bytes, the JSON, the tensors."""
    encoder = _Encoder()
    text = encoder.document(tree)
    out = io.BytesIO()
    out.write(len(text).to_bytes(8, "little") + text)
    write_tensors(out, encoder.tensors)
    return out.getvalue()


def decode_tree(data: bytes) -> Any:
    """The tree that `encode_tree` turned into `data`. CheckpointError if it is not all there."""
    file = io.BytesIO(data)
    length = int.from_bytes(file.read(8), "little")
    if len(data) < 8 + length:
        raise CheckpointError("the tree is cut short")
    text = file.read(length)
    return _Decoder(file, 8 + length).document(text)


def save_model(path: Path, models: Mapping[str, nn.Module]) -> list[str]:
    """Publish the parameters and buffers of `models` as one safetensors file that plain PyTorch loads.

    One model's names have no prefix, several models' the model's name: `generator.conv.weight`. Tied weights are
    written under each of their names, so that load_state_dict(strict=True) takes the file. Returns the names of what
    is in a state_dict and is no tensor: that is left out. MachineError if the disk does not take the file.
    """
    tensors: dict[str, Stored] = {}
    left_out = []
    for model_name, model in models.items():
        for key, value in model.state_dict().items():
            name = key.replace("_orig_mod.", "")  # torch.compile's
            name = name if len(models) == 1 else f"{model_name}.{name}"
            if isinstance(value, Tensor) and value.dtype in _CODES:
                tensors[name] = _stored(value)
            else:
                left_out.append(name)
    with whole_file(path) as file:
        write_tensors(file, tensors, {"format": "pt"})
    return left_out


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
        return value if _is_text(value) else {"str": value.encode("utf-32-le", "surrogatepass").hex()}
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
    if isinstance(value, np.generic) and _is_plain(value.dtype):
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    raise _refused(value, path)


class _Encoder:
    """Turns one tree into JSON, and collects its tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Stored] = {}
        self._names: dict[tuple[object, ...], str] = {}  # of what lies where in memory
        self._above: list[int] = []  # the containers around what is being encoded

    def document(self, tree: object) -> bytes:
        content = {"v": SCHEMA, "tree": self._value(tree, "")}
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()

    def _value(self, value: object, path: str) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if type(value) is np.ndarray:
            return self._array(value, path)
        if type(value) in _CONTAINERS:
            if id(value) in self._above or len(self._above) >= _DEEPEST:
                raise UsageError(
                    f"the state at {path or 'the top'} contains itself, or is nested more than {_DEEPEST} deep",
                    do="leave it out of what is saved",
                )
            self._above.append(id(value))
            try:
                return self._container(value, path)
            finally:
                self._above.pop()
        return encode_leaf(value, path)

    def _container(self, value: object, path: str) -> object:
        kind = type(value)
        if isinstance(value, dict):
            if kind is dict and all(type(key) is str and _is_text(key) for key in value):
                return {"dict": {key: self._value(item, join_path(path, key)) for key, item in value.items()}}
            items = [self._item(key, item, path) for key, item in value.items()]
            if isinstance(value, defaultdict):
                return {"defaultdict": [self._factory(value, path), items]}
            # nn.Module.load_state_dict reads the versions of modules from this attribute.
            metadata = getattr(value, "_metadata", None)
            if metadata is not None:
                return {"ordered": items, "metadata": self._value(metadata, join_path(path, "_metadata"))}
            return {_CONTAINERS[kind]: items}
        if isinstance(value, (set, frozenset)):
            return {kind.__name__: sorted((self._value(item, path) for item in value), key=json.dumps)}
        assert isinstance(value, (list, tuple))
        values = [self._value(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return values if kind is list else {"tuple": values}

    def _item(self, key: object, item: object, path: str) -> list[object]:
        return [self._value(key, path), self._value(item, join_path(path, key))]

    def _factory(self, value: defaultdict[object, object], path: str) -> str:
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return name
        raise _refused(value.default_factory, f"{path}.default_factory")

    def _tensor(self, tensor: Tensor, path: str) -> object:
        check_tensor(tensor, path)
        tag: dict[str, object] = {}
        if tensor.dtype not in _CODES:
            tag.update(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        if not tensor.is_contiguous() and _is_dense(tensor):
            tag["stride"] = list(tensor.stride())
        memory = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(),
                  tensor.is_neg(), tensor.shape, tensor.stride())  # fmt: skip
        if memory not in self._names or tensor.numel() == 0:
            self._names[memory] = self._add(path or "tensor", _stored(tensor))
        return {"tensor": self._names[memory], **tag}

    def _array(self, array: np.ndarray[Any, Any], path: str) -> object:
        if not _is_plain(array.dtype):
            raise UsageError(
                f"the state at {path or 'the top'} holds a numpy array of {array.dtype}, which cannot be kept",
                do="hold an array of numbers, or a list of str",
            )
        order: Literal["F", "C"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        data = np.frombuffer(array.tobytes(order), np.uint8)
        name = self._add(path or "array", Stored("U8", data.shape, data.data))
        return {"array": name, "dtype": array.dtype.str, "shape": list(array.shape), "order": order}

    def _add(self, name: str, stored: Stored) -> str:
        free, n = name, 1
        while free in self.tensors or free == "__metadata__":
            n += 1
            free = f"{name}#{n}"
        self.tensors[free] = stored
        return free


class _Decoder:
    """Turns JSON, and the tensors in `file` from `base` on, into the tree."""

    def __init__(self, file: BinaryIO, base: int) -> None:
        self._file = file
        self._base = base
        self._places: dict[str, Place] = {}
        self._tensors: dict[str, Tensor] = {}

    def document(self, text: bytes) -> Any:
        try:
            content = json.loads(text)
            if content["v"] != SCHEMA:
                raise CheckpointError(f"{TREE} has schema {content['v']}; this evenstep reads {SCHEMA}")
            self._places = read_places(self._file)
            return self._value(content["tree"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, StopIteration) as error:
            raise CheckpointError(f"{TREE} is damaged: {type(error).__name__}: {error}") from error

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value))
        content = value[tag]
        match tag:
            case "dict":
                return {key: self._value(item) for key, item in content.items()}
            case "items":
                return dict(self._items(content))
            case "counter":
                return Counter(dict(self._items(content)))
            case "ordered":
                ordered = OrderedDict(self._items(content))
                if "metadata" in value:
                    ordered._metadata = self._value(value["metadata"])  # type: ignore[attr-defined]
                return ordered
            case "defaultdict":
                return defaultdict(_FACTORIES[content[0]], self._items(content[1]))
            case "tuple":
                return tuple(self._value(content))
            case "set":
                return set(self._value(content))
            case "frozenset":
                return frozenset(self._value(content))
            case "tensor":
                return self._tensor(content, value)
            case "array":
                return self._array(content, value)
        return _decode_leaf(tag, content)

    def _items(self, items: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [(self._value(key), self._value(item)) for key, item in items]

    def _tensor(self, name: str, tag: dict[str, Any]) -> Tensor:
        if name not in self._tensors:
            place = self._places[name]
            dtype = getattr(torch, tag["dtype"]) if "dtype" in tag else _DTYPES[place.dtype]
            tensor = torch.empty(tag.get("shape", place.shape), dtype=dtype)
            self._read(place, _bytes(tensor))
            if "stride" in tag:
                tensor = torch.empty_strided(tensor.shape, tag["stride"], dtype=dtype).copy_(tensor)
            self._tensors[name] = tensor
        return self._tensors[name]

    def _array(self, name: str, tag: dict[str, Any]) -> np.ndarray[Any, Any]:
        data: np.ndarray[Any, Any] = np.empty(self._places[name].size, np.uint8)
        self._read(self._places[name], data.data)
        array: np.ndarray[Any, Any] = data.view(tag["dtype"]).reshape(tag["shape"], order=tag["order"])
        return array

    def _read(self, place: Place, into: memoryview) -> None:
        if into.nbytes != place.size:
            raise ValueError(f"{place.size} bytes where {into.nbytes} are expected")
        self._file.seek(self._base + place.start)
        if self._file.readinto(into) != into.nbytes:  # type: ignore[attr-defined]
            raise CheckpointError(f"{TENSORS} is cut short")


# Containers, with the tag that their (key, value) pairs get in the JSON.
_CONTAINERS: dict[type, str] = {
    dict: "items", OrderedDict: "ordered", Counter: "counter", defaultdict: "defaultdict",
    list: "", tuple: "", set: "", frozenset: "",
}  # fmt: skip


def _decode_leaf(tag: str, content: Any) -> object:
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


def check_tensor(tensor: Tensor, path: str) -> None:
    """UsageError for a tensor that is not plain numbers in memory, as sparse, quantized and meta ones are."""
    odd = None
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        odd = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided:
        odd = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        odd = "a quantized tensor"
    elif tensor.is_meta:
        odd = "a tensor on the meta device, which has no values,"
    if odd:
        raise UsageError(
            f"the state at {path or 'the top'} holds {odd} where a plain dense tensor is expected",
            do="convert it (to_dense(), dequantize(), full_tensor()) in state_dict",
        )


def _stored(tensor: Tensor) -> Stored:
    data = _bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())
    code = _CODES.get(tensor.dtype)
    return Stored("U8", (data.nbytes,), data) if code is None else Stored(code, tuple(tensor.shape), data)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as flat bytes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    array: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array.data


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of contiguous ones: each place in memory is one element."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_text(value: str) -> bool:
    """Whether JSON keeps `value`: half a surrogate pair, as file names may hold, can come back as something else."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype's name is all there is to know about it."""
    return dtype.names is None and not dtype.hasobject and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype


def _refused(value: object, path: str) -> UsageError:
    kind = type(value)
    return UsageError(
        f"the state at {path or 'the top'} holds a {kind.__module__}.{kind.__qualname__}, which cannot be kept "
        "without running code to load it",
        do="have state_dict return numbers, str, bytes, tensors and arrays in dicts, lists and tuples",
    )
