"""What `evenstep prove` shows: a table that grows row by row, the reasons below it, or JSON."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from evenstep.prove.proof import Proof, Row
from evenstep.prove.reasons import Finding
from evenstep.record.events import read_events
from evenstep.record.paths import RunPaths

_WIDTHS = (22, 7, 18)
_WIDE = 110  # columns of a line of text


class Table:
    """Rows as they come, on standard output; what is being done, on standard error where that is a terminal."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self._steps, self._quiet = steps, quiet
        self._terminal = sys.stderr.isatty()
        self._doing = ""
        self._shown = ""
        self._headed = quiet

    def begins(self, title: str) -> None:
        """What is done from now on."""
        self._doing = title
        self._tell(title)

    def watches(self, paths: RunPaths) -> None:
        """Called a few times a second while a layout runs."""
        if self._terminal:
            done = sum(event["kind"] == "step" for event in read_events(paths.events(0)))
            self._tell(f"{self._doing}: step {done}/{self._steps}" if done else f"{self._doing}: starting")

    def ended(self, row: Row) -> None:
        """A layout is done."""
        self._tell("")
        if not self._headed:
            self._headed = True
            click.echo(_line("layout", "steps", "fingerprint", "verdict"))
        if not self._quiet:
            click.echo(_line(row.layout.title, str(row.steps or "-"), row.fingerprint or "-", _verdict(row)))

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._tell("")

    def _tell(self, text: str) -> None:
        if self._terminal and text != self._shown:
            sys.stderr.write("\r\x1b[K" + text)
            sys.stderr.flush()
            self._shown = text


def _line(*cells: str) -> str:
    widths = (*_WIDTHS, 0)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _verdict(row: Row) -> str:
    first = row.reason.strip().partition("\n")[0]
    return {
        "reference": "what the others are compared with",
        "identical": "identical",
        "differs": f"differs from step {row.parts_at}",
        "refused": f"refused: {first}",
        "failed": f"failed: {first}",
    }[row.verdict]


def finding_lines(proof: Proof) -> Iterator[str]:
    """The reasons, in words."""
    for finding in proof.findings:
        yield ""
        yield from _wrapped(f"{finding.name}: {'; '.join((finding.layout, *finding.others))}: {finding.what}", "")
        if finding.step is not None:
            yield from _wrapped(_where(finding), "    ")
        if finding.message:
            for line in finding.message.splitlines():
                yield f"    {line}"  # a traceback's lines stay whole
        for line in finding.evidence:
            yield from _wrapped(f"- {line}", "    ")
        if "what to do:" not in finding.message:  # an error of evenstep's says it itself
            yield from _wrapped(f"what to do: {finding.do}", "  ")
    if proof.findings:
        yield ""


def _where(finding: Finding) -> str:
    said = f"it parts from 1 process in step {finding.step}"
    if finding.tensor is not None:
        said += f"; the first tensor that differs: {finding.tensor}"
    if finding.module is not None:
        said += f"; made by the module {finding.module}"
    return said


def _wrapped(text: str, indent: str) -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDE, indent, indent + "  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [indent]


def proof_json(script: str, steps: int, proof: Proof) -> dict[str, Any]:
    """The proof for machines. Steps count from 1."""
    return {
        "script": script,
        "steps": steps,
        "identical": proof.identical,
        "summary": proof.summary(),
        "layouts": [
            {
                "name": row.layout.name,
                "title": row.layout.title,
                "verdict": row.verdict,
                "steps": row.steps,
                "parts_at": row.parts_at,
                "fingerprint": row.fingerprint,
                "reason": row.reason,
            }
            for row in proof.rows
        ],
        "findings": [asdict(finding) for finding in proof.findings],
    }
