"""gather, reduce and their like: torch.distributed's meaning, on nests, checked before anything is combined."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from evenstep.errors import MismatchError, UsageError
from evenstep.train import collectives as c
from evenstep.train.meeting import Meeting
from tests.ranks import run_ranks

ALONE = Meeting(0, 1)


def together(world_size: int, work: Callable[[Meeting], Any]) -> list[Any]:
    """What `work` returns on each rank; the error it raises, if it is one of evenstep's."""

    def rank() -> Any:
        dist.init_process_group("gloo")
        meeting = Meeting(dist.get_rank(), world_size, dist.group.WORLD)
        try:
            return work(meeting)
        except MismatchError as error:
            return error
        finally:
            dist.destroy_process_group()

    return run_ranks(rank, world_size)


class Pair(NamedTuple):
    a: Any
    b: Any


def test_gather_and_all_gather() -> None:
    def work(m: Meeting) -> Any:
        value = {
            "x": torch.full((2,), m.rank),
            "n": (m.rank, [f"rank {m.rank}", None, m.rank > 0]),
            "p": Pair(1.5, b""),
        }
        return c.gather(m, value, to=1), c.all_gather(m, value)

    expected = [{"x": [r, r], "n": (r, [f"rank {r}", None, r > 0]), "p": Pair(1.5, b"")} for r in range(3)]
    for rank, (some, all_) in enumerate(together(3, work)):
        for value in all_:
            value["x"] = value["x"].tolist()
        assert all_ == expected
        assert (some is not None) == (rank == 1)


def test_reduce_and_all_reduce() -> None:
    def work(m: Meeting) -> Any:
        x = torch.tensor([1.0, -2.0]) * (m.rank + 1)
        return {
            "sum": c.all_reduce(m, {"x": x, "n": m.rank, "f": 0.5, "c": 1j}),
            "mean": c.all_reduce(m, [x, m.rank], op="mean"),
            "min": c.all_reduce(m, (x, m.rank, m.rank > 0), op="min"),
            "max": c.all_reduce(m, (x, m.rank, m.rank > 0), op="max"),
            "bool": c.all_reduce(m, torch.tensor([True, m.rank > 0])),
            "any": c.all_reduce(m, torch.tensor([False, m.rank > 0]), op="max"),
            "count": c.all_reduce(m, True),
            "share": c.all_reduce(m, m.rank > 0, op="mean"),
            "one": c.reduce(m, {"a": float(m.rank)}, to=2),
            "int8": c.all_reduce(m, torch.tensor([m.rank], dtype=torch.int8)),
            "numpy": c.all_reduce(m, np.float32(0.25)),
        }

    for rank, found in enumerate(together(3, work)):
        assert found["sum"]["x"].tolist() == [6.0, -12.0]
        assert (found["sum"]["n"], found["sum"]["f"], found["sum"]["c"]) == (3, 1.5, 3j)
        assert type(found["sum"]["n"]) is int
        assert found["mean"][0].tolist() == [2.0, -4.0]
        assert found["mean"][1] == 1.0
        assert found["min"][0].tolist() == [1.0, -6.0]
        assert found["min"][1:] == (0, False)
        assert found["max"][0].tolist() == [3.0, -2.0]
        assert found["max"][1:] == (2, True)
        assert found["bool"].tolist() == [3, 2]
        assert found["any"].tolist() == [False, True]
        assert found["any"].dtype == torch.bool
        assert found["count"] == 3
        assert found["share"] == 2 / 3
        assert found["one"] == ({"a": 1.0} if rank == 2 else None)
        assert found["int8"].dtype == torch.int8
        assert found["numpy"] == 0.75


def test_sums_are_taken_in_the_tree_of_ranks() -> None:
    parts = [1e16, 1.0, -1e16, 1.0, 3.0]
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]

    def work(m: Meeting) -> Any:
        return c.all_reduce(m, parts[m.rank]), c.all_reduce(m, torch.tensor(parts[m.rank], dtype=torch.float64)).item()

    assert together(5, work) == [(expected, expected)] * 5


