"""Asks all hosts of a launch what they have and how they reach each other."""

from __future__ import annotations

import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from evenstep.doctor.facts import Facts, clock, nearest
from evenstep.doctor.links import Measured, rounds
from evenstep.doctor.talk import Host
from evenstep.errors import MachineError
from evenstep.launch.hosts.line import Message
from evenstep.launch.output import Say

_SAY_AFTER = 2.0  # seconds
_ANSWER = 30.0
_FACTS = 180.0  # torch is imported
_SEND = 0.3  # seconds in which to measure a bandwidth
_CLOCK_WORDS = 5


@dataclass(frozen=True)
class Way:
    """One direction between two hosts, by their place in `Survey.hosts`."""

    source: int
    target: int
    measured: Measured


@dataclass
class Survey:
    """What was found."""

    hosts: list[Facts] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)  # seconds by which each is before the first host's
    clock_errors: list[float] = field(default_factory=list)  # at most so wrong
    ways: list[Way] = field(default_factory=list)
    unreached: dict[str, str] = field(default_factory=dict)  # by name: why there is nothing of this host
    by_hand: bool = False
    backend: str | None = None
    untold: list[str] = field(default_factory=list)  # other things that end a launch
    report: dict[str, Any] = field(default_factory=dict)  # all this and the verdict, as plain values


def survey(hosts: Mapping[str, Host], found: Survey, run: str | None, say: Say) -> Survey:
    """Ask all hosts (by name, node 0 first), and add it to what was `found` on the way to them."""
    return _Asking(dict(hosts), found, say).all(run)


class _Asking:
    def __init__(self, hosts: dict[str, Host], found: Survey, say: Say) -> None:
        self._hosts, self._found, self._say = hosts, found, say
        self._began = time.monotonic()

    def all(self, run: str | None) -> Survey:
        found = self._found
        self._say(f"asking {', '.join(self._hosts)} for what is there; torch is imported")
        with _probe(run) if len(self._hosts) > 1 else nullcontext() as probe:
            facts = self._ask(self._hosts, _FACTS, lambda name: {"question": "facts", "probe": probe})
        clocks = {name: self._clock(name) for name in facts}
        names = [name for name in facts if name in self._hosts]
        found.hosts = [Facts(**facts[name]) for name in names]
        first = clocks[names[0]][0] if names else 0.0
        found.clocks = [clocks[name][0] - first for name in names]
        found.clock_errors = [clocks[name][1] for name in names]
        if len(names) > 1:
            self._measure(names)
        return found

    def _ask(
        self, names: Iterable[str], seconds: float, question: Callable[[str], dict[str, Any]]
    ) -> dict[str, Message]:
        """Ask some hosts at once; those that do not answer are told of, and not asked again."""
        answers: dict[str, Message] = {}
        asked = [name for name in names if name in self._hosts]
        failed: dict[str, BaseException] = {}

        def ask(name: str) -> None:
            try:
                answers[name] = self._hosts[name].ask(seconds, **question(name))
            except BaseException as error:
                failed[name] = error

        # Daemons, since Ctrl-C is not to wait for them.
        threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, error in failed.items():
            if not isinstance(error, MachineError):
                raise error
            self._found.unreached[name] = error.message
            del self._hosts[name]
        return {name: answers[name] for name in asked if name in answers}

    def _clock(self, name: str) -> tuple[float, float]:
        """How far the host's clock is before this one's, and how wrong that may be: from the quickest answer."""
        best = (0.0, float("inf"))
        for _ in range(_CLOCK_WORDS):
            before = clock()
            answer = self._ask([name], _ANSWER, lambda _: {"question": "clock"})
            took = clock() - before
            if name not in answer:
                break
            if took / 2 < best[1]:
                best = (answer[name]["time"] - before - took / 2, took / 2)
        return best

    def _measure(self, names: list[str]) -> None:
        secret = secrets.token_hex(16)
        places = self._ask(names, _ANSWER, lambda name: {"question": "listen", "secret": secret})
        for name in [name for name, place in places.items() if "error" in place]:
            self._found.untold.append(f"{name} {places.pop(name)['error']}")
        turns = rounds(len(names))
        for number, pairs in enumerate(turns, 1):
            self._progress(f"measuring the network: round {number} of {len(turns)}")
            for there in (pairs, [(target, source) for source, target in pairs]):
                able = {names[a]: (a, b) for a, b in there if names[a] in places and names[b] in places}

                def question(name: str, able: Mapping[str, tuple[int, int]] = able) -> dict[str, Any]:
                    place = places[names[able[name][1]]]
                    return {"question": "measure", "secret": secret, "send_for": _SEND, **place}

                for name, answer in self._ask(able, 2 * _ANSWER, question).items():
                    self._found.ways.append(Way(*able[name], Measured(**answer)))

    def _progress(self, line: str) -> None:
        if time.monotonic() > self._began + _SAY_AFTER:
            self._say(line)


@contextmanager
def _probe(run: str | None) -> Iterator[str | None]:
    """The name of an empty file in this host's run directory (or the nearest folder that there is)."""
    place = nearest(run) / f".evenstep-probe-{secrets.token_hex(4)}"
    try:
        place.touch()
    except OSError:
        yield None
        return
    try:
        yield place.name
    finally:
        with suppress(OSError):
            place.unlink()


def slowest(ways: Iterable[Way]) -> Way | None:
    """The direction in which least goes through."""
    able = [way for way in ways if way.measured.error is None]
    return min(able, key=lambda way: way.measured.bandwidth, default=None)


def usual_bandwidth(ways: Iterable[Way]) -> float:
    """The median over all directions; 0 if there is none."""
    return statistics.median([way.measured.bandwidth for way in ways if way.measured.error is None] or [0.0])
