"""Processes that shard a model must call its collectives in one order; else they wait for each other for ever.

In the first pass of a kind each collective is agreed on before it starts, and the order is kept. In later ones each
process compares what it is about to do with that, by itself. So a process can also run along without computing: it
does the collectives of the order one after the other. That is what one does that has no micro-batch left, and one
that failed: the others find out at their next meeting, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evenstep.errors import PeerFailed, UsageError
from evenstep.train.meeting import Meeting, by_value, ranks_text

Event = tuple[str, int]  # what is done ("gather", "reduce") with the parameters of which group


class CollectiveOrder:
    """`perform` does the collective of an event without computing, `name` names a group of parameters."""

    def __init__(self, meeting: Meeting, perform: Callable[[Event], None], name: Callable[[int], str]) -> None:
        self.meeting = meeting
        self.perform, self.name = perform, name
        self._known: dict[str, list[Event]] = {}
        self._now: Pass | None = None
        self._trusted = False

    @property
    def within(self) -> bool:
        """A pass is under way."""
        return self._now is not None

    def before(self, kind: str, group: int) -> None:
        """Call it before every collective. Raises where it must not be started."""
        if self._trusted:
            return
        if self._now is not None:
            self._now.before((kind, group))
        elif kind == "reduce":
            raise UsageError(
                "a backward pass through a sharded model outside of step.backward",
                do="put the loss into a function: step.backward(loss_fn)",
            )
        else:
            self.meeting.exchange("a call of the model outside of step.backward", signature=self.name(group))

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """All processes do the same inside: nothing is compared."""
        self._trusted = True
        try:
            yield
        finally:
            self._trusted = False

    def planned(self, event: Event) -> int | None:
        """How often the pass under way does it; None where that is not known yet."""
        assert self._now is not None
        return None if self._now.learning else self._now.events.count(event)

    def run(self, key: str, work: Callable[[], None] | None, failed: Exception | None) -> tuple[Exception | None, bool]:
        """One pass of the kind `key`: `work`, then what is left of the order. Without work, or where this process
        `failed` before, all of the order.

        Returns the first error, and whether the others know of it: then there are no further passes.
        """
        now = self._now = Pass(self, self._known.get(key))
        error = failed
        try:
            if work is not None and error is None:
                try:
                    work()
                except Exception as caught:
                    error = caught
            try:
                now.end(error)
            except Exception as caught:
                error = error or caught
        finally:
            self._now = None
        if now.learning and now.events and error is None:
            self._known[key] = now.events
        return now.stop or error, now.stop is not None or now.told


class Pass:
    """One forward or backward pass of this process."""

    def __init__(self, order: CollectiveOrder, known: list[Event] | None) -> None:
        self._order = order
        self.learning = known is None
        self.events: list[Event] = [] if known is None else known
        self._position = 0
        self.stop: Exception | None = None  # raised on all processes
        self.told = False  # the others know that this one failed

    def before(self, event: Event) -> None:
        if self.stop is not None:  # the user's code has caught it
            raise self.stop
        if self.learning:
            self._agree(event)
        else:
            expected = self.events[self._position] if self._position < len(self.events) else None
            if event != expected:
                raise self._deviates(event, expected)
            self._position += 1

    def end(self, error: Exception | None) -> None:
        """What is left, for the sake of the others."""
        if self.stop is not None:
            return
        if not self.learning:
            while self._position < len(self.events):
                self._position += 1
                self._order.perform(self.events[self._position - 1])
        elif error is not None:
            self.told = True
            self._say(None, f"{type(error).__name__}: {error}".strip())
        else:
            while (event := self._agree(None)) is not None:
                self._order.perform(event)

    def _agree(self, event: Event | None) -> Event | None:
        """What comes next, on those processes that compute. None: nothing any more."""
        answers = self._say(event, None)
        failed = [f"rank {rank}: {a['failed']}" for rank, a in answers.items() if a["failed"] is not None]
        if failed:
            self.stop = PeerFailed(
                "a pass failed on another process\n    " + "\n    ".join(failed),
                do="see that process's log for its traceback",
            )
            raise self.stop
        said = {rank: (a["next"][0], a["next"][1]) for rank, a in answers.items() if a["next"] is not None}
        if len(set(said.values())) > 1:
            self.stop = self._parted(said)
            raise self.stop
        if not said:
            return None
        self.events.append(next(iter(said.values())))
        return self.events[-1]

    def _say(self, event: Event | None, failed: str | None) -> dict[int, Any]:
        meeting = self._order.meeting
        answers = meeting.say("a pass of the model", {"next": event, "failed": failed}, site="")
        return dict(zip(meeting.members, answers, strict=True))

    def _parted(self, said: dict[int, Event]) -> UsageError:
        texts = by_value(self._text(event) for event in said.values())
        ranks = list(said)
        return UsageError(
            "the processes reach other modules of the model: "
            + "; ".join(f"{ranks_text([ranks[k] for k in places])}: {text}" for text, places in texts.items()),
            do=self._advice(list(said.values())),
        )

    def _deviates(self, event: Event, expected: Event | None) -> UsageError:
        instead = f"; the first micro-batch reached {self._text(expected)}" if expected else ", once more than at first"
        events = [event] if expected is None else [event, expected]
        return UsageError(f"the model reaches {self._text(event)} here{instead}", do=self._advice(events))

    def _text(self, event: Event) -> str:
        name = self._order.name(event[1])
        return name if event[0] == "gather" else f"the gradients of {name}"

    def _advice(self, events: list[Event]) -> str:
        names = dict.fromkeys(self._order.name(group) for _, group in events)
        return (
            "what is sharded by itself must be called for every micro-batch alike, in one order: leave out "
            f"{' and '.join(names)} (prepare(model, shard=[names of the other modules]), [] for none)"
        )
