"""Proves the scripts of `mistakes/` one after the other, in one process with what they import imported once.

python -m tests.prove.prover FOLDER NAME:LAYOUTS ...   writes a line of JSON for each
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from evenstep.cli.proof_page import proof_json
from evenstep.launch.job import Script
from evenstep.launch.warm import Warm
from evenstep.prove.attempts import Starter
from evenstep.prove.layouts import LAYOUTS, ONE
from evenstep.prove.parting import parting
from evenstep.prove.proof import prove

MISTAKES = Path(__file__).parent / "mistakes"
STEPS = 4
OTHER_HASHES = ("no_mistake", "order_of_a_set")  # which are started with another order of hashes, too


def main(folder: Path, asked: list[str]) -> None:
    first = str(MISTAKES / "no_mistake.py")  # all of them import the same packages
    with ExitStack() as stack:
        warm, *others = (
            stack.enter_context(Warm(Script(first, False, ()), hash_seed=seed))
            for seed in ((1, 2) if any(one.split(":")[0] in OTHER_HASHES for one in asked) else (1,))
        )
        for name, layouts in (one.split(":") for one in asked):
            path = str(MISTAKES / f"{name}.py")
            other = others[0] if name in OTHER_HASHES else warm
            starter = Starter(Script(path, False, ()), folder / name, warm, partial(_given, other))
            chosen = [LAYOUTS[layout] for layout in layouts.split(",") if layout]
            found = proof_json(path, STEPS, prove(starter, chosen, STEPS))
            if name == "no_mistake":
                found["looks"] = looks(starter)
            print(json.dumps({"name": name, **found}), flush=True)


def _given(warm: Warm) -> Warm:
    return warm


def looks(starter: Starter) -> dict[str, str]:
    """Where each layout parts from one process in the first step (resumed: the second), or why it cannot be had."""
    first, second = (starter.attempt(ONE, 2, trace_step=step).traces() for step in (0, 1))
    attempts = {
        name: starter.attempt(layout, 2, trace_step=1 if layout.resumed else 0) for name, layout in LAYOUTS.items()
    }
    return {
        name: found.message or parting(second if found.layout.resumed else first, found.traces()).place
        for name, found in attempts.items()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
