"""What a loss function can write to that all thread replicas share: one thread would read what another one wrote."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.train.snapshot import is_users

_MOST = 20_000  # objects that are looked at
_CONTAINERS = (Mapping, Set, list, deque)
_INSIDE = 1_000  # entries of a container that are looked at


class Shared:
    """The variables and objects that `loss_fn` and the models' own code name: what is in them when this is made.

    Found from the code's global names, closures and defaults, through containers, modules and objects of the user's
    classes. What other objects (loggers, progress bars) hold is not seen.
    """

    def __init__(self, loss_fn: Any, models: Sequence[nn.Module]) -> None:
        self._roots = (loss_fn, models)
        self._before, self._alive = _look(loss_fn, models)

    def changed(self) -> list[str]:
        """The names of what holds something else now."""
        now, _ = _look(*self._roots)
        return sorted(name for name, value in now.items() if self._before.get(name, value) != value)


def refuse_shared_writes(names: Sequence[str]) -> None:
    """UsageError for these."""
    inner = [name for name in names if not any(other.startswith((f"{name}[", f"{name}.")) for other in names)]
    raise UsageError(
        f"the loss writes {', '.join(inner[:5])}, which all thread replicas share: one would read what another wrote",
        do="return what the loss needs from the model's forward (prepare the model that a hook belongs to), or use "
        "--processes",
    )


def _look(loss_fn: Any, models: Sequence[nn.Module]) -> tuple[dict[str, object], list[Any]]:
    """Of each object by name: what it holds, by identity. And what must stay alive as long as that is compared."""
    found: dict[str, object] = {}
    alive: list[Any] = []
    seen: set[int] = set()
    ahead: deque[tuple[str, Any]] = deque([("", loss_fn), *((type(model).__name__, model) for model in models)])
    while ahead and len(seen) < _MOST:
        name, value = ahead.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        parts = list(_parts(name, value))
        if not isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            found[name] = _held(value)
        for inner, part in parts:
            alive.append(part)
            if isinstance(value, types.FunctionType) and not isinstance(part, _CONTAINERS):
                found[inner] = _identity(part)
            ahead.append((inner, part))
    return found, alive


def _held(value: Any) -> object:
    if isinstance(value, Mapping):
        return [(_identity(k), _identity(v)) for k, v in list(value.items())[:_INSIDE]], len(value)
    if isinstance(value, Set):
        return len(value)
    if isinstance(value, (list, tuple, deque)):
        return [_identity(item) for item in list(value)[:_INSIDE]], len(value)
    if _is_looked_into(value):
        return {name: _identity(attribute) for name, attribute in _attributes(value)}
    return _identity(value)


def _identity(value: Any) -> object:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value).__name__, value if value == value else "nan"
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= 1 << 16 else b""
    if isinstance(value, types.MethodType):  # made anew at each look
        return id(value.__self__), id(value.__func__)
    return id(value)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What `value` refers to."""
    dot = f"{name}." if name else ""
    if isinstance(value, types.FunctionType):
        if is_users(value.__module__):
            yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield name or "self", value.__self__
        yield name, value.__func__
    elif isinstance(value, functools.partial):
        yield from ((name, part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{k!r}]", v) for k, v in list(value.items())[:_INSIDE])
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from ((f"{name}[{k}]", v) for k, v in enumerate(list(value)[:_INSIDE]))
    elif _is_looked_into(value):
        yield from ((dot + inner, part) for inner, part in _attributes(value))
        for kind in type(value).__mro__:
            if is_users(kind.__module__):
                yield from (("", part) for part in vars(kind).values() if isinstance(part, types.FunctionType))


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that its code names, what it closes over, its defaults and attributes."""
    names = _names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and is_users(value.__name__):
            yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in names if inner in vars(value))
        elif name in function.__globals__:
            yield name, value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # an empty cell
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default of {function.__name__}", part
    yield from ((f"{function.__name__}.{name}", part) for name, part in vars(function).items())


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _is_looked_into(value: Any) -> bool:
    return not isinstance(value, (type, types.ModuleType, Tensor)) and (
        isinstance(value, nn.Module) or is_users(type(value).__module__)
    )


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    """Of an object; of a module, too, what is in its own tables."""
    own = list(getattr(value, "__dict__", {}).items())
    if not isinstance(value, nn.Module):
        return own
    tables = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
    inside = [pair for name, table in own if name in tables for pair in list(table.items())]
    return [(str(k), v) for k, v in inside] + [(k, v) for k, v in own if not k.startswith("_") and k != "training"]
