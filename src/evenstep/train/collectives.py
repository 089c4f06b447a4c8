"""The field's collectives, for small things: nests of tensors and numbers, checked before they are combined.

All processes must call them together, with the same structure, shapes, dtypes and arguments; else each of them gets a
MismatchError that names ranks and lines. Sums are taken in a fixed tree over the ranks, so they are deterministic.
Results are new tensors, on the device of what this process gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from evenstep.errors import MismatchError, UsageError
from evenstep.plan.tree import Node, combine
from evenstep.train.meeting import Meeting, ranks_text
from evenstep.train.state import decode_tree, encode_tree

OPERATIONS = ("sum", "mean", "min", "max")


def gather(meeting: Meeting, value: Any, to: int = 0) -> list[Any] | None:
    """Every process's `value`, by rank, on rank `to`; None on the others."""
    _check_rank(meeting, "to", to)
    parts = _exchange(meeting, "gather", f"to={to}", value)
    return parts if meeting.rank == to else None


def all_gather(meeting: Meeting, value: Any) -> list[Any]:
    """Every process's `value`, by rank, on every process. Texts, bytes, arrays and None travel, too."""
    return _exchange(meeting, "all_gather", "", value)


def reduce(meeting: Meeting, value: Any, op: str = "mean", to: int = 0) -> Any:
    """`value` of all processes put together by `op` on rank `to`; None on the others."""
    _check_rank(meeting, "to", to)
    result = _reduced(meeting, "reduce", f"op={op} to={to}", value, op)
    return result if meeting.rank == to else None


def all_reduce(meeting: Meeting, value: Any, op: str = "sum") -> Any:
    """`value` of all processes put together by `op` (sum, mean, min, max), on every process.

    Tensors keep their dtype (bool: sum counts in int64, min is all, max is any); numbers come back as numbers.
    """
    return _reduced(meeting, "all_reduce", f"op={op}", value, op)


def broadcast(meeting: Meeting, value: Any, source: int = 0) -> Any:
    """`value` of rank `source`, on every process. The others give something of the same structure, or None."""
    _check_rank(meeting, "source", source)
    leaves = _leaves(value)
    mine = _structure(value)
    sent = encode_tree([_on_cpu(leaf) for leaf in leaves]) if meeting.rank == source else b""
    answers = [
        decode_tree(answer)
        for answer in meeting.exchange(
            "broadcast", encode_tree([mine, sent, _containers(value)]), signature=f"source={source}"
        )
    ]
    structures = [answer[0] for answer in answers]
    wrong = [r for r, s in enumerate(structures) if s not in (structures[source], "None")]
    if wrong:
        raise MismatchError(
            f"broadcast from rank {source}, which gave {structures[source]}; {ranks_text(wrong)} gave "
            f"{structures[wrong[0]]}",
            do="give the same structure on every process, or None where it is not known",
        )
    received = decode_tree(answers[source][1])
    if value is None:
        return _rebuilt(answers[source][2], iter(received))
    like = iter(leaves)
    return _rebuilt(value, iter([_beside(r, next(like)) for r in received]))


def barrier(meeting: Meeting) -> None:
    """Wait until every process is here."""
    meeting.exchange("barrier")


def _reduced(meeting: Meeting, kind: str, arguments: str, value: Any, op: str) -> Any:
    if op not in OPERATIONS:
        raise UsageError(f"op={op!r}, expected one of {', '.join(OPERATIONS)}")
    for leaf in _leaves(value):
        _check_reducible(leaf, op)
    parts = [_leaves(part) for part in _exchange(meeting, kind, arguments, value)]
    return _rebuilt(value, iter([_combined(list(column), op) for column in zip(*parts, strict=True)]))


def _combined(values: list[Any], op: str) -> Any:
    """One leaf of all processes."""
    is_tensor = isinstance(values[0], torch.Tensor)
    if op in ("min", "max"):
        if not is_tensor:
            return min(values) if op == "min" else max(values)
        pick = torch.minimum if op == "min" else torch.maximum
        if values[0].dtype == torch.bool:
            pick = torch.logical_and if op == "min" else torch.logical_or
        return _tree(values, pick)
    if is_tensor and values[0].dtype == torch.bool:
        values = [v.long() for v in values]
    total = _tree(values, lambda a, b: a + b)
    if op == "mean":
        return total / len(values)
    return int(total) if isinstance(total, bool) else total


def _tree(values: list[Any], add: Callable[[Any, Any], Any]) -> Any:
    return combine({Node(0, rank): value for rank, value in enumerate(values)}, len(values), add)


