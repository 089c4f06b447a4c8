"""Start `evenstep run` on a small script as a user would, and look at what it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from evenstep.record.events import read_events
from evenstep.record.paths import RunPaths

PATIENCE = 150.0  # seconds for what takes a moment on an idle machine


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def own_err(self) -> str:
        """The error stream without the launcher's own lines."""
        return "".join(line for line in self.err.splitlines(keepends=True) if not line.startswith("evenstep: "))


@dataclass
class Launch:
    """A launch under way, or ended."""

    popen: subprocess.Popen[str]
    paths: RunPaths

    def wait(self) -> Result:
        out, err = self.popen.communicate(timeout=PATIENCE)
        return Result(self.popen.returncode, out, err)

    @property
    def tag(self) -> str:
        """EVENSTEP_LAUNCH of its processes, once it has started some."""
        return str(read_events(self.paths.launcher_events)[0]["tag"])

    def alive(self) -> list[int]:
        """Its living processes, the fork server among them."""
        return tagged(self.tag)

    def log(self, rank: int) -> str:
        return self.paths.log(rank).read_text()


def training(
    *,
    first: str = "",
    start: str = "checkpoint_every=3",
    data: str = "TensorDataset(torch.ones(40, 4), torch.ones(40, 1))",
    epochs: str = "int(sys.argv[1])",
    begins: str = "",
    computed: str = "",
    stepped: str = "time.sleep(float(sys.argv[2]))",
    ends: str = "",
) -> str:
    """A script that trains a small model; its arguments are epochs, and seconds of sleep in each step.

    `start` and `data` are what `evenstep.start` and `run.steps` are given. The others are lines: at the top, before the
    first step, after a step's gradients, after a step, at the end.
    """
    return f"""
import os, sys, time, torch, evenstep
from pathlib import Path
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
{textwrap.dedent(first)}
run = evenstep.start(global_batch=8, micro_batch=1, seed=1, {start})
model = run.prepare(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
steps = run.steps({data}, epochs={epochs})
run.restore(model=model, optimizer=optimizer)
{textwrap.dedent(begins)}
for step in steps:
    step.backward(lambda m, b: (mse_loss(m(b[0]), b[1], reduction="sum"), len(b[0])))
{textwrap.indent(textwrap.dedent(computed), "    ")}
    optimizer.step()
    optimizer.zero_grad()
{textwrap.indent(textwrap.dedent(stepped), "    ")}
{textwrap.dedent(ends)}
"""


def write_script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def clean_environ(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what pytest, its plugins and this suite have set."""
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ours = (*places, "OMP_NUM_THREADS", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("EVENSTEP_")}
    return {**kept, **(env or {})}


def installed_package(folder: Path, name: str, text: str) -> dict[str, str]:
    """A package in a site-packages folder; the environment that makes it importable."""
    base = folder / "base"
    env = clean_environ({"PYTHONUSERBASE": str(base)})
    code = "import site; print(site.getusersitepackages())"
    place = Path(
        subprocess.run([sys.executable, "-c", code], env=env, check=True, stdout=subprocess.PIPE)
        .stdout.decode()
        .strip()
    )
    assert place.is_relative_to(base)
    write_script(place, text, f"{name}/__init__.py")
    return {
        "PYTHONUSERBASE": str(base),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH")))),
    }


def command(*words: object) -> list[str]:
    return [str(Path(sys.executable).parent / "evenstep"), *map(str, words)]


@contextmanager
def launched(folder: Path, *words: object, env: Mapping[str, str] | None = None) -> Iterator[Launch]:
    """`evenstep run --run folder/run WORDS`, in `folder`. Whatever is left at the end of the test is killed."""
    paths = RunPaths(folder / "run")
    popen = subprocess.Popen(
        command("run", "--run", paths.root, *words),
        cwd=folder,
        env=clean_environ(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    launch = Launch(popen, paths)
    try:
        yield launch
    finally:
        with suppress(ProcessLookupError):
            popen.kill()
        popen.communicate()
        with suppress(IndexError, OSError):
            for pid in launch.alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def run(folder: Path, *words: object, env: Mapping[str, str] | None = None) -> Result:
    """The same, to its end."""
    with launched(folder, *words, env=env) as launch:
        return launch.wait()


def evenstep(folder: Path, *words: object, env: Mapping[str, str] | None = None) -> Result:
    """Any `evenstep` command, in `folder`."""
    done = subprocess.run(
        command(*words), cwd=folder, env=clean_environ(env), capture_output=True, text=True, timeout=PATIENCE
    )
    return Result(done.returncode, done.stdout, done.stderr)


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def tagged(tag: str) -> list[int]:
    """Processes that have the tag in their environment and are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            with suppress(OSError):
                if f"EVENSTEP_LAUNCH={tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    return state(pid) not in "ZX"


def state(pid: int) -> str:
    """The kernel's letter for what a process does: S sleeps, T is stopped, Z is a zombie; X if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def children(pid: int) -> list[int]:
    """Its child processes that are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(entry.name))
    return [child for child in found if is_alive(child)]
