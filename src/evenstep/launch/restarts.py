"""Whether a run that failed is started again by itself, from its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.record.paths import RunPaths, newest_checkpoint


@dataclass(frozen=True)
class Verdict:
    """What follows a failure: a start again, or the end; and what is said of it ("": nothing)."""

    again: bool
    line: str = ""
    checkpoint: str = ""  # where the last one lies

    @classmethod
    def of_none(cls) -> Verdict:
        """Nobody was to decide."""
        return cls(False)


class Restarts:
    """Counts the starts again of one run.

    A failure in the same step as the one before, with which no other start would help, is not tried once more; and
    none that the same command is bound to meet again.
    """

    def __init__(self, most: int, with_what: str = "") -> None:
        """`with_what`: the processes of every start, where it is known beforehand."""
        self.most, self._with_what = most, with_what and f", with {with_what}"
        self.done = 0
        self._step: int | None = None  # in which the last failure came; 0: before the first

    def decide(self, paths: RunPaths, step: int | None, *, lasting: bool) -> Verdict:
        """After a failure in `step` (None: not known). `lasting`: the same command would meet it again."""
        newest = newest_checkpoint(paths)
        where = "" if newest is None else str(paths.checkpoint(newest))
        if lasting or self.most == 0:
            return Verdict(False, "", where)
        same, self._step = step is not None and step == self._step, step
        if same:
            place = f"in step {step}" if step else "before the first step"
            return Verdict(False, f"it failed {place} as it did before: not started again", where)
        if self.done == self.most:
            return Verdict(False, f"it was started again {_times(self.most)}, as --restarts allows: no more", where)
        self.done += 1
        begin = "the beginning (there is no checkpoint)" if newest is None else f"step {newest} ({where})"
        return Verdict(True, f"starting again ({self.done} of {self.most}), from {begin}{self._with_what}", where)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