def _exchange(meeting: Meeting, kind: str, arguments: str, value: Any) -> list[Any]:
    """Every process's value, by rank, each with its tensors on the devices of this process's ones."""
    leaves = _leaves(value)
    payload = encode_tree([_on_cpu(leaf) for leaf in leaves])
    signature = f"{arguments} {_form(value)}".strip()
    answers = [decode_tree(answer) for answer in meeting.exchange(kind, payload, signature=signature)]
    return [
        _rebuilt(value, iter([_beside(theirs, mine) for theirs, mine in zip(answer, leaves, strict=True)]))
        for answer in answers
    ]


def _check_rank(meeting: Meeting, name: str, rank: object) -> None:
    if type(rank) is not int or not 0 <= rank < meeting.world_size:
        raise UsageError(f"{name}={rank!r}, expected a rank from 0 to {meeting.world_size - 1}")


def _check_reducible(leaf: Any, op: str) -> None:
    if isinstance(leaf, torch.Tensor):
        if op == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
            raise UsageError(
                f"op='mean' of a tensor of {_dtype(leaf)}, whose mean is no {_dtype(leaf)}",
                do="give x.float(), or take op='sum'",
            )
        if op in ("min", "max") and leaf.is_complex():
            raise UsageError(f"op={op!r} of a tensor of {_dtype(leaf)}: complex numbers have no order")
    elif isinstance(leaf, complex):
        if op in ("min", "max"):
            raise UsageError(f"op={op!r} of a complex number: complex numbers have no order")
    elif not isinstance(leaf, (bool, int, float)):
        raise UsageError(
            f"op={op!r} of {type(leaf).__name__}, expected tensors and numbers",
            do="give torch.from_numpy(x) for an array, and all_gather for anything else",
        )


# ---- nests: dict (in the order of sorted keys), list, tuple, namedtuple


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, Mapping):
        return [leaf for name in _keys(nest) for leaf in _leaves(nest[name])]
    if isinstance(nest, (list, tuple)):
        return [leaf for part in nest for leaf in _leaves(part)]
    return [nest.item() if isinstance(nest, np.generic) else nest]


def _rebuilt(nest: Any, leaves: Any) -> Any:
    """A nest like `nest`, with the next ones of `leaves` in it. A mapping comes back as a dict."""
    if isinstance(nest, Mapping):
        found = {name: _rebuilt(nest[name], leaves) for name in _keys(nest)}
        return {name: found[name] for name in nest}
    if isinstance(nest, (list, tuple)):
        parts = [_rebuilt(part, leaves) for part in nest]
        if hasattr(nest, "_fields"):
            return type(nest)(*parts)
        return tuple(parts) if isinstance(nest, tuple) else parts
    return next(leaves)


def _keys(nest: Mapping[Any, Any]) -> list[Any]:
    return sorted(nest, key=lambda name: (type(name).__name__, str(name)))


def _described(nest: Any, leaf: Callable[[Any], str]) -> str:
    if isinstance(nest, Mapping):
        return "{" + ", ".join(f"{name!r}: {_described(nest[name], leaf)}" for name in _keys(nest)) + "}"
    if isinstance(nest, (list, tuple)):
        inner = ", ".join(_described(part, leaf) for part in nest)
        return f"[{inner}]" if isinstance(nest, list) else f"({inner})"
    return leaf(nest)


def _form(value: Any) -> str:
    """Structure, shapes and dtypes: what must be the same on every process."""

    def leaf(x: Any) -> str:
        if isinstance(x, (torch.Tensor, np.ndarray)):
            return f"{_dtype(x)}{list(x.shape)}"
        return _number_or_name(x)

    return _described(value, leaf)


def _structure(value: Any) -> str:
    """Structure alone."""
    return _described(value, lambda x: "tensor" if isinstance(x, torch.Tensor) else _number_or_name(x))


def _number_or_name(x: Any) -> str:
    if x is None:
        return "None"
    if isinstance(x, np.generic):
        x = x.item()
    return "number" if isinstance(x, (int, float)) and not isinstance(x, bool) else type(x).__name__


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _containers(nest: Any) -> Any:
    """The containers of `nest` alone, with None for each leaf, in types that `encode_tree` takes."""
    if isinstance(nest, Mapping):
        return {name: _containers(nest[name]) for name in nest}
    if isinstance(nest, (list, tuple)):
        parts = [_containers(part) for part in nest]
        return tuple(parts) if isinstance(nest, tuple) else parts
    return None


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _beside(received: Any, mine: Any) -> Any:
    """What was received, on the device of this process's own."""
    if isinstance(received, torch.Tensor) and isinstance(mine, torch.Tensor):
        return received.to(mine.device)
    return received