def test_broadcast() -> None:
    def work(m: Meeting) -> Any:
        mine = {"x": torch.full((1 + m.rank,), m.rank), "n": (m.rank, "text")}
        config = {"lr": [0.1, torch.ones(2)]} if m.rank == 0 else None
        return c.broadcast(m, mine, source=1), c.broadcast(m, config)

    for found, config in together(2, work):
        assert found["x"].tolist() == [1, 1]
        assert found["n"] == (1, "text")
        assert config["lr"][0] == 0.1
        assert config["lr"][1].tolist() == [1.0, 1.0]


def test_a_barrier_and_one_process_alone() -> None:
    x = {"x": torch.arange(3), "n": 2}
    c.barrier(ALONE)
    gathered = c.gather(ALONE, x)
    assert gathered is not None
    for found in (gathered[0], c.all_gather(ALONE, x)[0], c.all_reduce(ALONE, x), c.broadcast(ALONE, x)):
        assert found["x"].tolist() == [0, 1, 2]
        assert found["n"] == 2
        assert found["x"] is not x["x"]
    assert c.reduce(ALONE, 3) == 3.0
    ordered = collections.OrderedDict(b=1, a=torch.ones((), requires_grad=True))
    result = c.all_reduce(ALONE, ordered)
    assert list(result) == ["b", "a"]
    assert not result["a"].requires_grad


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda m: c.all_reduce(m, torch.ones(2 + m.rank)), ["rank 0: op=sum float32[2]", "rank 1: op=sum float32[3]"]),
        (lambda m: c.all_reduce(m, torch.ones(1, dtype=[torch.float32, torch.float64][m.rank])), ["float64[1]"]),
        (lambda m: c.all_reduce(m, 1, op=["sum", "max"][m.rank]), ["rank 0: op=sum", "rank 1: op=max"]),
        (lambda m: c.reduce(m, 1, to=m.rank), ["to=0", "to=1"]),
        (lambda m: c.gather(m, {"ab"[m.rank]: 1}), ["rank 0: to=0 {'a': number}", "rank 1: to=0 {'b': number}"]),
        (lambda m: c.all_gather(m, [1, (1,)][m.rank]), ["rank 1: (number)"]),
        (lambda m: c.broadcast(m, 1, source=m.rank), ["source=0", "source=1"]),
        (lambda m: c.broadcast(m, [[1], {"a": 1}][m.rank]), ["rank 0, which gave [number]; rank 1 gave {'a': number}"]),
        (lambda m: [c.barrier, lambda m: c.all_reduce(m, 1)][m.rank](m), ["rank 0: barrier (", "rank 1: all_reduce ("]),
    ],
)
def test_processes_that_differ_are_named(work: Callable[[Meeting], Any], words: list[str]) -> None:
    found = together(2, work)
    assert all(isinstance(error, MismatchError) for error in found)
    for word in words:
        assert word in str(found[0])
        assert word in str(found[1])


def test_the_order_of_keys_does_not_matter() -> None:
    def work(m: Meeting) -> Any:
        return c.all_reduce(m, {"a": 1, "b": 10} if m.rank == 0 else {"b": 10, "a": 1})

    assert together(2, work) == [{"a": 2, "b": 20}] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: c.all_reduce(ALONE, 1, op="product"), "expected one of sum, mean, min, max"),
        (lambda: c.all_reduce(ALONE, torch.ones(2).long(), op="mean"), r"op='mean' of a tensor of int64"),
        (lambda: c.all_reduce(ALONE, torch.ones(2).bool(), op="mean"), r"op='mean' of a tensor of bool"),
        (lambda: c.all_reduce(ALONE, "text"), "op='sum' of str"),
        (lambda: c.all_reduce(ALONE, np.ones(2)), "from_numpy"),
        (lambda: c.all_reduce(ALONE, 1j, op="min"), "no order"),
        (lambda: c.all_reduce(ALONE, torch.ones(1) * 1j, op="max"), "no order"),
        (lambda: c.reduce(ALONE, 1, to=1), "to=1, expected a rank from 0 to 0"),
        (lambda: c.broadcast(ALONE, 1, source=-1), "source=-1"),
        (lambda: c.gather(ALONE, 1, to=True), "to=True"),
    ],
)
def test_calls_that_cannot_work_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
