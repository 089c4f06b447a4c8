"""What a run restores and saves: the objects given to `run.restore`, and the plain values beside them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import CheckpointError, EvenstepError, MachineError, UsageError
from evenstep.record.checkpoints import Checkpoints
from evenstep.train import fingerprint
from evenstep.train.meeting import Meeting
from evenstep.train.models import Models
from evenstep.train.state import load_tree, save_tree


class State:
    """The plain values given to `run.restore`, as attributes: as given, or as the checkpoint has them.

    Set them as training goes on (`state.best = accuracy`); the next checkpoint holds them.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:  # only for names that are not there
        raise AttributeError(f"run.restore was given no value {name!r}; it has {', '.join(self.__dict__) or 'none'}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            getattr(self, name)
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"State({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"


class Saved:
    """The state of a run. Made by `run.restore`; without it only the prepared models are known."""

    def __init__(self, models: Models, meeting: Meeting, checkpoints: Checkpoints) -> None:
        self.models, self.meeting, self.checkpoints = models, meeting, checkpoints
        self.objects: dict[str, Any] = {}
        self.values = State({})

    def take(self, given: Mapping[str, Any]) -> None:
        """Sorts what restore was given into objects and values. UsageError for what would go wrong later."""
        objects: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name, thing in given.items():
            stateful = callable(getattr(thing, "state_dict", None)), callable(getattr(thing, "load_state_dict", None))
            if all(stateful):
                objects[name] = thing
            elif any(stateful):
                raise UsageError(
                    f"{name} has only one of state_dict and load_state_dict",
                    do="give an object with both, or a plain value",
                )
            elif callable(thing) or isinstance(thing, Iterator):
                raise UsageError(
                    f"{name} is a {type(thing).__name__}, which cannot be saved",
                    do="give objects with state_dict and load_state_dict, or plain values (numbers, text, tensors)",
                )
            else:
                values[name] = thing
        self._check_models(objects)
        self._check_optimizers(objects)
        self.objects, self.values = objects, State(values)

    def _check_models(self, objects: Mapping[str, Any]) -> None:
        for k, model in enumerate(self.models.all):
            if not any(model is thing for thing in objects.values()):
                raise UsageError(
                    f"a prepared model ({type(model).__name__}, number {k}) was not given to restore: "
                    "it would not be saved",
                    do="run.restore(model=model, optimizer=optimizer, ...)",
                )
        for name, thing in objects.items():
            if isinstance(thing, nn.Module) and any(p.requires_grad for p in thing.parameters()):
                known = {id(p) for _, p in self.models.parameters()}
                if not all(id(p) in known for p in thing.parameters()):
                    raise UsageError(f"{name} was not prepared", do=f"{name} = run.prepare({name}) before restore")

    def _check_optimizers(self, objects: Mapping[str, Any]) -> None:
        known = {id(p) for _, p in self.models.parameters()}
        given = [thing for thing in objects.values() if isinstance(thing, LRScheduler)]
        for name, thing in objects.items():
            if not isinstance(thing, torch.optim.Optimizer):
                continue
            strangers = sum(id(p) not in known for group in thing.param_groups for p in group["params"])
            if strangers:
                raise UsageError(
                    f"{name} updates {strangers} parameters that belong to no prepared model: their gradients would "
                    "differ between processes",
                    do="prepare every model before its optimizer is made; put single parameters into a module",
                )
            for scheduler in _schedulers_of(thing):
                if not any(scheduler is s or scheduler in _inner(s) for s in given):
                    raise UsageError(
                        f"{name} is driven by a {type(scheduler).__name__} that restore was not given: a resumed run "
                        "would start its schedule from the beginning",
                        do="run.restore(..., scheduler=scheduler)",
                    )

    # ---- going on

    def load_newest(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Loads the newest whole checkpoint, the same on every process.

        Returns what was said about it (None: there is none) and a line for each damaged one that was passed over."""
        said: dict[str, Any] = {}
        if self.meeting.rank == 0:
            step, damaged = self.checkpoints.newest_whole()
            said = {"step": step, "damaged": {str(k): v for k, v in damaged.items()}}
        answers = self.meeting.exchange("restore", json.dumps(said).encode(), signature=", ".join(self.objects))
        said = json.loads(answers[0])
        notes = [
            f"checkpoint {self.checkpoints.folder(int(step))} is damaged: {reason}"
            for step, reason in said["damaged"].items()
        ]
        if said["step"] is None:
            if notes:
                raise CheckpointError(
                    "no checkpoint of this run is whole:\n    " + "\n    ".join(notes),
                    do="start a new run directory with --run DIR, or put back a copy of one of them",
                )
            return None, notes
        folder = self.checkpoints.folder(said["step"])
        tree = load_tree(folder)
        assert isinstance(tree, dict)
        self._check_names(folder, tree)
        for name, thing in self.objects.items():
            _load(thing, tree["objects"][name], name, folder)
        for name, value in tree["values"].items():
            setattr(self.values, name, value)
        return self.checkpoints.about(said["step"]), notes

    def _check_names(self, folder: Path, tree: Mapping[str, Any]) -> None:
        for kind, given in (("objects", self.objects), ("values", self.values.__dict__)):
            missing, extra = sorted(given.keys() - tree[kind].keys()), sorted(tree[kind].keys() - given.keys())
            if missing or extra:
                raise CheckpointError(
                    f"{folder} was saved by another script: "
                    + "; ".join(
                        text
                        for text in (
                            f"it has no {', '.join(missing)}" if missing else "",
                            f"it has {', '.join(extra)}, which restore was not given" if extra else "",
                        )
                        if text
                    ),
                    do="give restore the same names as when it was saved, or start a new run directory with --run DIR",
                )

    # ---- saving

    def fingerprint(self, when: str) -> str:
        """The fingerprint of models and optimizers; all processes must call it. 16 hexadecimal digits.

        `when` says where they are, to a process that meets them somewhere else."""
        objects = self.objects or dict(zip(self.models.names(), self.models.all, strict=True))
        tree = {
            name: thing.state_dict()
            for name, thing in objects.items()
            if isinstance(thing, (nn.Module, torch.optim.Optimizer))
        }
        part = fingerprint.fingerprint(tree, self.meeting.rank, self.meeting.world_size)
        answers = self.meeting.exchange(when, part.to_bytes(8, "little"), site="")
        return fingerprint.to_hex(fingerprint.add(int.from_bytes(a, "little") for a in answers))

    def save(self, step: int, about: dict[str, object], keep: int) -> str | None:
        """Writes a checkpoint (on rank 0). Returns why it could not, with the older ones untouched, or None."""
        if self.meeting.rank != 0:
            return None
        tree = {
            "objects": {name: thing.state_dict() for name, thing in self.objects.items()},
            "values": dict(self.values.__dict__),
        }
        try:
            self.checkpoints.write(step, lambda folder: save_tree(folder, tree), about)
            self.checkpoints.prune(keep)
        except MachineError as error:
            return error.message
        return None


def _load(thing: Any, state: Any, name: str, folder: Path) -> None:
    if isinstance(thing, nn.Module):
        have = {k: _shape(v) for k, v in thing.state_dict().items()}
        saved = {k: _shape(v) for k, v in state.items()}
        wrong = [f"{k} is missing from the checkpoint" for k in have if k not in saved]
        wrong += [f"{k} is not in the model" for k in saved if k not in have]
        both = have.keys() & saved.keys()
        wrong += [f"{k} has shape {saved[k]}, the model's {have[k]}" for k in have if k in both and have[k] != saved[k]]
        if wrong:
            shown = wrong[:8] + ([f"and {len(wrong) - 8} more"] if len(wrong) > 8 else [])
            raise CheckpointError(
                f"{folder} is from another {name}:\n    " + "\n    ".join(shown),
                do="go on with the model that was saved, or start a new run directory with --run DIR",
            )
    try:
        thing.load_state_dict(state)
    except EvenstepError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name} does not take the state that {folder} has: {type(error).__name__}: {error}",
            do="make it as it was made when it was saved, or start a new run directory with --run DIR",
        ) from error


def _shape(value: object) -> object:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _schedulers_of(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """The learning-rate schedulers that hold `optimizer`."""
    found: list[LRScheduler] = []
    for holder in gc.get_referrers(optimizer):
        owners = gc.get_referrers(holder) if isinstance(holder, dict) else [holder]
        found.extend(o for o in owners if isinstance(o, LRScheduler) and getattr(o, "optimizer", None) is optimizer)
    return found


def _inner(scheduler: LRScheduler) -> list[Any]:
    """The schedulers that a SequentialLR or ChainedScheduler drives, at any depth."""
    inner: list[Any] = []
    for one in getattr(scheduler, "_schedulers", ()):
        inner += [one, *_inner(one)]
    return inner
