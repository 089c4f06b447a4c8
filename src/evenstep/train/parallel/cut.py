"""Where a model is cut into pipeline stages, and which of its tensors lie on which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.plan.balance import balance
from evenstep.train.options import Asked
from evenstep.train.randomness import blocks
from evenstep.train.sizes import COPIES, unit_sizes

BY_HAND = "cut it by hand: run.prepare(model, stages=[...]) with the name of the first unit of each later stage"


@dataclass(frozen=True)
class Cut:
    """A model in stages. `units` are its blocks that have a state, in order; `parts` says which of them each stage has.

    `holders`: for each parameter, by id, the stages that have it. A tied one lies on each stage that uses it, and one
    that belongs to no unit on every stage. The first holder owns it: there its gradients are summed.
    """

    units: list[tuple[str, nn.Module]]
    parts: list[range]
    holders: dict[int, list[int]]
    parameters: list[tuple[str, nn.Parameter]]
    loose: frozenset[int]  # ids of those that belong to no unit

    def stage_of(self, unit: int) -> int:
        """The stage that has a unit."""
        return next(stage for stage, part in enumerate(self.parts) if unit in part)

    def shared(self, stage: int) -> list[nn.Parameter]:
        """The parameters that train and lie on `stage` and on others."""
        held = [p for _, p in self.parameters if stage in self.holders[id(p)]]
        return [p for p in held if p.requires_grad and len(self.holders[id(p)]) > 1]

    def lines(self) -> list[str]:
        """What lies where, for the person who runs this."""
        said = []
        for stage, part in enumerate(self.parts):
            names = [self.units[k][0] for k in part]
            size = sum(p.numel() * p.element_size() for p in _parameters([self.units[k][1] for k in part]))
            what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} units)"
            said.append(f"stage {stage}: {what}, {size / 1e6:.3g} MB of parameters")
        return said


def cut(model: nn.Module, stages: int, asked: Asked) -> Cut:
    """Cuts `model` where `asked.stages` says (the first unit of each later stage), else into parts of about equal cost.

    UsageError, by name, for a model that cannot be cut like this.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UsageError(
                f"{name or 'the model'} is compiled, and a compiled model cannot be cut into stages",
                do="leave torch.compile out, or start without --stages",
            )
    units = [(name, unit) for name, unit in blocks(model) if _has_state(unit)]
    if len(units) < stages:
        raise UsageError(
            f"{type(model).__name__} has {len(units)} units with parameters ({_listed(units)}), and {stages} stages "
            "were asked for: a stage would have none",
            do=f"start with --stages {max(1, len(units))} or less; a unit is a child of the model, or an entry of a "
            "Sequential or ModuleList",
        )
    if asked.stages is None:
        parts = _balanced(units, _costs(model, units, asked.example), stages)
    else:
        parts = _as_asked(units, stages, asked.stages)
    stage_of = {k: stage for stage, part in enumerate(parts) for k in part}
    holders: dict[int, list[int]] = {}
    for k, (_, unit) in enumerate(units):
        for p in _parameters([unit]):
            held = holders.setdefault(id(p), [])
            if stage_of[k] not in held:
                held.append(stage_of[k])
    named = list(model.named_parameters())
    loose = frozenset(id(p) for _, p in named if id(p) not in holders)
    holders.update((p, list(range(stages))) for p in loose)
    for name, p in named:
        if p.is_complex() and p.requires_grad and len(holders[id(p)]) > 1:
            raise UsageError(
                f"{name} is complex and would lie on several stages, between which its gradient cannot go",
                do="keep its real and imaginary parts (torch.view_as_real), or use it in one module alone",
            )
    return Cut(units, parts, holders, named, loose)


