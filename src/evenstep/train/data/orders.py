"""The order of a run's samples, from what the script asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from evenstep.errors import UsageError
from evenstep.plan.order import Indices, Natural, Order, Shuffled, array_digest, fixed
from evenstep.plan.weighted import weighted
from evenstep.train.data.samplers import check_order, instead_of
from evenstep.train.randomness import kept_generators, key, seed_generators


class PerEpoch:
    """An order from a function epoch -> indices, each epoch of the same length. `what` names it for people.

    It is called with keyed generators, so that torch.randperm in it gives the same on every process. UsageError if it
    gives another order when it is asked again: a resumed run would go through other samples.
    """

    def __init__(self, function: Callable[[int], object], samples: int, seed: int, what: str = "a function") -> None:
        self._function, self._samples, self._seed, self._what = function, samples, seed, what
        self._digests: dict[int, str] = {}
        self._current = 0, self._read(0)
        self.length = len(self._current[1])
        if not np.array_equal(self._current[1], self._read(0)):
            raise UsageError(
                f"order= ({what}) gave two different orders for epoch 0: it draws from a generator of its own, or "
                "keeps a state, so a resumed run would go through other samples",
                do="let it follow from the epoch alone: torch.randperm(n), which evenstep keys, or "
                "numpy.random.default_rng(epoch).permutation(n)",
            )

    @property
    def name(self) -> str:
        return f"order= {self._what}, {self.digest(0)} in epoch 0"

    def digest(self, epoch: int) -> str:
        if epoch not in self._digests:
            self.indices(epoch, 0, 0)
        return self._digests[epoch]

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        if self._current[0] != epoch:
            sequence = self._read(epoch)
            if len(sequence) != self.length:
                raise UsageError(
                    f"order({epoch}) has {len(sequence)} indices, but order(0) has {self.length}",
                    do="give every epoch the same number of indices, so that the number of steps is known",
                )
            self._current = epoch, sequence
        return self._current[1][start:stop]

    def _read(self, epoch: int) -> Indices:
        with kept_generators():
            seed_generators(key(self._seed, "order", epoch))
            found = fixed(_listed(self._function(epoch), f"order({epoch})"), self._samples, f"order({epoch})").sequence
        self._digests[epoch] = array_digest(found)
        return found


def choose_order(
    data: Any,
    *,
    seed: int,
    shuffle: bool = True,
    order: object = None,
    weights: object = None,
    num_samples: int | None = None,
    replacement: bool = True,
) -> Order:
    """The order that the arguments of `run.steps` ask for.

    `order` is a sequence of indices (list, array, tensor, or another sized iterable, read once), a function epoch ->
    such a sequence, or a torch Sampler, which is read anew for every epoch. `weights` draws `num_samples` an epoch,
    with or without `replacement`. Else the data set is shuffled, or not.
    """
    samples = len(data)
    if order is not None and weights is not None:
        raise UsageError("got both order= and weights=, expected one of them", do="leave one of them out")
    if weights is None and (num_samples is not None or not replacement):
        raise UsageError(
            "got num_samples= or replacement= without weights=, which they belong to",
            do="leave them out for every sample once; weights=[1.0] * len(data) draws all alike",
        )
    if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
        raise UsageError(f"num_samples={num_samples!r}, expected an integer of at least 1: draws in an epoch")
    if weights is not None:
        return weighted(_listed(weights, "weights="), samples, seed, num_samples, replacement)
    if order is None:
        return Shuffled(samples, seed) if shuffle else Natural(samples)
    if isinstance(order, Sampler):
        check_order(order)
        return PerEpoch(_reading(order), samples, seed, f"a {type(order).__name__}")
    if callable(order) and not hasattr(order, "__iter__"):
        return PerEpoch(order, samples, seed)
    with kept_generators():
        seed_generators(key(seed, "order"))
        return fixed(_listed(order, "order="), samples)


def numbers(sequence: object, name: str) -> object:
    """`sequence`, one number a sample, as something that numpy understands."""
    return _listed(sequence, name)


def _reading(sampler: Sampler[Any]) -> Callable[[int], object]:
    """A function epoch -> what the sampler gives."""

    def read(epoch: int) -> list[Any]:
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        return list(sampler)

    return read


def _listed(sequence: object, name: str) -> object:
    """`sequence` as something that numpy understands."""
    if isinstance(sequence, torch.Tensor):
        return _array(sequence, name)
    if isinstance(sequence, np.ndarray):
        return sequence
    if isinstance(sequence, (list, tuple, range)):
        try:
            return np.asarray(sequence)
        except ValueError as error:
            raise UsageError(f"{name} has entries of different lengths", do="give one number for each place") from error
    do = "give a list, array or tensor" + (", or a function epoch -> list" if name.startswith("order") else "")
    if isinstance(sequence, (Mapping, Set)):
        what = "whose keys would be taken" if isinstance(sequence, Mapping) else "which has no order"
        raise UsageError(f"{name} is a {type(sequence).__name__}, {what}, expected a sequence", do=do)
    if isinstance(sequence, Sampler):  # it has a length, and what it gives is no weight or length
        raise UsageError(
            f"{name} is a {type(sequence).__name__}, expected numbers: a sampler gives indices",
            do=f"write {instead_of(sequence)}",
        )
    if isinstance(sequence, Iterable) and hasattr(sequence, "__len__"):
        return list(sequence)
    raise UsageError(
        f"{name} is {type(sequence).__name__}, expected a sequence with a length",
        do=do,
    )


def _array(tensor: torch.Tensor, name: str) -> object:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise UsageError(f"{name} is a tensor that is sparse, or without data", do="give a dense one")
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor).numpy()
