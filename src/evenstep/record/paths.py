"""The run directory: every path in it is named here, once."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import MachineError

_CHECKPOINT = re.compile(r"step-(\d{10,})")


@dataclass(frozen=True)
class RunPaths:
    """What lies where under `root`. Names only: nothing is read or made here."""

    root: Path

    @property
    def identity(self) -> Path:
        """What must be equal for a run to go on (see identity.py)."""
        return self.root / "identity.json"

    def events(self, rank: int) -> Path:
        """What the process of this rank did, one JSON object a line."""
        return self.root / "events" / f"rank-{rank}.jsonl"

    def trace(self, rank: int) -> Path:
        """What happened in one step of the process of this rank, hashed, in the form of `events`."""
        return self.root / "trace" / f"rank-{rank}.jsonl"

    def activity(self, rank: int) -> Path:
        """What the process of this rank is doing now (see activity.py)."""
        return self.root / "events" / f"rank-{rank}.now"

    @property
    def launcher_events(self) -> Path:
        """What the launcher of node 0 did, in the form of `events`."""
        return self.node_events(0)

    def node_events(self, node: int) -> Path:
        """What the launcher of a node did."""
        return self.root / "events" / ("launcher.jsonl" if node == 0 else f"launcher-{node}.jsonl")

    def log(self, rank: int) -> Path:
        """What the process of this rank wrote to its output and error streams."""
        return self.root / "logs" / f"rank-{rank}.log"

    @property
    def metrics_jsonl(self) -> Path:
        """Logged values, one JSON object each time that some were logged."""
        return self.root / "metrics.jsonl"

    @property
    def metrics_csv(self) -> Path:
        """Logged values, one row each time that some were logged."""
        return self.root / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The folder that holds a folder for each checkpoint."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint that was written after `step` optimizer steps."""
        return self.checkpoints / f"step-{step:010d}"

    @property
    def run_id(self) -> Path:
        """A random name of the run, by which copies of this directory on other hosts are known."""
        return self.root / "run-id"

    @property
    def finished(self) -> Path:
        """There once the run is done: its last step and its fingerprint."""
        return self.root / "finished.json"

    @property
    def model(self) -> Path:
        """The trained model, for plain PyTorch."""
        return self.root / "model.safetensors"


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint's folder name, or None if it is not one."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def newest_checkpoint(paths: RunPaths) -> int | None:
    """The step of the newest checkpoint, whole or not; None if there is none."""
    try:
        found = [checkpoint_step(entry.name) for entry in paths.checkpoints.iterdir()]
    except OSError:
        return None
    return max((step for step in found if step is not None), default=None)


def new_run_directory(script: str | None, base: Path) -> Path:
    """Make and return `base`/runs/<script's stem>-<timestamp>-<n>, which nobody else has been given.

    `script` None: a notebook or an interactive session. Two starts in one second get another n.
    """
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem).strip("-.") if script else ""
    name = f"{stem or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = base / "runs"
    n = 1
    try:
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            path = runs / f"{name}-{n}"
            try:
                path.mkdir()  # the file system decides who was first
            except FileExistsError:
                n += 1
            else:
                return path
    except OSError as error:
        raise MachineError(
            f"cannot make a run directory under {runs}: {error.strerror or error}",
            do="name a writable place: --run DIR, or start(run=...)",
        ) from error