def place(model: nn.Module, cut: Cut, stage: int, device: torch.device) -> dict[int, str]:
    """Moves what lies on `stage` to `device`, and turns the rest into meta tensors, which take no memory.

    Parameters stay the same objects. Returns the names of those tensors that lie elsewhere, by id.
    """
    mine = {id(module) for k in cut.parts[stage] for module in cut.units[k][1].modules()}
    others = {id(module) for _, unit in cut.units for module in unit.modules()} - mine
    names = {id(p): name for name, p in cut.parameters}
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # a tensor that something refers to weakly cannot be swapped
    done: set[int] = set()
    elsewhere: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for p in module._parameters.values():
            if p is None or id(p) in done:
                continue
            done.add(id(p))
            if stage in cut.holders[id(p)]:
                p.data = p.data.to(device)
            else:
                _empty(p, names[id(p)])
                elsewhere[id(p)] = names[id(p)]
        for name, buffer in module._buffers.items():
            if buffer is None or id(buffer) in done:
                continue
            moved = buffer.to("meta" if id(module) in others else device)
            module._buffers[name] = moved
            done.add(id(moved))
            if id(module) in others:
                elsewhere[id(moved)] = f"{prefix}.{name}".lstrip(".")
    for module in recurrent:
        module._init_flat_weights()
    return elsewhere


def _empty(p: nn.Parameter, name: str) -> None:
    """Makes a meta tensor of a parameter, which stays the same object."""
    try:
        torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad))
    except RuntimeError as error:
        raise UsageError(
            f"{name} cannot be taken out of memory on a stage that does not have it: {error}",
            do="prepare the model before anything is computed with it, or other objects refer to its parameters",
        ) from error


def _has_state(unit: nn.Module) -> bool:
    """Whether it has parameters, or counts something in training. The others cost little: every stage has them."""
    counts = any(isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats for m in unit.modules())
    return counts or any(True for _ in unit.parameters())


def _costs(model: nn.Module, units: Sequence[tuple[str, nn.Module]], example: Any) -> list[float]:
    """What each unit takes in training: its parameters, also those that it shares, and its activations if there is an
    example. A unit without a state counts with the one before it."""
    numbers = {id(unit): k for k, (_, unit) in enumerate(units)}
    costs = [0.0] * len(units)
    at = 0
    for size in unit_sizes(model, example):
        at = numbers.get(id(size.module), at)
        costs[at] += size.activations
    for k, (_, unit) in enumerate(units):
        costs[k] += sum(p.numel() * p.element_size() * (COPIES if p.requires_grad else 1) for p in unit.parameters())
    return costs


def _balanced(units: Sequence[tuple[str, nn.Module]], costs: Sequence[float], stages: int) -> list[range]:
    """Parts of about equal cost. A part does not begin with an embedding: what it takes is no activation."""
    starts = [k for k, (_, unit) in enumerate(units) if k == 0 or not isinstance(unit, (nn.Embedding, nn.EmbeddingBag))]
    if len(starts) < stages:
        raise UsageError(
            f"the model can be cut before {len(starts) - 1} of its units ({_listed(units)}), and {stages} stages were "
            "asked for",
            do=f"start with --stages {len(starts)} or less",
        )
    ends = [*starts[1:], len(units)]
    groups = balance([sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)], stages)
    return [range(starts[group.start], ends[group.stop - 1]) for group in groups]


def _as_asked(units: Sequence[tuple[str, nn.Module]], stages: int, asked: Sequence[str]) -> list[range]:
    names = [name for name, _ in units]
    unknown = [name for name in asked if name not in names]
    if isinstance(asked, str) or unknown:
        raise UsageError(
            f"stages={asked!r}: {unknown[0] if unknown else asked!r} is no unit of the model that has parameters",
            do=f"name some of {_listed(units)}",
        )
    at = [0, *(names.index(name) for name in asked), len(names)]
    if len(asked) != stages - 1 or any(b <= a for a, b in pairwise(at)):
        raise UsageError(
            f"stages={list(asked)!r} does not cut {_listed(units)} into {stages} stages",
            do=f"give {stages - 1} names in the model's order: {BY_HAND}",
        )
    return [range(a, b) for a, b in pairwise(at)]


def _parameters(modules: Sequence[nn.Module]) -> list[Tensor]:
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def _listed(units: Sequence[tuple[str, nn.Module]]) -> str:
    names = [name for name, _ in units]
    return ", ".join(names if len(names) < 12 else [*names[:5], "...", *names[-5:]])
