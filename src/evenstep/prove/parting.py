"""Where two layouts part within one step: the first thing that differs, in the order in which things happen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstep.prove.suspects import loop_at

NOT_HERE = ("not here", "elsewhere")  # as train/trace.py and train/agreement.py write it
_PLACES = "\0"  # between a tensor's path and the places of the elements that a process has

Event = dict[str, Any]
Traces = Sequence[Sequence[Event]]  # by rank
Lines = Sequence[Any]  # [file, first line, last line]


@dataclass(frozen=True)
class Parting:
    """The first difference. `place` is one of:

    threads     torch's threads
    before      the state before the step
    data        a micro-batch as it was read
    model       what a module gave for equal input
    input       what the loss function gives to the model
    loss        what the loss function makes of what the model gave
    backward    the gradient that reaches a module's output
    sum         the gradient of the global batch, from equal leaves
    gradients   a gradient between step.backward and the optimizer
    hyperparameters   of the optimizer
    update      what the optimizer, or the loop after it, makes of equal gradients
    nowhere     the step is the same this time
    """

    place: str
    tensor: str | None = None  # the first tensor of the state that differs after the step, in model order
    names: tuple[str, ...] = ()  # what differs, by name
    call: int | None = None
    micro_batch: int | None = None
    module: str | None = None
    module_class: str | None = None
    lines: Lines | None = None  # of the user's code that may be at fault
    loop: Lines | None = None  # of the training loop
    changed: dict[str, list[str]] = field(default_factory=dict)  # what losses changed beside, on either layout
    values: dict[str, tuple[str, str]] = field(default_factory=dict)  # variables that differ before the step
    hyperparameters: tuple[str, ...] = ()  # that differ, with their values
    exact: bool = True
    stream: bool = False  # whether batches come from a stream


def parting(reference: Traces, other: Traces) -> Parting:
    """Compare the traces of one step. The order is that of the reference, which has one process."""
    finder = _Finder(reference, other)
    for found in finder.search():
        return found
    return finder.at("nowhere")


class _Finder:
    def __init__(self, reference: Traces, other: Traces) -> None:
        self.mine = [event for rank in reference for event in rank]
        self.theirs = [event for rank in other for event in rank]
        self.other = other
        self.called = {event["module"] for event in self.of("forward", self.theirs)}
        self.tensor = next(iter(self.differing("state", "after")), None)

    def at(self, place: str, **fields: Any) -> Parting:
        changed: dict[str, list[str]] = {}
        for event in (*self.of("loss", self.mine), *self.of("loss", self.theirs)):
            changed.update(event["changed"])
        exact = all(event["exact"] for event in self.of("begin", self.mine))
        stream = any(event["stream"] for event in self.of("begin", self.mine))
        fields.setdefault("tensor", self.tensor)
        about = {"values": self.values(), "loop": self.code("loop"), "hyperparameters": self.hyperparameters()}
        return Parting(place, changed=changed, exact=exact, stream=stream, **{**about, **fields})

    def search(self) -> Iterator[Parting]:
        yield from self.threads()
        before = self.differing("state", "before")
        if before:
            yield self.at("before", names=tuple(before), lines=self.code("loop"), tensor=before[0])
        for call in dict.fromkeys(event["call"] for event in self.of("batch", self.mine)):
            yield from self.one_call(call)
        yield from self.optimizers()
        after = self.differing("state", "after")
        if after:
            yield self.at("update", names=tuple(after), lines=self.code("loop"))

    def threads(self) -> Iterator[Parting]:
        counts = [{e["threads"] for kind in ("begin", "batch") for e in self.of(kind, some)} for some in self.both()]
        if counts[0] != counts[1]:
            said = tuple(", ".join(map(str, sorted(some))) for some in counts)
            yield self.at("threads", names=said)

    def one_call(self, call: int) -> Iterator[Parting]:
        for batch in self.of("batch", self.mine, call=call):
            i = batch["micro_batch"]
            if self.differs(batch, self.same("batch", call=call, micro_batch=i)):
                yield self.at("data", call=call, micro_batch=i, lines=self.code("data"))
            for event in self.of("forward", self.mine, call=call, micro_batch=i):
                if event["module"] not in self.called:
                    continue
                place = {"module": event["module"], "nth": event["nth"]}
                if self.differs(event, self.same("forward", call=call, micro_batch=i, **place)):
                    yield self.made_by(event, call, i)
            for event in self.of("loss", self.mine, call=call, micro_batch=i):
                if self.differs(event, self.same("loss", call=call, micro_batch=i)):
                    yield self.at("loss", call=call, micro_batch=i, lines=event["lines"])
            for event in self.of("backward", self.mine, call=call, micro_batch=i):
                if event["module"] not in self.called:
                    continue
                place = {"module": event["module"], "nth": event["nth"]}
                if self.differs(event, self.same("backward", call=call, micro_batch=i, **place)):
                    yield self.at("backward", call=call, micro_batch=i, module=event["module"])
        names = self.differing("gradients", call=call)
        if names:
            yield self.at("sum", call=call, names=tuple(names), module=names[0].rpartition(".")[0] or None)

    def made_by(self, event: Event, call: int, i: int) -> Parting:
        """The module whose own code made the difference: this one for equal input, else the one around it."""
        theirs = self.same("forward", call=call, micro_batch=i, module=event["module"], nth=event["nth"])
        maker = event
        while theirs and not any(one["got"] == maker["got"] for one in theirs):
            around = self.of("forward", self.mine, call=call, micro_batch=i, module=maker["parent"])
            if not around:
                loss = self.of("loss", self.mine, call=call, micro_batch=i)
                return self.at("input", call=call, micro_batch=i, lines=loss[0]["lines"] if loss else None)
            maker = around[0]
            theirs = self.same("forward", call=call, micro_batch=i, module=maker["module"], nth=maker["nth"])
        return self.at(
            "model",
            call=call,
            micro_batch=i,
            module=maker["module"],
            module_class=maker["kind_of_module"],
            lines=maker["lines"],
        )

    def optimizers(self) -> Iterator[Parting]:
        for a, b in self.updates():
            values = _differing(a["values"], b["values"])
            if values:
                yield self.at("hyperparameters", names=tuple(values), lines=self.code("loop"))
            names = tuple(_differing(a["hashes"], b["hashes"]))
            if names:
                yield self.at("gradients", names=names, lines=self.code("loop"))

    def updates(self) -> list[tuple[Event, Event]]:
        """What each optimizer found, on one process and on all of the other layout; values are rank 0's there."""
        mine = [{**one, "hashes": _joined([one["hashes"]])} for one in self.of("optimizer", self.mine)]
        theirs = [
            {**same[0], "hashes": _joined([one["hashes"] for one in same])}
            for same in zip(*(self.of("optimizer", list(events)) for events in self.other), strict=False)
        ]
        return list(zip(mine, theirs, strict=False))

    def hyperparameters(self) -> tuple[str, ...]:
        return tuple(
            f"{name} is {a['values'].get(name)} on 1 process and {b['values'].get(name)} here"
            for a, b in self.updates()
            for name in _differing(a["values"], b["values"])
        )

    # ---- looking things up

    def both(self) -> tuple[list[Event], list[Event]]:
        return self.mine, self.theirs

    def of(self, kind: str, events: list[Event], **fields: Any) -> list[Event]:
        return [e for e in events if e["kind"] == kind and all(e.get(name) == value for name, value in fields.items())]

    def same(self, kind: str, **fields: Any) -> list[Event]:
        return self.of(kind, self.theirs, **fields)

    def differs(self, mine: Event, theirs: list[Event]) -> bool:
        """Whether nobody on the other layout has the same. Of stages, those that do not have a module say so."""
        hashes = {event["hash"] for event in theirs} - {*NOT_HERE}
        return mine["hash"] not in ("", *NOT_HERE) and bool(hashes or not theirs) and mine["hash"] not in hashes

    def differing(self, kind: str, when: str | None = None, **fields: Any) -> list[str]:
        if when is not None:
            fields["when"] = when
        mine, theirs = (_joined([e["hashes"] for e in self.of(kind, some, **fields)]) for some in self.both())
        return _differing(mine, theirs)

    def code(self, what: str) -> Lines | None:
        begun = self.of("begin", self.mine)
        lines = begun[0]["code"].get(what) if begun else None
        return loop_at(lines) if what == "loop" else lines

    def values(self) -> dict[str, tuple[str, str]]:
        """Variables that are different before the step on some process of the other layout."""
        mine = self.of("state", self.mine, when="before")
        found: dict[str, tuple[str, str]] = {}
        for event in self.of("state", self.theirs, when="before"):
            for name, value in (mine[0]["values"] if mine else {}).items():
                theirs = event["values"].get(name, value)
                if theirs != value:
                    found.setdefault(name, (value, theirs))
        return found


def _joined(by_rank: Sequence[dict[str, str]]) -> dict[str, str]:
    """The hashes of whole things by name, from those of the processes: a tensor's parts add up to its hash."""
    found: dict[str, str] = {}
    parts: dict[str, dict[str, int]] = {}
    for hashes in by_rank:
        for name, value in hashes.items():
            path, is_part, place = name.partition(_PLACES)
            if is_part:
                parts.setdefault(path, {}).setdefault(place, int(value, 16))
            elif found.get(name, NOT_HERE[0]) in NOT_HERE:
                found[name] = value
    for path, places in parts.items():
        found[path] = f"{found.get(path, '')} {sum(places.values()) % (1 << 64):016x}"
    return found


def _differing(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Names with another value, in the order of `mine`; what is not whole on one side is left out."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    absent = [{name for name, value in some.items() if value in NOT_HERE} for some in (mine, theirs)]
    return [name for name in names if not any(name in some or _holds(name, some) for some in absent)]


def _holds(name: str, absent: Iterable[str]) -> bool:
    """Whether `name` is a container of what is not here: an optimizer's state is empty before its first step."""
    return any(one.startswith((f"{name}[", f"{name}.")) for one in absent)
