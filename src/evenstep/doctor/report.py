"""A survey and its findings as plain values: what `--json` prints, what nodes are sent, what the table is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from evenstep.doctor.judge import Finding
from evenstep.doctor.survey import Survey, Way, slowest


def report_of(survey: Survey, findings: Sequence[Finding]) -> dict[str, Any]:
    """Times in seconds, sizes in bytes, bandwidths in bytes a second."""
    worst = slowest(survey.ways)
    return {
        "would_start": not any(finding.fails for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "hosts": [
            {**asdict(facts), "clock": {"before_the_first": offset, "error": error}}
            for facts, offset, error in zip(survey.hosts, survey.clocks, survey.clock_errors, strict=True)
        ],
        "links": [_link(survey, way) for way in survey.ways],
        "slowest_link": None if worst is None else _link(survey, worst),
        "unreached": survey.unreached,
    }


def _link(survey: Survey, way: Way) -> dict[str, Any]:
    names = {"from": survey.hosts[way.source].host, "to": survey.hosts[way.target].host}
    return {**names, **asdict(way.measured)}
