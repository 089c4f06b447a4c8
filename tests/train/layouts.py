"""Every layout that a launch can ask for, small trainings to run on each, and the table of what is equal.

python -m tests.train.layouts        writes docs/layouts.md (make layouts)
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once, before the forks
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.record.paths import RunPaths
from tests.ranks import run_ranks
from tests.train.scripts import (
    Pictures,
    Sentences,
    Transformer,
    adamw,
    classification,
    fingerprints,
    momentum,
    next_token,
    padded,
    training_run,
)

STEPS = 4  # every second one is ragged: an epoch has 21 samples, a global batch 12
CHECKPOINT = 2  # after how many steps the checkpoint lies that every other layout goes on from
TABLE = Path(__file__).parent.parent.parent / "docs" / "layouts.md"


@dataclass(frozen=True)
class Spread:
    """What `evenstep run` would be told."""

    processes: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def command(self) -> str:
        """The launcher's options."""
        words = [f"--processes {self.processes}"] if self.processes > 1 else []
        for name, value in self.options.items():
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
        return " ".join(words) or "(one process)"


LAYOUTS = {
    "accumulate": Spread(1),
    "2 processes": Spread(2),
    "3 processes": Spread(3),
    "4 processes": Spread(4),
    "2 thread replicas": Spread(1, {"thread_replicas": 2}),
    "4 thread replicas": Spread(1, {"thread_replicas": 4}),
    "2 shards": Spread(2, {"shard": True}),
    "3 shards": Spread(3, {"shard": True}),
    "4 shards": Spread(4, {"shard": True}),
    "2 replicas of 2 shards": Spread(4, {"shard": True, "replicas": 2}),
    "2 stages": Spread(2, {"stages": 2}),
    "3 stages": Spread(3, {"stages": 3}),
    "2 replicas of 2 stages": Spread(4, {"stages": 2}),
    "split over 2 devices": Spread(1, {"split": 2}),
    "2 processes of 2 thread replicas": Spread(2, {"thread_replicas": 2}),
    "2 thread replicas over 2 devices each": Spread(1, {"thread_replicas": 2, "split": 2}),
    "shards of stages": Spread(4, {"stages": 2, "shard": True}),
    "stages of thread replicas": Spread(2, {"stages": 2, "thread_replicas": 2}),
    "stages over 2 devices each": Spread(2, {"stages": 2, "split": 2}),
    "shards of thread replicas": Spread(2, {"shard": True, "thread_replicas": 2}),
    "shards over 2 devices each": Spread(2, {"shard": True, "split": 2}),
}
PRECISIONS = ("fp32", "bf16")
ALONE = "accumulate"


class Normalised(nn.Sequential):
    """Convolutions with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.2)),
            nn.Sequential(nn.Conv2d(6, 4, 3, stride=2), nn.BatchNorm2d(4, momentum=None), nn.ReLU()),
            nn.Flatten(),
            nn.Dropout(0.4),
            nn.Linear(36, 10),
        )


class Encoder(nn.Module):
    """A text classifier with a branch for long texts alone, and a head that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.first = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.long = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))
        self.second = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.classify = nn.Linear(16, 5)
        self.pretraining = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens.clamp(min=0)))
        if tokens.shape[1] > 10:
            x = x + self.long(x)
        result: Tensor = self.classify(self.second(x)).mean(1)
        return result


def sum_modulo(model: nn.Module, tokens: Tensor) -> Any:
    """The class of a text is the sum of its tokens."""
    targets = tokens.clamp(min=0).sum(1) % 5
    return F.cross_entropy(model(tokens), targets, reduction="sum"), len(tokens)


