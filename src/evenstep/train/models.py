"""The models of a run: their names, their parameters, and that they begin the same on every process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from evenstep.errors import UsageError
from evenstep.train.meeting import Meeting, by_value, ranks_text
from evenstep.train.norm import is_sharded
from evenstep.train.options import NOTHING, Asked
from evenstep.train.randomness import Randomness


class Models:
    """The models that were given to `run.prepare`, in that order."""

    def __init__(self, meeting: Meeting, randomness: Randomness, place: Callable[[nn.Module, Asked], None]) -> None:
        self.all: list[nn.Module] = []
        self.first_step = 0  # the first step that this process does; its checks are done there
        self._meeting, self._randomness, self._place = meeting, randomness, place
        self.kinds: list[str] = []  # their classes, before placing: fully_shard changes them
        self._base: dict[int, frozenset[str]] = {}  # of a model that saves what trains: the parameters it does not
        self._placed: dict[str, int] = {}  # how often each parameter had been written when its model was placed
        self._known: dict[int, tuple[nn.Parameter, ...]] = {}
        self._inner: dict[int, list[tuple[str, nn.Parameter]]] = {}

    def prepare(self, model: nn.Module, save: str = "all", asked: Asked = NOTHING) -> nn.Module:
        """Places the model and adopts it. UsageError where it cannot be trained like this."""
        if save not in ("all", "trained"):
            raise UsageError(f"save={save!r}, expected 'all' or 'trained'")
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"prepare got {type(model).__name__}, expected a torch.nn.Module",
                do="prepare models; optimizers and schedulers are made from them afterwards, and given to restore",
            )
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise UsageError(
                f"prepare got a {type(model).__name__}",
                do="give the bare module: evenstep reduces its gradients itself",
            )
        if any(model is m for m in self.all):
            return model
        state = [*model.named_parameters(), *model.named_buffers()]
        lazy = [name for name, value in state if nn.parameter.is_lazy(value)]
        if lazy:
            raise UsageError(f"{lazy[0]} has no shape yet (a lazy module)", do="run one forward before prepare")
        cut = [name for name, p in model.named_parameters() if is_sharded(p)]
        if cut:
            raise UsageError(
                f"{cut[0]} is sharded already",
                do="prepare the bare module (--shard does fully_shard), and put models that share parameters into one",
            )
        self._check_equal(model, f"{type(model).__name__}, number {len(self.all)}")
        self._randomness.key_blocks(model, str(len(self.all)))
        kind = type(model).__name__
        frozen = frozenset(n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad)
        self._place(model, asked)
        self.kinds.append(kind)
        if save == "trained":
            self._base[id(model)] = frozen
        self.all.append(model)
        number = len(self.all) - 1
        self._placed.update((f"{number}.{name}", p._version) for name, p in model.named_parameters())
        return model

    def refuse_changes(self) -> None:
        """UsageError where parameters were written since `prepare`, before training. For models that are cut: a random
        initialisation of a part draws other numbers than one of the whole."""
        now = {f"{k}.{name}": p for k, model in enumerate(self.all) for name, p in model.named_parameters()}
        changed = [name for name, writes in self._placed.items() if name in now and now[name]._version != writes]
        if changed:
            raise UsageError(
                f"{changed[0].partition('.')[2]} was changed after run.prepare, and this process has a part of the "
                "model only: it would begin with other weights than on one process",
                do="initialise and load the weights before run.prepare (run.restore goes on from a checkpoint)",
            )

    def saves_all(self, model: nn.Module) -> bool:
        """Whether a checkpoint holds all of the model, not only what trains."""
        return id(model) not in self._base

    def base(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a prepared model that a checkpoint does not hold. UsageError where one of them trains."""
        base = self._base.get(id(model), frozenset())
        named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in base} if base else {}
        for name, p in named.items():
            if p.requires_grad:
                raise UsageError(
                    f"{name} was frozen when the model was prepared with save='trained', and now it trains: "
                    "it would not be saved",
                    do="prepare the model with save='all', or freeze and unfreeze before run.prepare",
                )
        return named

    def chosen(self, models: Sequence[nn.Module]) -> list[nn.Module]:
        """The models of a call: those given, else all. UsageError for one that was not prepared."""
        if not self.all:
            raise UsageError("no model was prepared", do="model = run.prepare(Net()) before the loop")
        for model in models:
            if not any(model is m for m in self.all):
                raise UsageError(
                    f"a {type(model).__name__} was given that was not prepared", do="model = run.prepare(model)"
                )
        return list(models) if models else list(self.all)

    def names(self) -> list[str]:
        """A name for each model: '' where there is one, else its class and place."""
        if len(self.all) == 1:
            return [""]
        return [kind if self.kinds.count(kind) == 1 else f"{kind}{k}" for k, kind in enumerate(self.kinds)]

    def parameters(self, models: Sequence[nn.Module] | None = None) -> list[tuple[str, nn.Parameter]]:
        """Each parameter once, by name, in the order of the models. New ones of a changed model are found."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, model in self.named(models):
            for inner, p in self._parameters(model):
                found.setdefault(id(p), (f"{name}.{inner}".lstrip("."), p))
        return list(found.values())

    def modules(self, models: Sequence[nn.Module] | None = None) -> dict[str, nn.Module]:
        """Each module that the models have now, by name, parents before their children."""
        return modules(self.named(models))

    def named(self, models: Sequence[nn.Module] | None = None) -> list[tuple[str, nn.Module]]:
        """The given models (None: all) with their names, in the order in which they were prepared."""
        named = zip(self.names(), self.all, strict=True)
        return [(name, model) for name, model in named if models is None or any(model is m for m in models)]

    def trained_by(self, optimizer: torch.optim.Optimizer, name: str, *, must: bool = False) -> bool:
        """Whether the optimizer updates parameters of prepared models. UsageError if it updates others beside them, or,
        with `must`, others at all."""
        known = {id(p) for _, p in self.parameters()}
        theirs = [id(p) in known for group in optimizer.param_groups for p in group["params"]]
        strangers = theirs.count(False)
        if strangers and (must or any(theirs)):
            raise UsageError(
                f"{name} updates {strangers} parameters that belong to no prepared model: their gradients would "
                "differ between processes",
                do="prepare every model before its optimizer is made; put single parameters into a module",
            )
        return any(theirs)

    def _parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        now = tuple(model.parameters())
        before = self._known.get(id(model))
        if before is None or len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            self._known[id(model)] = now
            self._inner[id(model)] = list(model.named_parameters())
        return self._inner[id(model)]

    def _check_equal(self, model: nn.Module, name: str) -> None:
        """UsageError on every process where a parameter or buffer differs between processes, naming the first."""
        if self._meeting.world_size == 1:
            return
        mine = {
            key: _hash(value)
            for key, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
        }
        answers = self._meeting.say("prepare", mine, signature=name)
        for key in dict.fromkeys(key for answer in answers for key in answer):
            values = by_value(answer.get(key, "missing") for answer in answers)
            if len(values) > 1:
                raise UsageError(
                    f"{key} of {type(model).__name__} is not the same on every process at the start ("
                    + " and ".join(ranks_text(ranks) for ranks in values.values())
                    + " differ)",
                    do="make the model after evenstep.start(), which seeds the generators; draw no random numbers that "
                    "depend on the rank or the time; load weights on every process",
                )


def buffers(named: Iterable[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """Each buffer that these models have now, by name."""
    return {f"{name}.{inner}".lstrip("."): b for name, model in named for inner, b in model.named_buffers()}


def modules(named: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Each module that these models have now, by name, parents before their children."""
    return {f"{name}.{inner}".strip("."): m for name, model in named for inner, m in model.named_modules()}


def _hash(value: torch.Tensor) -> str:
    raw = (
        value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if value.numel()
        else torch.empty(0, dtype=torch.uint8)
    )
    about = f"{value.dtype} {tuple(value.shape)} "
    return hashlib.blake2b(about.encode() + raw.numpy().tobytes(), digest_size=8).hexdigest()
