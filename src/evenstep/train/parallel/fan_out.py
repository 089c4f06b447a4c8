"""A tensor that is used several times, and moved: the gradients of the uses of the moved copy are added first."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from evenstep.errors import UsageError

_UNIT = "evenstep_unit"
Uses = list["int | Uses"]
"""Of a tensor, the last computed first, as autograd adds their gradients: the number of an operation, or the uses of a
copy on another device."""
_thread = threading.local()  # .moved: something was, since the last look at a graph


def mark_move(copy: Tensor, unit: str) -> None:
    """Notes in the graph that `copy` is a tensor of another device, moved for `unit`."""
    node: Any = copy.grad_fn  # torch declares metadata as a method
    if node is not None:
        node.metadata[_UNIT] = unit
        _thread.moved = True


def refuse_other_order(loss: Tensor) -> None:
    """UsageError where the graph of `loss` adds the gradients of a tensor in another order than without moves."""
    if not getattr(_thread, "moved", False):
        return
    _thread.moved = False
    users: dict[tuple[Any, int], list[Any]] = {}
    moves: list[tuple[Any, str]] = []
    seen: set[Any] = {loss.grad_fn}
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None:
            continue
        if node.name() == "ToCopyBackward0" and _UNIT in node.metadata:
            moves.append((node, node.metadata[_UNIT]))
        for source in node.next_functions:
            users.setdefault(source, []).append(node)
            if source[0] not in seen:
                seen.add(source[0])
                ahead.append(source[0])
    moved = {node for node, _ in moves}

    def uses(source: tuple[Any, int]) -> Uses:
        nodes = sorted(users.get(source, ()), key=lambda node: -int(node._sequence_nr()))
        return [uses((node, 0)) if node in moved else int(node._sequence_nr()) for node in nodes]

    for node, unit in moves:
        if not in_order(uses(node.next_functions[0])):
            raise UsageError(
                f"what is moved to another device for {unit} is used several times there or elsewhere: its gradients "
                "would be added in another order than in a model that is not split",
                do="put what uses it on one device, run.prepare(model, devices={submodule: device}), or into one "
                "submodule; or run without --split",
            )


def in_order(uses: Uses) -> bool:
    """Whether adding them as they are nested gives what adding them one by one gives, the last operation first."""
    flat = _flat(uses)
    if len(flat) <= 2:
        return True  # a sum of two is the same either way
    rest = [_flat([use]) for use in uses[1:]]
    return (
        flat == sorted(flat, reverse=True)
        and all(len(part) <= 1 for part in rest)
        and (isinstance(uses[0], int) or in_order(uses[0]))
    )


def _flat(uses: Uses) -> list[int]:
    return [number for use in uses for number in ([use] if isinstance(use, int) else _flat(use))]
