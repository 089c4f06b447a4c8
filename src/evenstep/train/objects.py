"""What models, optimizers and other objects give to a checkpoint and take from it, each process its own part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.errors import CheckpointError, EvenstepError
from evenstep.train.pieces import ELSEWHERE, is_elsewhere
from evenstep.train.state import Stored, filled


def load_module(
    module: nn.Module, state: dict[str, Any], name: str, folder: Path, base: Mapping[str, torch.Tensor]
) -> None:
    """load_state_dict with the tensors that this process has of it, read as they are copied. `base`: what the
    checkpoint leaves as it is. CheckpointError, naming the keys, for the state of another module."""
    current = module.state_dict()
    have = {k: _shape(v) for k, v in current.items() if k not in base}
    saved = {k: _shape(v) for k, v in state.items()}
    wrong = [f"{k} is missing from the checkpoint" for k in have if k not in saved]
    wrong += [f"{k} is not in the model" for k in saved if k not in have]
    both = have.keys() & saved.keys()
    wrong += [f"{k} has shape {saved[k]}, the model's {have[k]}" for k in have if k in both and have[k] != saved[k]]
    if wrong:
        shown = wrong[:8] + ([f"and {len(wrong) - 8} more"] if len(wrong) > 8 else [])
        raise CheckpointError(
            f"{folder} is from another {name}:\n    " + "\n    ".join(shown),
            do="go on with the model that was saved, or start another run directory (--run DIR)",
        )
    # torch's own copies from what it is given; another may keep it.
    copies = type(module).load_state_dict is nn.Module.load_state_dict
    kept = {id(p) for p in [*module.parameters(), *module.buffers()]} if copies else set()
    vars_ = module.state_dict(keep_vars=True)
    for key in state:
        state[key] = filled(state[key], current[key], views=id(vars_[key]) in kept)
    state.update((key, current[key]) for key in base if key in current)
    load(module, state, name, folder)


def load(thing: Any, state: Any, name: str, folder: Path) -> None:
    """load_state_dict, with what lies in the checkpoint spread as what the object has now."""
    try:
        if isinstance(thing, torch.optim.Optimizer):
            _load_optimizer(thing, state)
        elif isinstance(thing, nn.Module):
            thing.load_state_dict(state)
        else:
            thing.load_state_dict(filled(state, thing.state_dict()))
    except EvenstepError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name} does not take the state that {folder} has: {type(error).__name__}: {error}",
            do="make it as it was made when it was saved, or start another run directory (--run DIR)",
        ) from error


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """load_state_dict, and then what it changes is put back.

    It casts all state but "step" to the parameter's dtype, also what the optimizer keeps in float32 beside parameters
    of another dtype (NAdam's mu_product, ASGD's eta and mu), and leaves hyperparameters that are tensors on the CPU.
    """
    devices = [{k: v.device for k, v in g.items() if isinstance(v, torch.Tensor)} for g in optimizer.param_groups]
    state = _own_state(optimizer, state)
    optimizer.load_state_dict(state)
    for group, before in zip(optimizer.param_groups, devices, strict=True):
        for key, device in before.items():
            if isinstance(group[key], torch.Tensor):
                group[key] = group[key].to(device)
    if not _is_usual(state):
        return
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for p, number in zip(group["params"], saved["params"], strict=True):
            if p in optimizer.state and number in state["state"]:
                optimizer.state[p] = _uncast(optimizer.state[p], state["state"][number])


def _own_state(optimizer: torch.optim.Optimizer, saved: Any) -> Any:
    """What a checkpoint has of an optimizer, for the parameters of this process, spread as they are."""
    if not _is_usual(saved):
        return filled(saved, optimizer.state_dict())
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, _parameters_of(optimizer), strict=False))  # load_state_dict says what does not fit
    for number in list(saved["state"]):
        p = parameters.get(number)
        if p is not None and is_elsewhere(p):
            del saved["state"][number]
        else:
            saved["state"][number] = filled(saved["state"][number], p)
    return filled(saved)


def state_of(thing: Any) -> Any:
    """state_dict, with ELSEWHERE for what an optimizer has not because the parameter lies on other processes."""
    return _optimizer_state(thing) if isinstance(thing, torch.optim.Optimizer) else thing.state_dict()


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    """state_dict with a mark for the state of parameters of other processes, in the order of the parameters."""
    state = optimizer.state_dict()
    if not _is_usual(state) or not all(type(number) is int for number in state["state"]):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    elsewhere = [n for n, p in zip(numbers, _parameters_of(optimizer), strict=True) if is_elsewhere(p)]
    found = {**state["state"], **dict.fromkeys(elsewhere, ELSEWHERE)}
    return {**state, "state": dict(sorted(found.items()))}


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_usual(state: Any) -> bool:
    """Whether an optimizer's state_dict has the form of torch's own."""
    return isinstance(state, Mapping) and state.keys() >= {"state", "param_groups"}


def _uncast(loaded: Any, saved: Any) -> Any:
    """`loaded`, with the tensors that have another dtype than in `saved` as they were saved, on their new device."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _uncast(loaded[key], saved[key])
    elif type(loaded) in (list, tuple) and isinstance(saved, (list, tuple)) and len(loaded) == len(saved):
        return type(loaded)(_uncast(a, b) for a, b in zip(loaded, saved, strict=True))
    return loaded


def parameters_state(model: nn.Module) -> dict[str, Any]:
    """What a training has in a model's parameters beside their values: which are frozen, gradients not yet used."""
    named = list(model.named_parameters(remove_duplicate=False))
    gradients = {name: ELSEWHERE if is_elsewhere(p) else p.grad for name, p in named}
    return {
        "frozen": [name for name, p in named if not p.requires_grad],
        "gradients": {name: gradient for name, gradient in gradients.items() if gradient is not None},
    }


def load_parameters(model: nn.Module, saved: Mapping[str, Any]) -> None:
    frozen, gradients = set(saved["frozen"]), saved["gradients"]
    for name, p in model.named_parameters(remove_duplicate=False):
        p.requires_grad_(name not in frozen)
        here = name in gradients and not is_elsewhere(p)
        p.grad = filled(gradients[name], p).to(p.device) if here else None


def _shape(value: object) -> object:
    if isinstance(value, torch.Tensor) or (isinstance(value, Stored) and not value.is_array):
        return tuple(value.shape)
    return "ndarray" if isinstance(value, Stored) else type(value).__name__
