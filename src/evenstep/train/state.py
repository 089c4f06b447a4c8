"""State on disk and on the wire without pickle: a nest of containers as JSON, its tensors as safetensors."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

from evenstep.errors import CheckpointError, UsageError
from evenstep.record.publish import whole_path
from evenstep.train.leaves import decode_leaf, encode_leaf, is_plain, is_text, join_path, refused

SCHEMA = 1
TREE = "tree.json"
TENSORS = "tensors.safetensors"

# What every version of safetensors keeps. Tensors of another dtype are written as bytes, with the dtype in the JSON.
_KEPT = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    }
)  # fmt: skip
# Containers, with the tag that their (key, value) pairs get in the JSON.
_CONTAINERS: dict[type, str] = {
    dict: "items", OrderedDict: "ordered", Counter: "counter", defaultdict: "defaultdict",
    list: "", tuple: "", set: "", frozenset: "",
}  # fmt: skip
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None, "dict": dict, "list": list, "int": int, "float": float, "str": str, "set": set, "tuple": tuple,
}  # fmt: skip
_DEEPEST = 100
_TEXT = "#tree"  # the JSON's name beside the tensors on the wire; no path begins like this


def save_tree(folder: Path, tree: object) -> None:
    """Write `tree` into `folder` as tree.json and tensors.safetensors; publishing the folder is the caller's.

    A tree is a nest of dict (any keys that are trees themselves), OrderedDict, defaultdict, Counter, list, tuple, set,
    of tensors and numpy arrays of any dtype and of plain values. It comes back with the same types and the same bits,
    tensors on the CPU. Tensors that are one and the same in `tree` are so again. UsageError names what cannot be kept
    by its path, for example `scheduler.foo[2]`. OSError if the disk does not take it.
    """
    encoder = _Encoder()
    text = encoder.document(tree)
    _save_file(encoder.tensors, folder / TENSORS)
    (folder / TREE).write_bytes(text)


def check_tree(tree: object) -> None:
    """UsageError, naming the path, where `save_tree` would not keep something of `tree`. Nothing is written."""
    _Encoder().document(tree)


def load_tree(folder: Path) -> Any:
    """The tree that `save_tree` wrote into `folder`. CheckpointError if it is damaged or not all there."""
    for name in (TREE, TENSORS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing", do="use an older checkpoint")
    with _damage_named(str(folder)):
        return _Decoder(load_file(folder / TENSORS)).document((folder / TREE).read_bytes())


def encode_tree(tree: object) -> bytes:
    """`tree` (see `save_tree`) as bytes: those of a safetensors file that has the JSON as one more tensor."""
    encoder = _Encoder()
    text = torch.frombuffer(bytearray(encoder.document(tree)), dtype=torch.uint8)
    return save(_apart({_TEXT: text, **encoder.tensors}))


def decode_tree(data: bytes) -> Any:
    """The tree that `encode_tree` turned into `data`. CheckpointError if it is not all there."""
    with _damage_named("the tree"):
        tensors = load(data)
        return _Decoder(tensors).document(tensors.pop(_TEXT).numpy().tobytes())


def save_model(path: Path, models: Mapping[str, nn.Module]) -> list[str]:
    """Publish the parameters and buffers of `models` as one safetensors file that plain PyTorch loads.

    One model's names have no prefix, several models' the model's name: `generator.conv.weight`. Tied weights are
    written under each of their names, so that load_state_dict(strict=True) takes the file. Returns the names of what
    is left out, for the caller to say: what is no tensor, and tensors of dtypes that not every version of safetensors
    keeps (complex numbers; as pairs of real ones no plain module would load them). MachineError if the disk does not
    take the file.
    """
    tensors: dict[str, Tensor] = {}
    left_out = []
    for model_name, model in models.items():
        for key, value in model.state_dict().items():
            name = key.replace("_orig_mod.", "")  # torch.compile's
            name = name if len(models) == 1 else f"{model_name}.{name}"
            if isinstance(value, Tensor) and value.dtype in _KEPT:
                tensors[name] = _plain(value)
            else:
                left_out.append(name)
    with whole_path(path) as beside:
        _save_file(tensors, beside, {"format": "pt"})
    return left_out


def _save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to the new file `path`. OSError if the disk does not take it."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(_apart(tensors), path, metadata)
    except SafetensorError as error:
        # The system's error is in its text alone: "I/O error: No space left on device (os error 28)".
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(error), str(path)) from error
    path.chmod(mode)  # safetensors makes files that only their owner may read


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, each in memory of its own: safetensors refuses those that share it."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return apart


@contextmanager
def _damage_named(what: str) -> Iterator[None]:
    """Whatever goes wrong with what was read, other than the reading, is damage: it was written by `_Encoder`."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        reason = error.message if isinstance(error, CheckpointError) else f"damaged: {type(error).__name__}: {error}"
        raise CheckpointError(f"{what} is {reason}", do="use an older checkpoint") from error


