"""What a run needs to know of the data that it trains on, of whatever kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from evenstep.plan.lanes import LaneSchedule, Plan
from evenstep.plan.schedule import Schedule

Turns = Iterator[tuple[Plan, Iterator[Any]]]
"""The steps that are left, each with this process's micro-batches."""


class TrainingData(Protocol):
    """A map-style data set or a stream, on this process, and how far it has been read.

    First `begin` or `go_to_end`; then `turns`, and `done` after each of them in which the optimizer stepped.
    """

    data: Any
    """What the script gave."""

    @property
    def schedule(self) -> Schedule | LaneSchedule:
        """The steps of the whole run."""

    def has_done(self, before: Mapping[str, Any]) -> bool:
        """Whether nothing is left to do of a run that finished so: with so many "steps", or its `ended`."""

    def begin(self, about: Mapping[str, Any] | None) -> int:
        """At the place that a checkpoint names (None: at the beginning); the step that comes there. UsageError on every
        process where they would read different data, IdentityError where the checkpoint was made with other data."""

    def go_to_end(self, done: int) -> int:
        """Nothing is left to do after the `done` steps: the step that would come next."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""

    @property
    def micro_batches(self) -> int:
        """V: how many micro-batches the first step has."""

    def lines(self) -> list[str]:
        """What is going to be read, for people."""

    def turns(self) -> AbstractContextManager[Turns]:
        """The steps that are left, each with this process's micro-batches."""

    def done(self) -> None:
        """The optimizer has stepped: the next checkpoint is of the place after the step that was read last."""

    @property
    def place(self) -> dict[str, Any]:
        """What a checkpoint keeps of the place, beside step and cursor."""

    @property
    def left_early(self) -> bool:
        """Whether steps are left that were not done."""

    @property
    def ended(self) -> dict[str, Any]:
        """What is to be known of a finished run, beside its number of steps."""
