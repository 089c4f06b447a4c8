"""Processes that hold one model together must run its forward and backward passes at the same time.

What a process computes by itself (an evaluation's micro-batches, the checks of the first step) is done in passes; all
`ranks` do equally many of them, and one that has nothing to compute in a pass, or has failed, runs along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")

HANDED_OVER = object()
"""What a function of a model comes to on a process that has only the model's beginning: the next one goes on."""


class Passes(ABC):
    """Passes of some models, one after the other. `failed` is the first error that came up in them."""

    def __init__(self) -> None:
        self.failed: Exception | None = None

    def run(self, work: Callable[[], T] | None, part: str = "forward") -> T | None:
        """What `work` returns; None where there is no work, or a pass before has failed. Errors are kept.

        `part` tells passes apart that call other modules."""
        done: list[T] = []
        self._run(None if work is None or self.failed else lambda: done.append(work()), part)
        return done[0] if done else None

    def check(self) -> None:
        """Raises what failed."""
        if self.failed is not None:
            raise self.failed

    def outcome(self, found: T) -> T:
        """What the passes came to, where `found` is what this process has found; then `failed` is known everywhere."""
        return found

    @abstractmethod
    def _run(self, work: Callable[[], None] | None, part: str) -> None: ...


class Lockstep(ABC):
    """`ranks` hold one model together, this process among them."""

    ranks: Sequence[int]

    @abstractmethod
    def passes(self, models: Sequence[nn.Module], what: str, site: str) -> Passes:
        """Begins passes of `models`; all of `ranks` must be at the same `what` and line of the user's code."""

    @abstractmethod
    def agree(self, said: object, site: str) -> list[Any]:
        """What each of `ranks` has said (plain JSON values)."""

    def check(self, returned: Any) -> None:  # noqa: B027  # most have nothing to refuse
        """UsageError for what a function of a model may not return here."""


class Alone(Lockstep):
    """This process has a whole model, and waits for nobody."""

    def __init__(self, rank: int) -> None:
        self.ranks = [rank]

    def passes(self, models: Sequence[nn.Module], what: str, site: str) -> Passes:
        return _OwnPasses()

    def agree(self, said: object, site: str) -> list[Any]:
        return [said]


class _OwnPasses(Passes):
    def _run(self, work: Callable[[], None] | None, part: str) -> None:
        if work is None:
            return
        try:
            work()
        except Exception as error:
            self.failed = error
