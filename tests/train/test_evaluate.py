"""Evaluation and prediction: each sample once, the same on any layout, and no process left waiting."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from evenstep.errors import DataError, EvenstepError, MismatchError, PeerFailed, UsageError
from evenstep.train import collectives
from evenstep.train import evaluate as evaluation
from evenstep.train.calls import Calls
from evenstep.train.meeting import Meeting
from evenstep.train.randomness import Randomness
from tests.ranks import run_ranks

DATA = TensorDataset(torch.randn(37, 5, generator=torch.Generator().manual_seed(1)), torch.arange(37))


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    net[1].eval()
    return net


def arguments(meeting: Meeting, **more: Any) -> dict[str, Any]:
    return {"micro_batch": 4, "randomness": Randomness(5), "meeting": meeting, **more}


def evaluate(data: Any, fn: Any, models: list[nn.Module], **arguments: Any) -> Any:
    return evaluation.evaluate(Calls(data, fn, models, **arguments))


def predict(data: Any, fn: Any, models: list[nn.Module], **arguments: Any) -> Any:
    return evaluation.predict(Calls(data, fn, models, **arguments))


def on(world_size: int, work: Callable[[Meeting], Any]) -> list[Any]:
    """What `work` returns on each rank, or the error that it raised."""
    if world_size == 1:
        return [work(Meeting(0, 1))]

    def rank() -> Any:
        dist.init_process_group("gloo")
        try:
            return work(Meeting(dist.get_rank(), world_size, dist.group.WORLD))
        except (EvenstepError, ZeroDivisionError) as error:
            return error
        finally:
            dist.destroy_process_group()

    return run_ranks(rank, world_size)


def noisy(net: nn.Module, batch: Any) -> Any:
    x, index = batch
    out = net(x) + torch.rand(3) + random.random() + np.random.rand()
    return {"out": (out.double().sum(), len(index)), "index": (index.sum(), float(len(index)))}


def test_a_mean_is_the_same_on_every_process_of_every_layout() -> None:
    def work(meeting: Meeting) -> Any:
        net = model()
        return evaluate(DATA, noisy, [net], loaders=meeting.world_size % 2, **arguments(meeting))

    (alone,) = on(1, work)
    assert list(alone) == ["out", "index"]
    assert alone["index"] == 18.0
    for world_size in (2, 3, 5, 12):
        assert on(world_size, work) == [alone] * world_size


def test_a_number_for_a_pair_and_each_sample_once() -> None:
    seen: list[int] = []

    def fn(batch: Any) -> Any:
        seen.extend(batch[1].tolist())
        return (batch[1] % 2 == 0).sum(), len(batch[1])

    assert evaluate(DATA, fn, [], **arguments(Meeting(0, 1))) == 19 / 37
    assert seen == list(range(37))
    assert evaluate([1.0, 2.0], lambda b: (b.sum(), len(b)), [], **arguments(Meeting(0, 1))) == 1.5


def test_models_and_generators_are_left_as_they_were() -> None:
    net = model()
    modes = [m.training for m in net.modules()]
    assert modes == [True, True, False, True, True]

    def fn(net: nn.Module, batch: Any) -> Any:
        assert not any(m.training for m in net.modules())
        assert not torch.is_grad_enabled()
        return net(batch[0]).sum() * torch.rand(()), len(batch[1])

    def failing(net: nn.Module, batch: Any) -> Any:
        fn(net, batch)
        raise ZeroDivisionError("no")

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = evaluate(DATA, fn, [net], step=1, **arguments(Meeting(0, 1)))
    assert evaluate(DATA, fn, [net], step=1, **arguments(Meeting(0, 1))) == first
    assert evaluate(DATA, fn, [net], step=2, **arguments(Meeting(0, 1))) != first
    predict(DATA, lambda net, batch: net(batch[0]), [net], **arguments(Meeting(0, 1)))
    with pytest.raises(ZeroDivisionError):
        evaluate(DATA, failing, [net], **arguments(Meeting(0, 1)))
    assert torch.is_grad_enabled()
    assert [m.training for m in net.modules()] == modes
    assert torch.equal(torch.rand(2), expected)


def test_a_metric_may_be_missing_in_some_micro_batches() -> None:
    def fn(batch: Any) -> Any:
        odd = batch[1][batch[1] > 30]
        return {"all": (1, 1), **({"late": (odd.sum(), len(odd))} if len(odd) else {})}

    for world_size in (1, 3):
        for found in on(world_size, lambda m: evaluate(DATA, fn, [], **arguments(m))):
            assert found == {"all": 1.0, "late": 33.5}


def test_a_loss_function_with_metrics_will_do() -> None:
    def loss_fn(batch: Any) -> Any:
        return batch[0].sum(), 2 * len(batch[0]), {"first": (batch[0][:, 0].sum(), len(batch[0]))}

    def pairs(batch: Any) -> Any:
        total, weight, metrics = loss_fn(batch)
        return {"loss": (total, weight), **metrics}

    expected = evaluate(DATA, pairs, [], **arguments(Meeting(0, 1)))
    assert evaluate(DATA, loss_fn, [], **arguments(Meeting(0, 1))) == expected


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda b: b[0].sum(), r"a tensor of shape \(\), expected \(sum over the samples, weight\)"),
        (lambda b: (b[0], 4), r"a tensor of shape \(4, 5\) where a number was expected"),
        (lambda b: (1, 2, 3), "a tuple of 3"),
        (lambda b: (1, 2, {"loss": (1, 2)}), "a metric that is called loss"),
        (lambda b: {"a": 0.5}, "'a' returned float"),
        (lambda b: (1.0, 0), r"the total weight that <lambda> returned is 0.0"),
        (lambda b: {"a": (1.0, float("nan"))}, "the total weight of 'a'"),
        (lambda b: (1, 1) if 0 in b[1] else {"a": (1, 1)}, "some micro-batches and a dict"),
    ],
)
def test_what_is_no_sum_and_weight_is_refused(fn: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(DATA, fn, [], **arguments(Meeting(0, 1)))


@pytest.mark.parametrize(
    ("call", "good"),
    [(evaluate, lambda b: (b[1].sum(), len(b[1]))), (predict, lambda b: b[1])],
    ids=["evaluate", "predict"],
)
def test_a_function_that_raises_on_one_process_ends_the_call_on_all(call: Callable[..., Any], good: Any) -> None:
    def fn(batch: Any) -> Any:
        if 20 in batch[1]:
            raise ZeroDivisionError("sample 20")
        return good(batch)

    found = on(3, lambda m: call(DATA, fn, [], **arguments(m)))
    assert [type(error) for error in found] == [PeerFailed, ZeroDivisionError, PeerFailed]
    assert f"rank 1 failed in {call.__name__}: ZeroDivisionError: sample 20" in str(found[0])


@pytest.mark.parametrize("where", ["fn", "data"])
def test_a_call_on_one_process_alone_ends_the_call_on_all_and_waits_for_nobody(where: str) -> None:
    receive, send = os.pipe()

    def rank() -> Any:
        dist.init_process_group("gloo")
        meeting = Meeting(dist.get_rank(), 2, dist.group.WORLD)

        def alone(at: str) -> None:
            if meeting.rank == 0 and at == where:
                collectives.reduce(meeting, 1.0)

        class Calling(list[int]):
            def __getitem__(self, index: Any) -> Any:
                alone("data")
                return index

        def fn(batch: Any) -> Any:
            alone("fn")
            return 1, 1

        with pytest.raises((MismatchError, DataError)) as raised:
            evaluate(Calling(range(9)), fn, [], **arguments(meeting))
        if meeting.rank == 0:
            os.write(send, b".")
        else:
            os.read(receive, 1)  # the other one is through, too, and has not waited for this one to leave
        dist.destroy_process_group()
        return str(raised.value)

    try:
        found = run_ranks(rank, 2, timeout=20)
    finally:
        os.close(receive)
        os.close(send)
    assert all("rank 0: " in text and "rank 1: evaluate" in text for text in found)


def test_an_evaluation_inside_another_that_fails_on_one_process_ends_both_on_all() -> None:
    def work(meeting: Meeting) -> Any:
        def failing(batch: Any) -> Any:
            if meeting.rank == 1:
                raise ZeroDivisionError("inner")
            return 1, 1

        def fn(batch: Any) -> Any:
            return evaluate([1, 2], failing, [], **one_each), 1

        one_each = {**arguments(meeting), "micro_batch": 1}
        try:
            return evaluate([1, 2], fn, [], **one_each)
        finally:
            meeting.exchange("after")  # all are still there, and at one place

    found = on(2, work)
    assert [type(error) for error in found] == [PeerFailed, ZeroDivisionError]


def test_an_evaluation_leaves_the_epoch_of_the_data_set_to_the_training() -> None:
    class Curriculum(list[int]):
        epoch = 3

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: Any) -> Any:
            return self.epoch

    for loaders in (0, 1):
        found = evaluate(
            Curriculum(range(9)), lambda b: (b.sum(), len(b)), [], loaders=loaders, **arguments(Meeting(0, 1))
        )
        assert found == 3.0


def test_a_sample_that_raises_on_one_process_ends_the_call_on_all() -> None:
    class Bad(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 3:
                raise OSError("torn")
            return index

    found = on(2, lambda m: predict(Bad(range(9)), lambda b: b, [], **arguments(m)))
    assert isinstance(found[0], DataError)
    assert "sample 3 " in str(found[0])
    assert isinstance(found[1], PeerFailed)


def test_processes_with_different_data_are_named() -> None:
    found = on(2, lambda m: evaluate(list(range(9 + m.rank)), lambda b: (1, 1), [], **arguments(m)))
    assert "rank 1: 10 samples" in str(found[0])


def test_predictions_come_in_data_order_on_every_process() -> None:
    def fn(net: nn.Module, batch: Any) -> Any:
        x, index = batch
        return {
            "logits": net(x).bfloat16(),
            "pair": (index, x.numpy()[:, 0], None),
            "names": [f"sample {i}" for i in index.tolist()],
            "ragged": [torch.ones(i % 3) for i in index.tolist()],
        }

    def work(meeting: Meeting) -> Any:
        return predict(DATA, fn, [model()], **arguments(meeting))

    (alone,) = on(1, work)
    assert alone["pair"][0].tolist() == list(range(37))
    assert alone["names"] == [f"sample {i}" for i in range(37)]
    assert [len(t) for t in alone["ragged"]] == [i % 3 for i in range(37)]
    assert alone["logits"].shape == (37, 3)
    assert np.array_equal(alone["pair"][1], DATA.tensors[0].numpy()[:, 0])
    for world_size in (2, 12):
        for found in on(world_size, work):
            assert torch.equal(found["logits"], alone["logits"])
            assert torch.equal(found["pair"][0], alone["pair"][0])
            assert np.array_equal(found["pair"][1], alone["pair"][1])
            assert found["pair"][2] is None
            assert found["names"] == alone["names"]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda b: b[0].sum(), r"shape \(\) for 4 samples"),
        (lambda b: b[0][:-1], r"shape \(3, 5\) for 4 samples, expected 4 rows"),
        (lambda b: [b[0], b[1]], "a list of 2 for 4 samples.*(?s:.*)tuple or a dict"),
        (lambda b: 0.5, r"float \(0.5\)"),
        (lambda b: b[0][:, : 1 + (0 in b[1])], r"(?s)float32\[rows, 2\].*float32\[rows, 1\].*pad"),
        (lambda b: b[0] if 0 in b[1] else b[0].double(), r"float32.*float64"),
    ],
)
def test_outputs_that_do_not_join_are_refused(fn: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict(DATA, fn, [], **arguments(Meeting(0, 1)))


def test_outputs_that_differ_between_processes_are_refused_on_all() -> None:
    found = on(2, lambda m: predict(DATA, lambda b: b[0][:, : 1 + m.rank], [], **arguments(m)))
    assert all(isinstance(e, UsageError) and "float32[rows, 2] on rank 1" in str(e) for e in found)
