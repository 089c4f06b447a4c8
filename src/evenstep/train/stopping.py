"""Being asked to stop: SIGTERM, SIGUSR1 (preemption) or Ctrl-C. The step is finished first, a checkpoint written."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from evenstep.environment import LEAVES_SIGNALS, NOTICES, STOPPING, TAKES_SIGNALS

_ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
_ECHO = 5.0  # seconds in which the same request may come twice: Slurm signals every process, and so do launchers


class Stopping:
    """Takes these signals for as long as a training loop runs. A second one ends the process as it always did.

    Signals for which the script has a handler of its own are left to it.
    """

    def __init__(self, ask: Callable[[int], None]) -> None:
        """`ask(number)` is called when a signal comes; it is called between two instructions of the main thread."""
        self._ask = ask
        self._before: dict[int, Any] = {}
        self._asked: float | None = None  # when

    def begin(self) -> None:
        """Take the signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            return  # only there can Python take signals
        for number in _ASKING:
            earlier = getattr(signal.getsignal(number), "__self__", None)
            if isinstance(earlier, Stopping):  # of a run that was stopped, in a notebook
                earlier._leave()
            if signal.getsignal(number) in _DEFAULT:
                self._before[number] = signal.signal(number, self._got)
        if self._before:
            tell_launcher(TAKES_SIGNALS)

    def end(self) -> None:
        """Leave the signals to whoever had them. After a request to stop that is left to the second one."""
        if self._asked is None:
            self._leave()

    def _leave(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            tell_launcher(LEAVES_SIGNALS)
        self._before.clear()

    def _got(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            self._ask(number)
            tell_launcher(STOPPING)
        elif number == signal.SIGINT or now - self._asked > _ECHO:
            self._leave()
            os.kill(os.getpid(), number)


def tell_launcher(said: str) -> None:
    """Tell the launcher, if there is one of evenstep's."""
    descriptor = os.environ.get(NOTICES, "")
    if descriptor.isdigit():
        with suppress(OSError):
            os.write(int(descriptor), f"{said} {os.environ.get('RANK', '0')}\n".encode())
