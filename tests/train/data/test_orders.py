"""The order that a script asks for: sequences, functions of the epoch, samplers, weights; and samplers elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from evenstep.errors import UsageError
from evenstep.train.data.dataset import checked_dataset
from evenstep.train.data.orders import choose_order
from evenstep.train.randomness import kept_generators, seed_generators

TEN = TensorDataset(torch.arange(10))


def test_choosing_an_order() -> None:
    data = list(range(10))
    assert choose_order(data, seed=0, shuffle=False).indices(3, 2, 5).tolist() == [2, 3, 4]
    assert sorted(choose_order(data, seed=0).indices(3, 0, 10)) == data
    forms: list[Any] = [[3, 1, 3], (3, 1, 3), np.array([3, 1, 3]), torch.tensor([3, 1, 3])]
    for form in forms:
        order = choose_order(data, seed=0, order=form)
        assert order.length == 3
        assert order.indices(5, 1, 3).tolist() == [1, 3]
    assert choose_order(data, seed=0, weights=[0.0] * 9 + [1]).indices(0, 0, 10).tolist() == [9] * 10
    assert choose_order(data, seed=0, weights=torch.eye(10)[4]).indices(0, 0, 2).tolist() == [4, 4]


class Halves(Sampler[int]):
    """The even epochs have the first half, the odd ones the second, if it is told them; else all have the first."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        start = 5 * (self.epoch % 2)
        return iter(range(start, start + 5))


def test_a_sampler_is_read_anew_for_each_epoch_and_alike_on_every_process() -> None:
    orders = []
    for own in (1, 2):
        with kept_generators():
            seed_generators(own)
            order = choose_order(range(10), seed=5, order=RandomSampler(range(10)))
        orders.append([order.indices(epoch, 0, 10).tolist() for epoch in (0, 1)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert all(sorted(order) == list(range(10)) for order in orders[0])
    told = choose_order(range(10), seed=5, order=Halves())
    assert [told.indices(epoch, 0, 5)[0] for epoch in (0, 1, 2)] == [0, 5, 0]
    assert told.name.startswith("order= a Halves, ")
    with pytest.raises(UsageError, match=r"order= \(a RandomSampler\) gave two different orders for epoch 0"):
        choose_order(range(10), seed=5, order=RandomSampler(range(10), generator=torch.Generator()))


def test_a_function_gives_each_epoch_its_order() -> None:
    def order(epoch: int) -> Any:
        return torch.randperm(10)[: 6 if epoch < 2 else 5]

    chosen, other = (choose_order(range(10), seed=5, order=order) for _ in range(2))
    assert chosen.length == 6
    first = chosen.indices(0, 0, 6).tolist()
    assert chosen.indices(1, 0, 6).tolist() != first
    seed_generators(1)
    assert [other.indices(0, 0, 3).tolist(), other.indices(0, 3, 6).tolist()] == [first[:3], first[3:]]
    with pytest.raises(UsageError, match=r"order\(2\) has 5 indices, but order\(0\) has 6"):
        chosen.indices(2, 0, 3)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_function_that_is_none_of_the_epoch_is_refused(in_place: bool) -> None:
    rng, indices = np.random.default_rng(0), np.arange(10)

    def order(epoch: int) -> Any:
        if in_place:
            rng.shuffle(indices)
            return indices
        return rng.permutation(10)

    with pytest.raises(UsageError, match=r"(?s)order= \(a function\) gave two different orders.*default_rng\(epoch\)"):
        choose_order(range(10), seed=0, order=order)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": [0, 10]}, r"index 10 at position 1, expected 0\.\.9"),
        ({"order": [-1]}, "index -1"),
        ({"order": []}, "empty"),
        ({"order": [0.5]}, "1-d sequence of integers"),
        ({"order": [True, False]}, "flatnonzero"),
        ({"order": [[1]]}, "1-d"),
        ({"order": 3}, "expected a sequence"),
        ({"order": (i for i in range(3))}, "sequence with a length"),
        ({"order": lambda epoch: [11]}, r"order\(0\) has index 11"),
        ({"order": [1], "weights": [1] * 10}, "both order= and weights="),
        ({"order": BatchSampler(range(10), 2, False)}, "BatchSampler, which gives batches"),
        ({"order": DistributedSampler(TEN, 2, 0)}, "DistributedSampler, which gives each process a part"),
        ({"weights": WeightedRandomSampler([1.0] * 10, 10)}, "weights=sampler.weights, num_samples=10"),
        ({"num_samples": 5}, "without weights="),
        ({"replacement": False}, "without weights="),
        ({"weights": [1] * 10, "num_samples": 0}, "num_samples=0"),
        ({"weights": [1] * 10, "num_samples": 11, "replacement": False}, "only 10 samples have a weight"),
        ({"weights": [1] * 9}, r"shape \(9,\), expected \(10,\)"),
        ({"weights": [1] * 9 + [-1]}, r"weights\[9\] is -1.0"),
        ({"weights": [1] * 9 + [float("nan")]}, r"weights\[9\] is nan"),
        ({"weights": [0] * 10}, "sum of weights= is 0.0"),
        ({"weights": ["a"] * 10}, "expected numbers"),
        ({"weights": ["1"] * 10}, "expected numbers"),
        ({"weights": [1j] * 10}, "expected numbers"),
        ({"weights": dict.fromkeys(range(10), 1.0)}, r"weights= is a dict, whose keys would be taken"),
        ({"weights": len}, r"expected a sequence with a length\n.*give a list, array or tensor$"),
        ({"weights": torch.ones(10).to_sparse()}, "a tensor that is sparse"),
        ({"order": {1, 2}}, "order= is a set, which has no order"),
        ({"order": [[1], [2, 3]]}, "order= has entries of different lengths"),
    ],
)
def test_orders_and_weights_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_order(list(range(10)), seed=0, **arguments)


def test_weights_can_be_of_any_float_type() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.int8):
        weights = torch.arange(10, dtype=dtype)
        expected = choose_order(range(10), seed=0, weights=list(range(10)))
        assert choose_order(range(10), seed=0, weights=weights).name == expected.name


class Grouped(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(TEN), r"give loader.dataset; batch_size=1 .*shuffle=False$"),
        (DataLoader(TEN, 2, shuffle=True), r"give loader.dataset; batch_size=2 is start\(micro_batch=2\)$"),
        (
            DataLoader(TEN, 2, sampler=WeightedRandomSampler([1.0, 1.0], 2), collate_fn=list, drop_last=True),
            r"collate=loader.collate_fn; drop_last=True stays; .*weights=loader.sampler.weights, num_samples=2$",
        ),
        (DataLoader(TEN, batch_sampler=Grouped(range(2), 1, False)), "for the Grouped: lengths= if it puts"),
        (RandomSampler(range(3), num_samples=2), r"weights=\[1.0\] \* 3, num_samples=2, replacement=False"),
        (SubsetRandomSampler([0]), "Subset\\(data, sampler.indices\\)"),
        (BatchSampler(RandomSampler(TEN), 4, False), r"default; the batch is start\(micro_batch=4\)"),
        (DistributedSampler(TEN, 2, 0), "every process gives the whole data set"),
        (Halves(), "order=sampler, which is read anew"),
    ],
)
def test_a_sampler_or_loader_in_place_of_a_data_set_is_told_what_to_write(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked_dataset(data)
