"""Evaluation and prediction: each sample once on any layout, and the same answer on every process.

A function of the user's that raises on one process ends the call on all of them: the one raises its own exception,
the others PeerFailed with its rank and its message. Nobody waits for a process that will not come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from evenstep.errors import EvenstepError, MismatchError, PeerFailed, UsageError
from evenstep.plan.tree import Node, combine, subtrees, tree_sum
from evenstep.train.calls import Calls
from evenstep.train.data.samples import MicroBatch
from evenstep.train.data.stream import Stream
from evenstep.train.data.stream_identity import refuse_alike
from evenstep.train.entries import packed, unpacked
from evenstep.train.meeting import peer_failed
from evenstep.train.state import decode_tree, encode_tree

Pair = tuple[float, float]

_ALONE = ""  # the name of the one pair of a function that returns no dict


def evaluate(calls: Calls) -> float | dict[str, float]:
    """The mean of `fn` over the data: a number, or {name: number}, equal on every process and layout.

    `fn(*models, batch)` returns (sum over the samples, weight), or {name: (sum, weight)}, or what a loss function with
    metrics returns, of which the first becomes "loss".
    """

    def work() -> bytes:
        found: list[tuple[int, dict[str, tuple[Any, Any]]]] = []

        def take(m: MicroBatch, returned: Any) -> None:
            found.append((m.index, _pairs(returned, calls.where(m))))

        calls.run("evaluate", take)
        values = [(i, {name: (float(s), float(w)) for name, (s, w) in pairs.items()}) for i, pairs in found]
        if isinstance(calls.data, Stream):
            return json.dumps([_sums_of_lanes(values), calls.beginnings]).encode()
        return json.dumps([_parts([pairs for _, pairs in values], calls.mine), {}]).encode()

    answers = [json.loads(answer) for answer in _together(calls, "evaluate", work)]
    refuse_alike(begun for _, begun in answers)
    if isinstance(calls.data, Stream) and not any(rows for rows, _ in answers):
        _refuse_empty()
    parts: dict[str, dict[Node, Pair]] = {}
    for rows, _ in answers:
        for name, level, index, total, weight in rows:
            parts.setdefault(name, {})[Node(level, index)] = (total, weight)
    means = {name: _mean(name, of_name, calls) for name, of_name in parts.items()}
    if len(means) > 1 and _ALONE in means:
        raise UsageError(
            f"{calls.name} returned (sum, weight) for some micro-batches and a dict for others",
            do="return the same form always",
        )
    return means.get(_ALONE, means)


def predict(calls: Calls) -> Any:
    """The outputs of `fn` for all of the data, in its order, on every process; tensors on the CPU.

    `fn(*models, batch)` returns a tensor or array (dimension 0: the samples), a list (one entry a sample, of any size,
    itself a nest), or dicts and tuples of them. Of dicts, tuples and dataclasses of other types plain ones come back.
    Of a stream, the outputs of lane 0 come first, then those of lane 1, ...
    """

    def work() -> bytes:
        outputs: list[Any] = []
        order: list[int] = []
        forms: list[str] = []

        def take(m: MicroBatch, returned: Any) -> None:
            order.append(m.index)
            outputs.append(_rows(returned, m.size, calls.where(m)))
            forms.append(_form(outputs[-1]))
            if forms[-1] != forms[0]:
                raise _ragged(f"it returned {forms[0]}", f"{calls.where(m)} returned {forms[-1]}")

        calls.run("predict", take)
        outputs = [outputs[k] for k in sorted(range(len(order)), key=order.__getitem__)]  # lane by lane
        form, joined = (forms[0], _joined(outputs)) if outputs else ("", None)
        return encode_tree([form, _lists(joined, lambda entries: [packed(entries)]), calls.beginnings])

    answers = _together(calls, "predict", work)
    found = [(rank, *decode_tree(answer)) for rank, answer in enumerate(answers)]
    refuse_alike(begun for *_, begun in found)
    outputs = [(rank, form, _lists(output, lambda held: unpacked(held[0]))) for rank, form, output, _ in found if form]
    if not outputs:
        _refuse_empty()
    for rank, form, _ in outputs[1:]:
        if form != outputs[0][1]:
            raise _ragged(f"{calls.name} returned {outputs[0][1]} on rank 0", f"{form} on rank {rank}")
    return _joined([output for _, _, output in outputs])


def _together(calls: Calls, kind: str, work: Callable[[], bytes]) -> list[bytes]:
    """What `work` returned on every process. Where it raised on one, all processes raise."""
    exchange = partial(calls.meeting.exchange, kind, signature=calls.signature)
    try:
        done = b"+" + work()
    except Exception as error:
        if _was_met(error):
            raise
        told = f"{type(error).__name__}: {error}".encode()
        with contextlib.suppress(EvenstepError):  # ours is the reason, whatever has become of the others
            exchange(b"-" + told)
        raise
    answers = exchange(done)
    for rank, answer in enumerate(answers):
        if answer[:1] == b"-":
            raise peer_failed(rank, f"failed in {kind}: {answer[1:].decode()}")
    return [answer[1:] for answer in answers]


def _was_met(error: BaseException) -> bool:
    """Whether `error` says that processes have missed each other, at a call of evenstep in the user's function.

    The others have theirs by now, and do not come to a further meeting. A PeerFailed that processes have agreed on
    (from an evaluation inside this one) is none of these: where the reason is, that process comes and tells it.
    """
    at: BaseException | None = error
    while at is not None:
        lost_contact = isinstance(at, PeerFailed) and isinstance(at.__cause__, RuntimeError)
        if isinstance(at, MismatchError) or lost_contact:
            return True
        at = at.__cause__
    return False


# ---- sums


def _pairs(returned: Any, where: str) -> dict[str, tuple[Any, Any]]:
    """{name: (sum, weight)} from what the user's function returned; each a number, or a tensor of one element."""
    if isinstance(returned, (tuple, list)) and len(returned) == 3 and isinstance(returned[2], Mapping):
        if "loss" in returned[2]:
            raise UsageError(f"{where} has a metric that is called loss", do="give it another name: the first item is")
        returned = {"loss": returned[:2], **returned[2]}
    if isinstance(returned, Mapping):
        return {str(name): _pair(value, f"{where}, {name!r}") for name, value in returned.items()}
    return {_ALONE: _pair(returned, where)}


