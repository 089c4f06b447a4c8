"""What a run restores and saves: the objects given to `run.restore`, and the plain values beside them."""

from __future__ import annotations

import gc
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import CheckpointError, MachineError, MismatchError, UsageError
from evenstep.record.checkpoints import Checkpoints
from evenstep.train.agreement import agreed, by_path, differing
from evenstep.train.fingerprint import to_hex
from evenstep.train.gather import meet, names_in, on_rank_0
from evenstep.train.meeting import Meeting, ranks_text
from evenstep.train.models import Models
from evenstep.train.objects import load, load_module, load_parameters, parameters_state, state_of
from evenstep.train.state import (
    TENSORS,
    TREE,
    check_tensor,
    check_tree,
    encode_parts,
    filled,
    read_tree,
    save_tree,
)
from evenstep.train.tensor_file import write_tensors
from evenstep.train.weights import save_model

_SHOWN = 8  # how many of the things that differ an error names


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
        self.split = False  # whether processes hold parts of the state: known from the fingerprint on

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
        for name, value in values.items():
            _check_value(value, name)
        for name, thing in objects.items():
            _check_object(thing, name, alone=self.meeting.world_size == 1)
        self.objects, self.values = objects, State(values)

    def check(self) -> None:
        """UsageError where what restore was given is not all there is: models or schedulers that were made after it."""
        self._check_models(self.objects)
        self._check_optimizers(self.objects)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether restore was given this optimizer."""
        return any(thing is optimizer for thing in self.objects.values())

    def _check_models(self, objects: Mapping[str, Any]) -> None:
        for name, thing in objects.items():
            if isinstance(thing, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
                raise UsageError(
                    f"{name} is a {type(thing).__name__}",
                    do="leave that out and give the bare module: evenstep reduces its gradients itself",
                )
        for k, model in enumerate(self.models.all):
            if not any(model is thing for thing in objects.values()):
                raise UsageError(
                    f"a prepared model ({type(model).__name__}, number {k}) was not given to restore: "
                    "it would not be saved",
                    do="run.restore(model=model, optimizer=optimizer, ...)",
                )
        known = {id(p) for _, p in self.models.parameters()}
        optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        strangers = trained - known
        for name, thing in objects.items():
            # Others may be given too: an average of a model's weights has parameters that nothing trains.
            if isinstance(thing, nn.Module) and any(id(p) in strangers for p in thing.parameters()):
                raise UsageError(
                    f"{name} was not prepared, and an optimizer updates it",
                    do=f"{name} = run.prepare({name}) before its optimizer is made",
                )

    def _check_optimizers(self, objects: Mapping[str, Any]) -> None:
        given = [thing for thing in objects.values() if isinstance(thing, LRScheduler)]
        for name, thing in objects.items():
            if not isinstance(thing, torch.optim.Optimizer):
                continue
            self.models.trained_by(thing, name, must=True)
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
        said = self.meeting.say("restore", said, signature=", ".join(self.objects))[0]
        notes = [
            f"checkpoint {self.checkpoints.folder(int(step))} is damaged: {reason}"
            for step, reason in said["damaged"].items()
        ]
        if said["step"] is None:
            if notes:
                raise CheckpointError(
                    "no checkpoint of this run is whole:\n    " + "\n    ".join(notes),
                    do="start another run directory (--run DIR), or put back a copy of one of them",
                )
            return None, notes
        folder = self.checkpoints.folder(said["step"])
        tree = read_tree(folder)  # each process reads what it needs of it
        assert isinstance(tree, dict)
        self._check_names(folder, tree)
        self._check_base(folder, tree.get("base", {}))
        for name, thing in self.objects.items():
            state = tree["objects"].pop(name)
            if isinstance(thing, nn.Module):
                load_module(thing, state, name, folder, self.models.base(thing))
            else:
                load(thing, state, name, folder)
        for name, model in self._prepared():
            load_parameters(model, tree["parameters"][name])
        for name, value in tree["values"].items():
            setattr(self.values, name, filled(value, self.values.__dict__[name]))
        about = self.checkpoints.about(said["step"])
        if self.fingerprint("restore, with the checkpoint loaded") != about["fingerprint"]:
            self._check_loaded(folder)
        return about, notes

    def _check_loaded(self, folder: Path) -> None:
        """CheckpointError that names what did not come back as it was saved."""
        saved = read_tree(folder)["objects"]  # anew: what was loaded may be used as it is by what it was given to
        changed = False
        for name, thing in self._counted().items():
            state = self._saved_state(thing)
            before = by_path({name: filled(saved[name], state)}, parts=self.split)
            now = by_path({name: state}, parts=self.split)
            differ = list(dict.fromkeys(path for path, _ in differing([before, now])))
            # Another version of torch may have hyperparameters that the saved one had not: they have their defaults.
            wrong = any(path in before or not path.startswith(f"{name}.param_groups[") for path in differ)
            if self.split:
                said = self.meeting.say("restore: what did not come back", [wrong, differ], site="")
                wrong = any(one[0] for one in said)
                differ = list(dict.fromkeys(path for one in said for path in one[1]))
            if wrong:
                raise CheckpointError(
                    f"{name} ({type(thing).__name__}) does not come back as it was saved in {folder}: "
                    f"load_state_dict changed {_some(differ)}",
                    do="make it with the dtypes it had when it was saved; its load_state_dict, and hooks on it, must "
                    "put back every bit that state_dict returns. Or start another run directory (--run DIR)",
                )
            changed = changed or bool(differ)
        if not changed:
            raise CheckpointError(
                f"what {folder} holds does not have the fingerprint that was recorded with it",
                do="have state_dict of each object return the same types whenever it is called, and start a new run "
                "directory with --run DIR",
            )

    def _check_base(self, folder: Path, saved: Mapping[str, str]) -> None:
        """CheckpointError where a checkpoint of what trains goes with another base, or with none."""
        now = self._base("restore: the parameters that do not train")
        for name in dict.fromkeys([*now, *saved]):
            if name not in saved or name not in now:
                had, has = ("trained", "all") if name in saved else ("all", "trained")
                raise CheckpointError(
                    f"{folder} holds {name} as prepared with save={had!r}, now it is prepared with save={has!r}",
                    do=f"run.prepare({name}, save={had!r}), or start another run directory (--run DIR)",
                )
            if now[name] != saved[name]:
                raise CheckpointError(
                    f"{folder} goes with other base weights of {name}: the parameters that do not train have the "
                    f"fingerprint {now[name]}, and had {saved[name]}",
                    do="load the weights that the run began with before run.prepare, or start another run directory "
                    "(--run DIR)",
                )

    def _base(self, when: str) -> dict[str, str]:
        """The fingerprints of the parameters that checkpoints do not hold, by the names of the models."""
        partial = [(name, model) for name, model in self._prepared() if not self.models.saves_all(model)]
        return {name: self._fingerprint(when, {"base": self.models.base(model)}) for name, model in partial}

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
                    do="give restore the same names as when it was saved, or start another run directory (--run DIR)",
                )

    # ---- saving

    def fingerprint(self, when: str) -> str:
        """The fingerprint of models and optimizers; all processes must call it. 16 hexadecimal digits.

        `when` says where they are, to a process that meets them somewhere else."""
        return self._fingerprint(when, {name: state_of(thing) for name, thing in self._counted().items()})

    def _fingerprint(self, when: str, tree: object) -> str:
        def exchange(data: bytes) -> list[bytes]:
            return self.meeting.exchange(when, data, site="")

        found = agreed(tree, self.meeting.rank, self.meeting.world_size, exchange)
        self.split = self.split or found.split
        if found.value is None:
            raise self._apart(when, tree)
        return to_hex(found.value)

    def hashes(self) -> dict[str, str]:
        """The fingerprints of what this process holds of all that the fingerprint is of, as `by_path` tells parts."""
        counted = sorted(self._counted().items(), key=lambda item: not isinstance(item[1], nn.Module))  # models first
        tree = {name: state_of(thing) for name, thing in counted}
        return {path.removeprefix("['']."): value for path, value in by_path(tree, parts=True).items()}

    def _apart(self, when: str, tree: object) -> MismatchError:
        """The error for processes that hold different things; all of them get it. Says what differs, and where."""
        mine = by_path(tree, parts=self.split)
        answers = self.meeting.say(f"{when}: what differs", mine, site="")
        lines = []
        for path, ranks in differing(answers):
            shown = path.removeprefix("[''].")
            if "" in ranks:
                lines.append(f"{shown}: there is none on {ranks_text(ranks[''])}")
            else:
                lines.append(f"{shown}: {' and '.join(map(ranks_text, ranks.values()))} differ")
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        return MismatchError(
            f"at {when} the processes hold different models, hyperparameters or optimizer state\n    "
            + "\n    ".join(lines[:_SHOWN] + more or ["the types of containers differ"]),
            do="do the same on every process: look for an optimizer or scheduler that steps on some ranks only, for "
            "weights that were changed or loaded on one rank after prepare, for an exception that was caught on one "
            "rank; run.broadcast or run.all_reduce makes common what follows from something local",
        )

    def _counted(self) -> dict[str, Any]:
        """What the fingerprint is of: models, averages of them, optimizers."""
        objects = self.objects or dict(zip(self.models.names(), self.models.all, strict=True))
        return {n: thing for n, thing in objects.items() if isinstance(thing, (nn.Module, torch.optim.Optimizer))}

    def _prepared(self) -> list[tuple[str, nn.Module]]:
        """The prepared models, by the names that restore was given."""
        return [(name, thing) for name, thing in self.objects.items() if any(thing is m for m in self.models.all)]

    def save(self, step: int, about: dict[str, object], keep: int) -> str | None:
        """Writes a checkpoint; rank 0 does, and where processes hold parts of the state, the others send theirs. All
        call it, after `fingerprint`. Returns why it could not, with the older ones untouched, or None; on the other
        ranks, too, where they hold parts."""
        base = self._base("the parameters that do not train")
        if not self.split:
            if self.meeting.rank != 0:
                return None
            tree = self._tree(base)
            return self._write(step, lambda folder: save_tree(folder, tree), about, keep)
        text, gather = meet(self.meeting, "a checkpoint", *encode_parts(self._tree(base)))
        names = dict.fromkeys(names_in(json.loads(text)))
        entries = {name: gather.entries[name] for name in names}

        def write(data: Iterable[memoryview]) -> str | None:
            def files(folder: Path) -> None:
                write_tensors(folder / TENSORS, entries, data)
                (folder / TREE).write_bytes(text)

            return self._write(step, files, about, keep)

        failure = on_rank_0(self.meeting, gather.data(names), write)
        said: str | None = self.meeting.say("the end of a checkpoint", failure, site="")[0]
        return said

    def _tree(self, base: Mapping[str, str]) -> dict[str, Any]:
        """All that a checkpoint holds, as far as this process has it."""
        tree: dict[str, Any] = {
            "objects": {name: self._saved_state(thing) for name, thing in self.objects.items()},
            "parameters": {name: parameters_state(model) for name, model in self._prepared()},
            "values": dict(self.values.__dict__),
        }
        return {**tree, "base": dict(base)} if base else tree

    def _saved_state(self, thing: Any) -> Any:
        state = state_of(thing)
        if isinstance(thing, nn.Module):
            for name in self.models.base(thing):
                state.pop(name, None)
        return state

    def _write(self, step: int, files: Callable[[Path], None], about: dict[str, object], keep: int) -> str | None:
        try:
            self.checkpoints.write(step, files, about)
            self.checkpoints.prune(keep)
        except MachineError as error:
            return error.message
        return None

    def save_model(self, path: Path) -> list[str]:
        """Publishes the models' file (see weights.save_model); all call it, after `fingerprint`. Returns what is left
        out, on rank 0."""
        if not self.split and self.meeting.rank != 0:
            return []
        named = zip(self.models.names(), self.models.all, strict=True)
        states = {name: self._saved_state(model) for name, model in named}
        return save_model(path, states, self.meeting if self.split else None)


def _check_value(value: object, name: str) -> None:
    """UsageError, naming the path and what to give instead, for a value that a checkpoint cannot hold."""
    try:
        check_tree({name: value})
    except UsageError as error:
        raise UsageError(error.message, do=_advice(value, name)) from error


def _check_object(thing: Any, name: str, *, alone: bool) -> None:
    """UsageError, naming the path, for an object with a state that a checkpoint cannot hold. `alone`: there is no other
    process that could have what this one has not."""
    state = thing.state_dict()
    if isinstance(thing, nn.Module):  # its tensors may be large: they are looked at, not encoded
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                check_tensor(value, f"{name}.{key}", parts=not (alone and value.is_meta))
        state = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    check_tree({name: state}, parts=True)


def _advice(value: object, name: str) -> str:
    """What to do with a value that cannot be saved."""
    for leaf in _leaves(value):
        if callable(getattr(leaf, "state_dict", None)):
            return (
                f"give each {type(leaf).__name__} a name of its own: run.restore({name}0={name}[0], {name}1=...), "
                "or run.restore(**{...}) with a dict of names"
            )
        keep = back = ""
        if isinstance(leaf, torch.Generator):
            keep, back = "generator.get_state()", "generator.set_state(state.generator)"
        elif isinstance(leaf, np.random.Generator):
            keep, back = "generator.bit_generator.state", "generator.bit_generator.state = state.generator"
        elif isinstance(leaf, (random.Random, np.random.RandomState)):
            get = "getstate" if isinstance(leaf, random.Random) else "get_state"
            keep, back = f"generator.{get}()", f"generator.{get.replace('get', 'set')}(state.generator)"
        if keep:
            return (
                "the generators of torch, numpy and random need not be saved: they are keyed anew for every step. For "
                f"one of your own: state = run.restore(..., generator={keep}), then {back}, and set state.generator = "
                f"{keep} in every step"
            )
    return (
        "give plain values (numbers, text, bytes, tensors and arrays, in dicts, lists and tuples; of a path its str), "
        "or an object with state_dict and load_state_dict"
    )


def _leaves(value: object, depth: int = 0) -> Iterator[object]:
    """What lies in the containers of `value`, not too deep: they may contain themselves."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        if depth < 5:
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from _leaves(item, depth + 1)
    else:
        yield value


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


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