@dataclass(frozen=True)
class Training:
    """One model and what trains it."""

    about: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss_fn: Callable[[nn.Module, Any], Any]
    data: Any
    collate: Callable[[list[Any]], Any] | None = None

    def run(self, directory: Path, *, saved: bool, **options: Any) -> list[str]:
        """The fingerprints of the steps done. `saved`: with checkpoints, and going on from one."""
        more = {"checkpoint_every": CHECKPOINT, "keep": STEPS} if saved else {}
        with training_run(directory, global_batch=12, **more, **options) as run:
            model = run.prepare(self.model())
            optimizer = self.optimizer(model.parameters())
            steps = run.steps(self.data, steps=STEPS, collate=self.collate)
            if saved:
                run.restore(model=model, optimizer=optimizer)
            for step in steps:
                step.backward(self.loss_fn)
                run.clip(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return fingerprints(run)


TRAININGS = {
    "cnn": Training("CNN, BatchNorm, dropout", Normalised, momentum, classification, Pictures(21)),
    "gpt": Training("GPT, tied embeddings, token weights", Transformer, adamw, next_token, Sentences(21), padded),
    "encoder": Training("encoder with an unused branch", Encoder, adamw, sum_modulo, Sentences(21), padded),
}
SAVED = ("gpt", "fp32")  # the training of the checkpoints
CELLS = [(training, precision) for training in TRAININGS for precision in PRECISIONS]

Outcome = list[str] | str  # the fingerprint after every step, or why the layout is refused


def each(layout: str, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(options, *args)` returns on each process of `layout`. Its runs share one process group."""
    spread = LAYOUTS[layout]

    def body() -> Any:
        if spread.processes == 1:
            return work(spread.options, *args)
        dist.init_process_group("gloo")
        try:
            return work(spread.options, *args)
        finally:
            dist.destroy_process_group()

    return run_ranks(body, spread.processes, timeout=100)


def train_all(options: Mapping[str, Any], directory: Path) -> dict[tuple[str, str], Outcome]:
    """Every training, one after the other. What is refused must be refused before its first step."""
    found: dict[tuple[str, str], Outcome] = {}
    for training, precision in CELLS:
        place = directory / f"{training}-{precision}"
        try:
            found[training, precision] = TRAININGS[training].run(
                place, saved=(training, precision) == SAVED, precision=precision, **options
            )
        except UsageError as error:
            found[training, precision] = error.message
    return found


def outcomes(layout: str, directory: Path) -> dict[tuple[str, str], Outcome]:
    """What `train_all` found on `layout`, the same on each of its processes."""
    first, *others = each(layout, train_all, directory)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise AssertionError(f"rank {rank} of {layout} found {other}, rank 0 {first}")
    return dict(first)


def go_on(options: Mapping[str, Any], directory: Path) -> list[str]:
    """The fingerprints of the steps that are left in a run directory."""
    return TRAININGS[SAVED[0]].run(directory, saved=True, precision=SAVED[1], **options)


def copy_checkpoint(source: Path, target: Path) -> None:
    """A run directory as a kill after step CHECKPOINT would have left it."""
    before, after = RunPaths(source), RunPaths(target)
    shutil.copytree(before.checkpoint(CHECKPOINT), after.checkpoint(CHECKPOINT))
    shutil.copy(before.identity, after.identity)


def table(found: Mapping[str, Mapping[tuple[str, str], Outcome]]) -> str:
    """docs/layouts.md: what was found, by layout."""
    alone = found[ALONE]
    notes: dict[str, int] = {}

    def cell(outcome: Outcome, cell: tuple[str, str]) -> str:
        if isinstance(outcome, str):
            return f"refused ({notes.setdefault(outcome, len(notes) + 1)})"
        return "equal" if outcome == alone[cell] else "**another model**"

    heads = [f"{TRAININGS[training].about}, {precision}" for training, precision in CELLS]
    rows = [f"| layout | options | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for layout, outcome in found.items():
        cells = [cell(outcome[key], key) for key in CELLS]
        rows.append(f"| {layout} | `{LAYOUTS[layout].command()}` | {' | '.join(cells)} |")
    about = f"""# Which layouts give the same model

Written by `make layouts` from what tests/train/test_layouts.py finds; do not edit.

*equal*: after each of {STEPS} steps the fingerprint of parameters, buffers and optimizer state is that of one process
that accumulates, bit for bit, and a checkpoint written there goes on under every other layout with the same bits.
*refused*: an error that says so before anything is trained.
"""
    if notes:
        rows += ["", "Refused, in the words of the error:", ""]
        rows += [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([about, *rows]) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {layout: outcomes(layout, Path(folder) / layout) for layout in LAYOUTS}
    TABLE.write_text(table(found))


if __name__ == "__main__":
    main()