def _pair(value: Any, where: str) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise UsageError(
            f"{where} returned {_kind(value)}, expected (sum over the samples, weight)",
            do="return (correct.sum(), len(labels)), or a dict {name: (sum, weight)}",
        )
    for number in value:
        scalar = number.numel() == 1 if isinstance(number, torch.Tensor) else isinstance(number, numbers.Real)
        if not scalar:
            raise UsageError(
                f"{where} returned {_kind(number)} where a number was expected",
                do="sum over the samples: (correct.sum(), len(labels))",
            )
    total, weight = (v.detach() if isinstance(v, torch.Tensor) else v for v in value)
    return total, weight


def _parts(values: Sequence[Mapping[str, Pair]], leaves: range) -> list[tuple[str, int, int, float, float]]:
    """This process's sums for the whole nodes of the tree that cover its leaves: (name, level, index, sum, weight)."""
    parts = []
    for name in dict.fromkeys(name for value in values for name in value):
        for node in subtrees(leaves):
            start = (node.index << node.level) - leaves.start
            pairs = [value.get(name) for value in values[start : start + (1 << node.level)]]
            if any(pair is not None for pair in pairs):
                parts.append((name, node.level, node.index, *_sums(pairs)))
    return parts


def _sums_of_lanes(values: Sequence[tuple[int, Mapping[str, Pair]]]) -> list[tuple[str, int, int, float, float]]:
    """The sums of each lane, in the fixed tree over its turns: (name, 0, lane, sum, weight)."""
    rows = []
    for lane in sorted({lane for lane, _ in values}):
        turns = [pairs for of, pairs in values if of == lane]
        for name in dict.fromkeys(name for pairs in turns for name in pairs):
            rows.append((name, 0, lane, *_sums(pairs.get(name) for pairs in turns)))
    return rows


def _sums(pairs: Iterable[Pair | None]) -> Pair:
    """The sum of the sums and that of the weights, in the fixed tree; None where a micro-batch has none."""
    there = list(pairs)
    total, weight = (tree_sum(None if pair is None else pair[k] for pair in there) for k in (0, 1))
    return total, weight