class _Encoder:
    """Turns one tree into JSON, and collects its tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
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
            if kind is dict and all(type(key) is str and is_text(key) for key in value):
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
        raise refused(value.default_factory, f"{path}.default_factory")

    def _tensor(self, tensor: Tensor, path: str) -> object:
        check_tensor(tensor, path)
        tag: dict[str, object] = {}
        if tensor.dtype not in _KEPT:
            tag.update(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        if not tensor.is_contiguous() and _is_dense(tensor):
            tag["stride"] = list(tensor.stride())
        memory = (tensor.data_ptr(), tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.shape, tensor.stride())
        if memory not in self._names or tensor.numel() == 0:
            plain = _plain(tensor)
            kept = plain if plain.dtype in _KEPT else plain.reshape(-1).view(torch.uint8)
            self._names[memory] = self._add(path or "tensor", kept)
        return {"tensor": self._names[memory], **tag}

    def _array(self, array: np.ndarray[Any, Any], path: str) -> object:
        if not is_plain(array.dtype):
            raise UsageError(
                f"the state at {path or 'the top'} holds a numpy array of {array.dtype}, which cannot be kept",
                do="hold an array of numbers, or a list of str",
            )
        order: Literal["F", "C"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        data = torch.from_numpy(np.frombuffer(bytearray(array.tobytes(order)), np.uint8))
        name = self._add(path or "array", data)
        return {"array": name, "dtype": array.dtype.str, "shape": list(array.shape), "order": order}

    def _add(self, name: str, tensor: Tensor) -> str:
        free, n = name, 1
        while free in self.tensors or free == "__metadata__":
            n += 1
            free = f"{name}#{n}"
        self.tensors[free] = tensor
        return free


class _Decoder:
    """Turns JSON, and the tensors that were stored with it, into the tree. The tensors are used up."""

    def __init__(self, stored: dict[str, Tensor]) -> None:
        self._stored = stored
        self._tensors: dict[str, Tensor] = {}

    def document(self, text: bytes) -> Any:
        content = json.loads(text)
        if content["v"] != SCHEMA:
            raise CheckpointError(f"of schema {content['v']}; this evenstep reads {SCHEMA}")
        return self._value(content["tree"])

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
        return decode_leaf(tag, content)

    def _items(self, items: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [(self._value(key), self._value(item)) for key, item in items]

    def _tensor(self, name: str, tag: dict[str, Any]) -> Tensor:
        if name not in self._tensors:
            tensor = self._take(name)
            if "dtype" in tag:
                tensor = tensor.view(getattr(torch, tag["dtype"])).reshape(tag["shape"])
            if "stride" in tag:
                tensor = torch.empty_strided(tensor.shape, tag["stride"], dtype=tensor.dtype).copy_(tensor)
            self._tensors[name] = tensor
        return self._tensors[name]

    def _array(self, name: str, tag: dict[str, Any]) -> np.ndarray[Any, Any]:
        data: np.ndarray[Any, Any] = self._take(name).numpy().view(tag["dtype"])
        return data.reshape(tag["shape"], order=tag["order"])

    def _take(self, name: str) -> Tensor:
        # A copy: what was loaded is a view of the file, which would keep its space on the disk when it is removed.
        return self._stored.pop(name).clone()


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


def _plain(tensor: Tensor) -> Tensor:
    """The tensor's values on the CPU, contiguous: itself where it is that already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of contiguous ones: each place in memory is one element."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
