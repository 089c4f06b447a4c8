"""Is it the same model on every layout? Run them one after the other, compare, and find out why where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evenstep.prove.attempts import Attempt, Starter
from evenstep.prove.layouts import LAYOUTS, ONE, Layout
from evenstep.prove.parting import parting
from evenstep.prove.reasons import Finding, of_failure, of_itself, of_layout, of_options, of_resume
from evenstep.record.identity import differences

_LOOKS = 3  # at ever earlier steps, where a layout is not the same twice


@dataclass(frozen=True)
class Row:
    """What became of one layout. `verdict`: reference, identical, differs, refused or failed."""

    layout: Layout
    verdict: str
    steps: int  # done
    parts_at: int | None  # the first step, counted from 1, after which the fingerprint is another
    fingerprint: str  # after the last step
    reason: str = ""  # of a refusal, or the error
    error_type: str = ""


@dataclass(frozen=True)
class Proof:
    """What was shown."""

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]

    @property
    def compared(self) -> list[Row]:
        """The layouts that ran."""
        return [row for row in self.rows if row.verdict != "refused"]

    @property
    def works(self) -> bool:
        """Whether the script does its steps on one process."""
        return bool(self.rows) and self.rows[0].verdict == "reference"

    @property
    def identical(self) -> bool:
        """Whether every layout that was not refused gave the same."""
        return self.works and all(row.verdict in ("reference", "identical") for row in self.compared)

    def summary(self) -> str:
        """The last line."""
        if not self.works:
            return f"{ONE.title}: the script fails, so nothing was compared"
        compared, refused = len(self.compared), len(self.rows) - len(self.compared)
        said = f"{_count(compared, 'layout')}, {_count(self.rows[0].steps, 'step')}: "
        if self.identical:
            said += "identical" if compared > 1 else "nothing to compare with"
        else:
            worse = compared - sum(row.verdict in ("reference", "identical") for row in self.compared)
            names = ", ".join(dict.fromkeys(finding.name for finding in self.findings))
            said += f"{worse} differ{'s' if worse == 1 else ''}" + (f" ({names})" if names else "")
        return said + (f"; {refused} refused" if refused else "")


def prove(
    starter: Starter,
    layouts: Sequence[Layout],
    steps: int,
    *,
    begins: Callable[[str], None] = lambda title: None,
    ended: Callable[[Row], None] = lambda row: None,
) -> Proof:
    """Run `steps` steps on one process and on `layouts`. `begins` is told what is being done, `ended` each row."""
    return _Search(starter, steps, begins, ended).run([one for one in layouts if one.name != ONE.name])


class _Search:
    def __init__(
        self, starter: Starter, steps: int, begins: Callable[[str], None], ended: Callable[[Row], None]
    ) -> None:
        self._starter, self._steps, self._begins, self._ended = starter, steps, begins, ended
        self._rows: list[Row] = []
        self._findings: list[Finding] = []
        self._traces: dict[tuple[str, int], Attempt] = {}
        self._expected: dict[int, str] = {}

    def run(self, layouts: Sequence[Layout]) -> Proof:
        reference = self._attempt(ONE)
        self._expected = reference.fingerprints
        if reference.failure is None and not reference.fingerprints:
            self._add(_row(reference, {}, "it does no step of run.steps"))
        else:
            self._add(_row(reference, None))
        if self._rows[0].verdict != "reference":
            self._find(self._failed(self._rows[0]))
            return self._proof()
        for layout in layouts:
            if layout.resumed and self._steps < 2:
                self._add(Row(layout, "refused", 0, None, "", "there is no middle to stop in: give --steps 2 or more"))
                continue
            attempt = self._attempt(layout)
            self._add(_row(attempt, reference.fingerprints))
            self._starter.forget([attempt])
        self._explain()
        return self._proof()

    def _proof(self) -> Proof:
        return Proof(tuple(self._rows), tuple(self._findings))

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        self._ended(row)

    def _attempt(self, layout: Layout) -> Attempt:
        self._begins(layout.title)
        return self._starter.attempt(layout, self._steps)

    # ---- why

    def _explain(self) -> None:
        """One finding for each kind of layout that differs. One that differs from itself explains all others."""
        for row in self._rows:
            if row.verdict == "failed":
                self._find(self._failed(row))
        differing = [row for row in self._rows if row.verdict == "differs"]
        itself = [row for row in differing if row.layout.again]
        seen: dict[object, Finding] = {}
        for row in itself or differing:
            kind = (row.layout.resumed, row.layout.settings)
            finding = seen.get(kind)
            if finding is None:
                finding = self._reason(row)
                if finding.name == "unknown" and not any(one.layout.again for one in self._rows):
                    finding = self._differs_from_itself() or finding
                seen[kind] = finding
            self._find(finding)
            self._find(replace(finding, layout=row.layout.title))  # one of the same kind is not looked at by itself

    def _find(self, finding: Finding) -> None:
        """One finding for each reason and place, with all layouts that show it. Failures are one by their error."""
        for at, found in enumerate(self._findings):
            if _what(found) == _what(finding):
                others = dict.fromkeys([*found.others, finding.layout])
                self._findings[at] = replace(found, others=tuple(one for one in others if one != found.layout))
                return
        self._findings.append(finding)

    def _differs_from_itself(self) -> Finding | None:
        """The reason why one process differs from itself, if it does."""
        row = _row(self._attempt(LAYOUTS["again"]), self._expected)
        return self._reason(row) if row.verdict == "differs" else None

    def _failed(self, row: Row) -> Finding:
        return of_failure(row.layout.title, row.error_type, row.reason, self._starter.file)

    def _reason(self, row: Row) -> Finding:
        step, theirs = self._looked_at(row)
        mine = self._traced(ONE, step)
        title = row.layout.title
        other = differences(mine.identity(), theirs.identity(), "on 1 process", "here")
        if other:
            return of_options(title, step, other)
        where = parting(mine.traces(), theirs.traces())
        if row.layout.again:
            return of_itself(title, step, where, hashes=self._only_hashes())
        if row.layout.resumed:
            return of_resume(title, step, where)
        return of_layout(title, step, where, loaders=row.layout.settings.loaders is not None)

    def _looked_at(self, row: Row) -> tuple[int, Attempt]:
        """The layout's steps again, with a look at the first that differs; that may be an earlier one this time."""
        assert row.parts_at is not None
        step = row.parts_at
        found = self._traced(row.layout, step)
        for _ in range(_LOOKS):
            earlier = [n for n, one in found.fingerprints.items() if n < step and self._expected.get(n) != one]
            if not earlier:
                break
            step = min(earlier)
            found = self._traced(row.layout, step)
        return step, found

    def _traced(self, layout: Layout, step: int) -> Attempt:
        """The steps up to this one done again, with everything in it hashed."""
        key = layout.name, step
        if key not in self._traces:
            self._begins(f"{layout.title}: a look at step {step}")
            # All steps, since a resumed run is stopped in their middle.
            steps = self._steps if layout.resumed else step
            self._traces[key] = self._starter.attempt(layout, steps, trace_step=step - 1)
        return self._traces[key]

    def _only_hashes(self) -> bool:
        """Whether two starts with the same order of hashes are identical."""
        self._begins("1 process: whether the order of hashes matters")
        first, second = (self._starter.attempt(ONE, self._steps) for _ in range(2))
        return first.fingerprints == second.fingerprints


def _what(finding: Finding) -> tuple[str | None, ...]:
    return finding.name, finding.module, finding.message if finding.name == "failed" else None


def _row(attempt: Attempt, expected: dict[int, str] | None, reason: str = "") -> Row:
    """`expected`: the fingerprint after each step; None where this is what the others are compared with."""
    found = attempt.fingerprints
    last = found[max(found)] if found else ""
    verdict, parts_at = "reference" if expected is None else "identical", None
    if reason or attempt.failure is not None:
        verdict = "refused" if attempt.refused and expected is not None else "failed"
        reason = reason or attempt.message
    elif expected is not None and found != expected:
        verdict = "differs"
        parts_at = next(step for step in sorted({**expected, **found}) if expected.get(step) != found.get(step))
    return Row(attempt.layout, verdict, len(found), parts_at, last, reason, attempt.error_type)


def choose(names: str | None) -> list[Layout]:
    """The layouts by their names, separated by commas; None: all. KeyError with the name of one that is unknown."""
    if names is None:
        return list(LAYOUTS.values())
    return [LAYOUTS[name.strip()] for name in names.split(",")]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