def _mean(name: str, parts: Mapping[Node, Pair], calls: Calls) -> float:
    total = combine({node: pair[0] for node, pair in parts.items()}, calls.count, lambda a, b: a + b)
    weight = combine({node: pair[1] for node, pair in parts.items()}, calls.count, lambda a, b: a + b)
    of = f" of {name!r}" if name else ""
    if total is None or weight is None or not 0 < weight < math.inf:
        raise UsageError(
            f"the total weight{of} that {calls.name} returned is {weight}, expected a positive finite number",
            do="the weight is how many samples (or tokens) the sum is over",
        )
    return total / weight


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} ({value!r})" if isinstance(value, numbers.Number) else type(value).__name__


# ---- rows


def _rows(nest: Any, size: int, where: str) -> Any:
    """`nest` in plain dicts and tuples, on the CPU, after a look at whether it has a row for each of `size` samples."""
    if isinstance(nest, Mapping):
        return {name: _rows(value, size, f"{where}, {name!r}") for name, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_rows(value, size, f"{where}, [{j}]") for j, value in enumerate(nest))
    if nest is None:
        return None
    if isinstance(nest, torch.Tensor) and nest.is_nested:
        nest = list(nest.unbind())
    if isinstance(nest, (torch.Tensor, np.ndarray)):
        if nest.ndim == 0 or nest.shape[0] != size:
            raise UsageError(
                f"{where} returned shape {tuple(nest.shape)} for {size} samples, expected {size} rows",
                do="return one row a sample, along dimension 0",
            )
        return nest.detach().cpu() if isinstance(nest, torch.Tensor) else nest
    if isinstance(nest, list):
        if len(nest) != size:
            raise UsageError(
                f"{where} returned a list of {len(nest)} for {size} samples, expected one entry a sample",
                do="return several outputs as a tuple or a dict; a list has one entry a sample",
            )
        return [_entry(entry, where) for entry in nest]
    raise UsageError(
        f"{where} returned {_kind(nest)}, expected tensors or lists with a row or entry for each of {size} samples",
        do="return what you need of each sample, for example model(images).argmax(1)",
    )


def _entry(nest: Any, where: str) -> Any:
    """What a list holds for one sample, in plain dicts, lists and tuples, on the CPU."""
    if isinstance(nest, Mapping):
        return {name: _entry(value, where) for name, value in nest.items()}
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return {field.name: _entry(getattr(nest, field.name), where) for field in dataclasses.fields(nest)}
    if isinstance(nest, (list, tuple)):
        entries = [_entry(value, where) for value in nest]
        return tuple(entries) if isinstance(nest, tuple) else entries
    if isinstance(nest, torch.Tensor) and nest.layout == torch.strided:
        return nest.detach().as_subclass(torch.Tensor).cpu()
    if nest is None or isinstance(nest, (np.ndarray, np.generic, bool, int, float, complex, str, bytes)):
        return nest
    raise UsageError(
        f"{where} returned a list with a {type(nest).__name__} in it, which does not travel between processes",
        do="return tensors, arrays, numbers and texts, or dicts, lists and tuples of them, for each sample",
    )


def _form(nest: Any) -> str:
    """What must be the same in all micro-batches."""
    if isinstance(nest, dict):
        return "{" + ", ".join(f"{name!r}: {_form(value)}" for name, value in nest.items()) + "}"
    if isinstance(nest, tuple):
        return "(" + ", ".join(map(_form, nest)) + ")"
    if isinstance(nest, (torch.Tensor, np.ndarray)):
        sizes = ", ".join(["rows", *map(str, nest.shape[1:])])
        return f"{str(nest.dtype).removeprefix('torch.')}[{sizes}]"
    return "None" if nest is None else "list"


def _lists(nest: Any, change: Callable[[Any], Any]) -> Any:
    """`nest`, of dicts, tuples and lists of entries, with `change(entries)` in place of each list."""
    if isinstance(nest, dict):
        return {name: _lists(value, change) for name, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_lists(value, change) for value in nest)
    if isinstance(nest, list):
        return change(nest)
    return nest


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    return None if first is None else [entry for part in parts for entry in part]


def _refuse_empty() -> NoReturn:
    raise UsageError(
        "epoch 0 of the stream has no sample in any lane: there is nothing to compute",
        do="check what it reads: paths, filters, and how make(lane, lanes, epoch) uses lane and lanes",
    )


def _ragged(one: str, other: str) -> UsageError:
    return UsageError(
        f"predict cannot join what differs in more than its rows: {one}; {other}",
        do="pad it to one size, or return a list with one entry a sample",
    )
