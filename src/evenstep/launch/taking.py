"""Taking a terminal's signals for a while."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ECHO = 2.0  # seconds


class Echo:
    """Tells a request to stop from its echo: Slurm signals every process, and each launcher passes it on as well.

    Ctrl-C has none.
    """

    def __init__(self) -> None:
        self._first: float | None = None

    def is_one(self, number: int) -> bool:
        """Whether this signal, which has come now, is no request of its own."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return number != signal.SIGINT and now - self._first < _ECHO


@contextmanager
def signals_to(handler: Callable[[int], None], *numbers: int) -> Iterator[None]:
    """Have these signals call `handler`; those that were ignored (nohup) stay ignored."""
    before: dict[int, Any] = {}
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, lambda received, _: handler(received))
    try:
        yield
    finally:
        for caught, was in before.items():
            signal.signal(caught, was)
