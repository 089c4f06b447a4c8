"""Noticing that processes wait for one that does not come."""

from __future__ import annotations

from evenstep.launch.others import Doings
from evenstep.record.activity import MEETING, Doing

AFTER = 60.0  # seconds


class Standstill:
    """Looks again and again at what the processes of this host are doing."""

    def __init__(self) -> None:
        self._seen: dict[int, Doing] = {}
        self._since = 0.0
        self._told = False

    def look(self, doings: Doings, now: float) -> bool:
        """Whether it is to be said, once, that for AFTER seconds some have waited and others done the same thing.

        `now` in seconds. All that wait say nothing: it is another host's processes that they wait for.
        """
        if doings != self._seen:
            self._seen, self._since, self._told = dict(doings), now, False
        waiting = sum(doing.phase == MEETING for doing in doings.values())
        if self._told or now < self._since + AFTER or waiting in (0, len(doings)):
            return False
        self._told = True
        return True
