"""The conversation of `evenstep doctor`: one process puts questions to every host, one at a time, and each answers."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Protocol

from evenstep.doctor.facts import Asked, clock, examine
from evenstep.doctor.links import Listener, measure
from evenstep.errors import MachineError
from evenstep.launch.hosts.line import Line, Message

_PATIENCE = 600.0  # seconds in which the next question comes


class Host(Protocol):
    """A host that can be asked."""

    def ask(self, seconds: float, **question: Any) -> Message:
        """Its answer. MachineError if it has gone, or does not answer in time."""


class Examined:
    """This host, which answers for itself."""

    def __init__(self, asked: Asked, problems: tuple[str, ...] = ()) -> None:
        self._asked, self._problems = asked, problems
        self._listener: Listener | None = None

    def ask(self, seconds: float, **question: Any) -> Message:
        """Answer a question."""
        kind = question["question"]
        if kind == "facts":
            return asdict(examine(replace(self._asked, probe=question["probe"]), self._problems))
        if kind == "clock":
            return {"time": clock()}
        if kind == "listen":
            try:
                self._listener = Listener(self._asked.address, question["secret"])
            except OSError as error:
                return {"error": f"cannot listen at {self._asked.address}: {error.strerror or error}"}
            return {"address": self._asked.address, "port": self._listener.port}
        assert kind == "measure"
        return asdict(measure(question["address"], question["port"], question["secret"], question["send_for"]))

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()


class Distant:
    """A host at the other end of a line."""

    def __init__(self, line: Line, why_gone: Callable[[], str]) -> None:
        self._line, self._why_gone = line, why_gone

    def ask(self, seconds: float, **question: Any) -> Message:
        """Ask it, and wait for its answer."""
        self._line.send(**question)
        answer = _next(self._line, seconds)
        if answer is None:
            raise MachineError(self._why_gone())
        return answer

    def close(self, **last: Any) -> None:
        """Say the last thing to it."""
        self._line.send(leave=True, **last)
        until = time.monotonic() + 2.0
        while self._line.waits and self._line.flush() and time.monotonic() < until:
            time.sleep(0.01)
        self._line.close()


def answer_all(line: Line, host: Examined) -> Message:
    """Answer what comes over the line; the last thing that was said. MachineError if the other end goes."""
    try:
        while True:
            question = _next(line, _PATIENCE)
            if question is None:
                raise MachineError("node 0 has gone, or was not started as `evenstep doctor`", do="see what it said")
            if "leave" in question or "refused" in question:
                return question
            line.send(**host.ask(0.0, **question))
    finally:
        host.close()


def _next(line: Line, seconds: float) -> Message | None:
    """The next message; None once the other end has gone. MachineError after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        line.flush()
        left = deadline - time.monotonic()
        if left <= 0:
            raise MachineError(f"it did not answer within {seconds:.0f} s")
        if select.select([line], [], [], min(left, 0.05) if line.waits else left)[0]:
            messages = line.receive()
            if messages is None:
                return None
            if messages:
                return messages[0]
