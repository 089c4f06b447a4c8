"""The user's own variables around a loss and a loop, as short texts: to name what differs between two layouts."""

from __future__ import annotations

import hashlib
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OURS = str(Path(__file__).resolve().parents[1]) + "/"
INSTALLED = tuple({sysconfig.get_paths()[name] + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LONGEST = 60  # characters of a value that is shown as it is
_MOST = 1 << 16  # elements of a tensor or container that is hashed


def said(value: object) -> str | None:
    """A value as a text that is equal for equal values: the value itself where it is short, else a hash of it.

    None for what it cannot tell: objects of other classes, and large ones.
    """
    text = _plain(value)
    if text is None:
        return None
    return text if len(text) <= _LONGEST else f"{type(value).__name__} {_hash(text.encode())}"


def _plain(value: object) -> str | None:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Tensor):
        if value.numel() > _MOST or value.is_meta or type(value) is not Tensor:
            return None
        if value.numel() == 1 and not value.is_complex():
            return f"tensor {value.item()!r}"
        return f"tensor {tuple(value.shape)} {_hash(_bytes(value))}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"array {value.shape} {_hash(value.tobytes())}" if value.size <= _MOST else None
    generator = _generator(value)
    if generator is not None:
        return f"{type(value).__name__} at {generator}"
    if isinstance(value, Set):
        inside = [_plain(item) for item in value] if len(value) <= _MOST else [None]
        return None if None in inside else f"{type(value).__name__} {sorted(map(str, inside))}"
    if isinstance(value, Mapping):
        pairs = [(_plain(k), _plain(v)) for k, v in value.items()] if len(value) <= _MOST else [(None, None)]
        return None if any(None in pair for pair in pairs) else str(pairs)
    if isinstance(value, (list, tuple, deque)):
        parts = [_plain(item) for item in value] if len(value) <= _MOST else [None]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    return None


def _generator(value: object) -> str | None:
    """The state of a random generator."""
    if isinstance(value, torch.Generator):
        return _hash(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return _hash(repr(value.bit_generator.state).encode())
    if isinstance(value, np.random.RandomState):
        return _hash(repr(value.get_state()).encode())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _hash(repr(value.getstate()).encode())
    return None


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def users_frame() -> FrameType | None:
    """The innermost frame of the user's own code, below which evenstep and installed packages were called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((OURS, "<")) and not name.startswith(INSTALLED):
            return frame
        frame = frame.f_back
    return None


def values_of(frame: FrameType | None, models: Sequence[nn.Module], data: Any) -> dict[str, str]:
    """What can be told of the variables of the loop's frame and module, of the models' and the data's attributes."""
    found = dict(_attributes(models))
    found.update(_said({f"data.{name}": value for name, value in _own(data)}))
    if frame is not None:
        found.update(_variables(frame.f_globals))
        found.update(_variables(frame.f_locals))
    return found


class Changed:
    """What computing a loss changes in the user's variables and the models' attributes."""

    def __init__(self, loss_fn: Any, models: Sequence[nn.Module]) -> None:
        self._loss_fn, self._models = loss_fn, models
        self._before = self._values()

    def now(self) -> dict[str, list[str]]:
        """Name -> what it was when this was made, and what it is."""
        before, now = self._before, self._values()
        return {
            name: [before.get(name, "nothing"), now.get(name, "nothing")]
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        }

    def _values(self) -> dict[str, str]:
        found = dict(_attributes(self._models))
        code = getattr(self._loss_fn, "__code__", None)
        if code is not None:
            if not code.co_filename.startswith(INSTALLED):
                found.update(_variables(self._loss_fn.__globals__))
            for name, cell in zip(code.co_freevars, self._loss_fn.__closure__ or (), strict=True):
                try:
                    found.update(_variables({name: cell.cell_contents}))
                except ValueError:
                    continue  # an empty cell
        owner = getattr(self._loss_fn, "__self__", None)
        if owner is not None and not isinstance(owner, nn.Module):
            found.update(_said({f"self.{name}": value for name, value in _own(owner)}))
        return found


def _variables(variables: Mapping[str, Any]) -> dict[str, str]:
    """Of variables by name, and of the attributes of those that are objects of the user's own classes."""
    found: dict[str, object] = {}
    for name, value in list(variables.items()):
        if name.startswith("__"):
            continue
        found[name] = value
        if not isinstance(value, (type, nn.Module)) and is_users(type(value).__module__):
            found.update({f"{name}.{inner}": attribute for inner, attribute in _own(value)})
    return _said(found)


def _attributes(models: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    """Of what modules hold beside parameters, buffers and modules."""
    for model in models:
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                if not attribute.startswith("_") and attribute != "training":
                    text = said(value)
                    if text is not None:
                        yield f"{name or type(model).__name__}.{attribute}", text


def _own(thing: object) -> list[tuple[str, Any]]:
    try:
        return list(vars(thing).items())
    except TypeError:
        return []


def is_users(module: str | None) -> bool:
    """Whether the module of that name is the user's own code."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return module == "__main__" or (bool(file) and not file.startswith((OURS, *INSTALLED)))


def _said(values: Mapping[str, object]) -> dict[str, str]:
    return {name: text for name, value in values.items() if (text := said(value)) is not None}
