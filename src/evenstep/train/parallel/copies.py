"""Copies of models that share the memory of their parameters, or keep copies of them on other devices.

A copy has modules, containers and plain Python objects of its own, so that what a forward notes in them (losses of
experts, caches) stays apart from other threads. Everything else is shared.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy as shallow
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError

_ATOMS = frozenset(
    {str, int, float, bool, type(None), types.FunctionType, types.BuiltinFunctionType, type, torch.dtype, torch.device}
)
_LISTS = frozenset({list, tuple, set, frozenset, deque})
_DICTS = frozenset({dict, OrderedDict, defaultdict})


class Copies:
    """A copy of each of `models`. Tensors lie where `devices` maps their device to; where that is the same one, the
    memory is the original's.

    `parameters`: the id of an original parameter -> its copy.
    """

    def __init__(self, models: Sequence[nn.Module], devices: Mapping[torch.device, torch.device]) -> None:
        self._devices = devices
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []  # as long as this lives, no other object gets the id of one of them
        self._moved: list[tuple[Tensor, Tensor]] = []  # (original, its copy on another device)
        self.parameters: dict[int, nn.Parameter] = {}
        self.models: list[nn.Module] = [self._copied(model) for model in models]
        self._state = flat(models)
        self._pairs = [(p, self.parameters[id(p)]) for model in models for p in model.parameters()]
        self._shared = [p.data_ptr() == copy.data_ptr() for p, copy in self._pairs]

    def follows(self, models: Sequence[nn.Module]) -> bool:
        """Whether the models are still built as they were: else copies must be made anew."""
        now = flat(models)
        return (
            len(now) == len(self._state)
            and all(map(operator.is_, now, self._state))
            and all(p.shape == copy.shape and p.dtype == copy.dtype for p, copy in self._pairs)
            and [p.data_ptr() == copy.data_ptr() for p, copy in self._pairs] == self._shared
        )

    def refresh(self) -> None:
        """Before a step: what is frozen, and values on other devices, as in the original."""
        for p, copy in self._pairs:
            copy.requires_grad_(p.requires_grad)
            copy.grad = None
        if self._moved:
            with torch.no_grad():
                torch._foreach_copy_([c for _, c in self._moved], [o for o, _ in self._moved], non_blocking=True)

    # ---- copying

    def _copied(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        self._originals.append(value)
        copy = self._memo[id(value)] = self._made(value)
        return copy

    def _made(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind in _DICTS:
            copy = value.copy()
            self._memo[id(value)] = copy
            copy.clear()
            copy.update((self._copied(k), self._copied(v)) for k, v in value.items())
            return copy
        if kind is list:
            self._memo[id(value)] = copy = []
            copy.extend(map(self._copied, value))
            return copy
        if kind is deque:
            return deque(map(self._copied, value), value.maxlen)
        if kind in _LISTS:
            return kind(map(self._copied, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*map(self._copied, value))
        if kind is types.MethodType:
            return types.MethodType(value.__func__, self._copied(value.__self__))
        if kind is functools.partial:
            named = {name: self._copied(v) for name, v in value.keywords.items()}
            return functools.partial(self._copied(value.func), *map(self._copied, value.args), **named)
        if kind.__module__.startswith("evenstep.") and _says_itself(kind):
            return value if getattr(kind, "for_copies", False) else shallow(value)  # a hook: one that does nothing
        if _is_plain(value):
            return self._object(value)
        return value

    def _object(self, value: Any) -> Any:
        copy = self._memo[id(value)] = object.__new__(type(value))
        vars(copy).update((name, self._copied(v)) for name, v in vars(value).items())
        return copy

    def _module(self, module: nn.Module) -> nn.Module:
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"thread replicas cannot copy a module of TorchScript ({kind})",
                do="leave out torch.jit, or use processes in place of thread replicas (--processes)",
            )
        copy: nn.Module = self._object(module)
        return copy

    def _tensor(self, tensor: Tensor) -> Tensor:
        device = self._devices.get(tensor.device, tensor.device)
        if not isinstance(tensor, nn.Parameter):
            if device == tensor.device:
                return tensor
            return self._on(tensor, device)
        if len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()) > 1:  # one is evenstep's own
            raise UsageError(
                f"a hook that runs after the gradient of a parameter of shape {tuple(tensor.shape)} was accumulated "
                "(register_post_accumulate_grad_hook) would see the parts of each thread replica",
                do="use processes in place of thread replicas (--processes), or act on .grad after step.backward",
            )
        value = tensor.detach() if device == tensor.device else self._on(tensor, device)
        copy = nn.Parameter(value, requires_grad=tensor.requires_grad)
        vars(copy).update(vars(tensor))
        if tensor.requires_grad:
            for hook in (tensor._backward_hooks or {}).values():
                copy.register_hook(hook)
        self.parameters[id(tensor)] = copy
        return copy

    def _on(self, tensor: Tensor, device: torch.device) -> Tensor:
        moved = tensor.detach().to(device)
        self._moved.append((tensor.detach(), moved))
        return moved


def flat(models: Iterable[Any]) -> list[Any]:
    """All that a copy of `models` is made from, in a fixed order."""
    found: list[Any] = []
    seen: set[int] = set()
    ahead = list(models)
    while ahead:
        value = ahead.pop()
        found.append(value)
        kind = type(value)
        if kind in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value._backward_hooks:
                ahead.extend(value._backward_hooks.values())
        elif kind in _DICTS:
            ahead.extend(value)
            ahead.extend(value.values())
        elif kind in _LISTS or (isinstance(value, tuple) and hasattr(value, "_fields")):
            ahead.extend(value)
        elif kind is types.MethodType:
            ahead += (value.__func__, value.__self__)
        elif kind is functools.partial:
            ahead += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, nn.Module) or _is_plain(value):
            ahead.extend(vars(value).values())
    return found


_plain: dict[type, bool] = {}


def _is_plain(value: Any) -> bool:
    """Whether all there is to `value` is its `__dict__`: an instance of a class that says nothing of how to copy it."""
    kind = type(value)
    known = _plain.get(kind)
    if known is None:
        known = _plain[kind] = (
            hasattr(value, "__dict__")
            and not _says_itself(kind)
            and not any("__slots__" in vars(base) and vars(base)["__slots__"] for base in kind.__mro__)
            and not (hasattr(kind, "__deepcopy__") or hasattr(kind, "__copy__"))
            and kind.__module__.partition(".")[0] not in ("evenstep", "threading", "logging")
            and not isinstance(value, (types.ModuleType, BaseException))
        )
    return known


def _says_itself(kind: type) -> bool:
    """Whether the class itself says how its instances are made and copied."""
    names = ("__new__", "__reduce__", "__reduce_ex__")
    return any(getattr(kind, name) is not getattr(object, name) for name in names)
