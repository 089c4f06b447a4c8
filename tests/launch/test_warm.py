"""Many starts of one script from a process that has imported what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launch.launching import clean_environ, write_script

# In a process of its own: whoever launches adopts orphans from then on.
MANY = """
import sys
from pathlib import Path
from evenstep.environment import Settings
from evenstep.launch.job import Script
from evenstep.launch.local import Work, run_alone
from evenstep.launch.warm import Warm
from evenstep.record.paths import RunPaths

def start(warm, name, processes):
    paths = RunPaths(Path(name))
    paths.root.mkdir()
    work = Work(Script("script.py", False, ("word",)), processes, Settings(), show="none", say=print)
    outcome = run_alone(work, paths, made=(), warm=warm)
    logs = [paths.log(rank).read_text() for rank in range(processes)]
    return sorted(one.code for one in outcome.exits), sorted("".join(logs).splitlines())

ours = Script("script.py", False, ())
with Warm(ours, hash_seed=5) as warm, Warm(ours, hash_seed=6) as other:
    assert warm.refusal() is None
    first = start(warm, "a", 1)
    print(first)
    print(start(warm, "b", 2))
    assert start(warm, "c", 1)[1] == first[1]
    assert start(other, "d", 1)[1] != first[1]
"""
SCRIPT = """
import os, sys
import numpy
import evenstep
print(os.environ["RANK"], sys.argv, os.environ.get("PYTHONHASHSEED"), file=sys.stderr)
print({"a", "b", "c", "d", "e", "f", "g"})
assert os.environ.get("OMP_NUM_THREADS") == (None if os.environ["WORLD_SIZE"] == "1" else "1")
sys.exit(int(os.environ["RANK"]))
"""


def test_each_start_is_as_from_a_process_of_its_own(tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", MANY], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert one.startswith("([0], [\"0 ['script.py', 'word'] None\"")
    assert two.startswith("([0, 1], [\"0 ['script.py', 'word'] None\", \"1 ['script.py', 'word'] None\"")
    by_hand = [sys.executable, "-c", SCRIPT.splitlines()[5]]
    said = subprocess.run(by_hand, env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True, check=True).stdout
    assert said.startswith("{'")
    assert said.strip() in one
    assert done.stderr == ""  # nothing of it reaches the terminal
