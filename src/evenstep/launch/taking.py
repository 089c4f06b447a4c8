"""Taking a terminal's signals for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
