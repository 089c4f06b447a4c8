"""From what became of the layouts to findings."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from evenstep.cli.proof_page import finding_lines
from evenstep.prove.layouts import LAYOUTS, Layout
from evenstep.prove.proof import prove


class Failing:
    """Every layout that has an error here fails with it; no process is started."""

    file = None

    def __init__(self, errors: Mapping[str, str]) -> None:
        self._errors = errors

    def attempt(self, layout: Layout, steps: int, *, trace_step: int | None = None) -> Any:
        message = self._errors.get(layout.name, "")
        about = {"failure": message or None, "message": message, "error_type": "ValueError" if message else ""}
        return SimpleNamespace(layout=layout, fingerprints={1: "a"}, refused=False, **about)

    def forget(self, attempts: object) -> None:
        pass


def test_each_error_is_a_finding_that_names_its_layouts() -> None:
    errors = {"2": "ValueError: no", "3": "KeyError: b", "shard": "ValueError: no", "loaders": "ValueError: no"}
    starter: Any = Failing(errors)
    proof = prove(starter, list(LAYOUTS.values()), 1)
    assert [(one.name, one.message, one.layout, one.others) for one in proof.findings] == [
        ("failed", "ValueError: no", "2 processes", ("2 shards", "2 loader processes")),
        ("failed", "KeyError: b", "3 processes", ()),
    ]
    assert "failed: 2 processes; 2 shards; 2 loader processes: the script fails" in list(finding_lines(proof))
    assert proof.summary().endswith("4 differ (failed); 1 refused")
