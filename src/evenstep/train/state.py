"""State on disk and on the wire without pickle: a nest of containers as JSON, its tensors as safetensors."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from evenstep.errors import CheckpointError, UsageError
from evenstep.train.pieces import Elsewhere, is_dense, is_known, is_whole, like, memory, piece
from evenstep.train.plain_values import decode_leaf, encode_leaf, is_plain, is_text, join_path, refused
from evenstep.train.tensor_file import Entry, in_file_order, is_kept, raw_parts, write_tensors

SCHEMA = 1
TREE = "tree.json"
TENSORS = "tensors.safetensors"

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


ELSEWHERE_NODE = {"elsewhere": True}  # what ELSEWHERE is in the JSON


def save_tree(folder: Path, tree: object) -> None:
    """Write `tree` into `folder` as tree.json and tensors.safetensors; publishing the folder is the caller's.

    A tree is a nest of dict (any keys that are trees themselves), OrderedDict, defaultdict, Counter, list, tuple, set,
    of tensors and numpy arrays of any dtype and of plain values. It comes back with the same types and the same bits,
    tensors on the CPU. Tensors that are one and the same in `tree` are so again. UsageError names what cannot be kept
    by its path, for example `scheduler.foo[2]`. OSError if the disk does not take it.
    """
    text, tensors = encode_parts(tree, parts=False)
    entries = {name: Entry.of(tensor) for name, tensor in tensors.items()}
    data = (part for name in in_file_order(entries) for part in raw_parts(tensors[name]))
    write_tensors(folder / TENSORS, entries, data)
    (folder / TREE).write_bytes(text)


def check_tree(tree: object, *, parts: bool = False) -> None:
    """UsageError, naming the path, where `save_tree` would not keep something of `tree`. Nothing is written.

    With `parts`, tensors may be DTensors and meta tensors."""
    encode_parts(tree, parts=parts)


def encode_parts(tree: object, *, parts: bool = True) -> tuple[bytes, dict[str, Tensor]]:
    """The JSON of `tree`, and its tensors by name as they are: with `parts` also DTensors and meta tensors."""
    encoder = _Encoder(parts)
    return encoder.document(tree), encoder.tensors


def read_tree(folder: Path) -> Any:
    """The tree in `folder` with a Stored in place of every tensor and array: they are read when they are asked for,
    within `damage_named`."""
    for name in (TREE, TENSORS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing", do="use an older checkpoint")
    with damage_named(folder):
        file: Any = safe_open(folder / TENSORS, "pt")
        sizes = {name: Entry.read(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118

        def stored(name: str, tag: dict[str, Any]) -> Stored:
            return Stored(file, name, sizes[name], tag)

        return _Decoder(stored).document((folder / TREE).read_bytes())


class _File(Protocol):
    def get_tensor(self, name: str) -> Tensor: ...


class Stored:
    """A tensor, or a numpy array, that lies in a file and is read when it is asked for."""

    def __init__(self, file: _File, name: str, entry: Entry, tag: dict[str, Any]) -> None:
        self._file, self._name, self._tag = file, name, tag
        self.dtype = getattr(torch, tag["dtype"]) if "tensor" in tag and "dtype" in tag else entry.dtype
        self.shape = torch.Size(tag.get("shape", entry.shape))
        self.is_array = "array" in tag
        self._value: Any = None

    def rows(self, start: int, stop: int) -> Tensor:
        """Some rows: a view of the file. One of no dimensions has one."""
        whole = self._file.get_tensor(self._name)  # no copy: what is not touched is not read
        if self.dtype != whole.dtype:
            whole = whole.view(self.dtype)
        whole = whole.reshape(self.shape)
        return whole[start:stop] if self.shape else whole

    def value(self) -> Any:
        """The tensor, or the array, in memory of its own. The same one whenever it is asked for."""
        if self._value is None:
            self._value = self._array() if self.is_array else self._tensor()
        return self._value

    def _tensor(self) -> Tensor:
        # A copy: a view of the file would keep its space on the disk when it is removed.
        tensor = self.rows(0, self.shape[0] if self.shape else 1)
        if "stride" not in self._tag:
            return tensor.clone()
        return torch.empty_strided(tensor.shape, self._tag["stride"], dtype=tensor.dtype).copy_(tensor)

    def _array(self) -> np.ndarray[Any, Any]:
        data: np.ndarray[Any, Any] = self._file.get_tensor(self._name).clone().numpy().view(self._tag["dtype"])
        return data.reshape(self._tag["shape"], order=self._tag["order"])


def filled(tree: Any, at: Any = None, *, views: bool = False) -> Any:
    """`tree`, as `read_tree` gives it, with values. It is changed in place.

    A tensor for which `at`, a tree of the same form as far as it goes, has a DTensor or a meta tensor of its shape
    comes back spread like that; in place of a tree `at` may hold one tensor for all below. With `views` tensors may be
    views of the file.
    """
    if isinstance(at, Elsewhere):
        return at
    if isinstance(tree, Stored):
        if isinstance(at, Tensor) and not tree.is_array and tree.shape == at.shape:
            if not is_whole(at):
                spread = like(at, tree.rows)
                return spread if views else _own(spread)
            if views:
                return tree.rows(0, tree.shape[0] if tree.shape else 1)
        return tree.value()
    if isinstance(tree, dict):
        for key in tree:
            tree[key] = filled(tree[key], at.get(key) if isinstance(at, Mapping) else _below(at), views=views)
        if isinstance(tree, OrderedDict) and hasattr(tree, "_metadata"):
            filled(tree._metadata)
    elif isinstance(tree, (list, tuple)):
        beside = at if isinstance(at, (list, tuple)) and len(at) == len(tree) else [_below(at)] * len(tree)
        values = [filled(item, beside[i], views=views) for i, item in enumerate(tree)]
        if isinstance(tree, tuple) and type(tree) is tuple:
            return tuple(values)
        if isinstance(tree, list):
            tree[:] = values
    elif type(tree) in (set, frozenset):
        return type(tree)(filled(item) for item in tree)
    return tree


def _below(at: Any) -> Tensor | None:
    return at if isinstance(at, Tensor) else None


def _own(tensor: Tensor) -> Tensor:
    """The same in memory of its own."""
    return tensor if tensor.is_meta else tensor.clone()


def encode_tree(tree: object) -> bytes:
    """`tree` (see `save_tree`) as bytes: those of a safetensors file that has the JSON as one more tensor."""
    document, tensors = encode_parts(tree, parts=False)
    text = torch.frombuffer(bytearray(document), dtype=torch.uint8)
    return save(_apart({_TEXT: text, **{name: _kept(tensor) for name, tensor in tensors.items()}}))


def decode_tree(data: bytes) -> Any:
    """The tree that `encode_tree` turned into `data`. CheckpointError if it is not all there."""
    with damage_named("the tree"):
        tensors = load(data)
        text = tensors.pop(_TEXT).numpy().tobytes()

        class Loaded:
            def get_tensor(self, name: str) -> Tensor:
                return tensors[name]

        def stored(name: str, tag: dict[str, Any]) -> Stored:
            return Stored(Loaded(), name, Entry(tensors[name].dtype, tuple(tensors[name].shape)), tag)

        return filled(_Decoder(stored).document(text))


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
def damage_named(what: object) -> Iterator[None]:
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

    def __init__(self, parts: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._parts = parts  # whether tensors may be DTensors and meta tensors
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
        if self._parts and isinstance(value, Elsewhere):
            return ELSEWHERE_NODE
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
        check_tensor(tensor, path, parts=self._parts)
        tag: dict[str, object] = {}
        if not is_kept(tensor.dtype):
            tag.update(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        if not tensor.is_contiguous() and is_dense(tensor):
            tag["stride"] = list(tensor.stride())
        place = memory(tensor)
        if place not in self._names or tensor.numel() == 0:
            self._names[place] = self._add(path or "tensor", tensor)
        return {"tensor": self._names[place], **tag}

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
    """Turns JSON into the tree; `stored` says what takes the place of a tensor or array, from its name and tag."""

    def __init__(self, stored: Callable[[str, dict[str, Any]], Stored]) -> None:
        self._stored = stored
        self._tensors: dict[str, Stored] = {}

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
            case "tensor" | "array":
                if content not in self._tensors:
                    self._tensors[content] = self._stored(content, value)
                return self._tensors[content]
        return decode_leaf(tag, content)

    def _items(self, items: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [(self._value(key), self._value(item)) for key, item in items]


def check_tensor(tensor: Tensor, path: str, *, parts: bool = False) -> None:
    """UsageError for a tensor that is not plain numbers in memory, as sparse and quantized ones are, and, without
    `parts`, DTensors and meta tensors."""
    odd = None
    if not (is_known(tensor) if parts else type(tensor) in (Tensor, nn.Parameter, nn.Buffer)):
        odd = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided:
        odd = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        odd = "a quantized tensor"
    elif tensor.is_meta and not parts:
        odd = "a tensor on the meta device, which has no values,"
    if odd:
        raise UsageError(
            f"the state at {path or 'the top'} holds {odd} where a plain dense tensor is expected",
            do="convert it (to_dense(), dequantize(), full_tensor()) in state_dict",
        )
    if parts and not is_whole(tensor):
        piece(tensor, path)


def _kept(tensor: Tensor) -> Tensor:
    """The tensor's values on the CPU, contiguous, in a dtype that every version of safetensors keeps."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain if is_kept(plain.dtype) else plain.reshape(-1).view(torch.uint8)
