"""Proves the scripts of `mistakes/` one after the other, in one process with what they import imported once.

python -m tests.prove.prover FOLDER NAME:LAYOUTS ...   writes {name: proof} as JSON to standard output
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evenstep.cli.proof_page import proof_json
from evenstep.launch.local import Script
from evenstep.launch.warm import Warm
from evenstep.prove.attempts import Starter
from evenstep.prove.layouts import LAYOUTS
from evenstep.prove.proof import prove

MISTAKES = Path(__file__).parent / "mistakes"
STEPS = 4


def main(folder: Path, asked: list[str]) -> None:
    proofs = {}
    first = str(MISTAKES / "no_mistake.py")  # all of them import the same packages
    with Warm(first, as_module=False, hash_seed=1) as warm, Warm(first, as_module=False, hash_seed=2) as other:
        for name, layouts in (one.split(":") for one in asked):
            path = str(MISTAKES / f"{name}.py")
            starter = Starter(Script(path, False, ()), folder / name, warm, lambda: other)
            chosen = [LAYOUTS[layout] for layout in layouts.split(",") if layout]
            proofs[name] = proof_json(path, STEPS, prove(starter, chosen, STEPS))
    json.dump(proofs, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
