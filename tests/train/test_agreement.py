"""The fingerprint of what processes hold together, whoever has what of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import UsageError
from evenstep.train.agreement import Agreed, agreed, by_path, differing
from evenstep.train.fingerprint import fingerprint
from evenstep.train.pieces import ELSEWHERE, holders


def together(trees: list[Any]) -> list[Agreed]:
    """What each of the processes that have `trees` finds; they are threads here."""
    said: list[bytes] = [b""] * len(trees)
    barrier = threading.Barrier(len(trees), timeout=20)

    def exchange_as(rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(data: bytes) -> list[bytes]:
            said[rank] = data
            barrier.wait()
            answers = list(said)
            barrier.wait()
            return answers

        return exchange

    with ThreadPoolExecutor(len(trees)) as pool:
        work = [pool.submit(agreed, tree, r, len(trees), exchange_as(r)) for r, tree in enumerate(trees)]
        return [one.result() for one in work]


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


SIZES = {"a": (90, 100), "b": (3, 4), "c": (), "d": (5000,), "e": (0, 3)}


@given(st.data())
def test_any_processes_may_have_any_tensors(data: st.DataObject) -> None:
    values = {name: torch.randn(shape) for name, shape in SIZES.items()}
    state = {i: {"sum": value + 1, "n": i} for i, value in enumerate(values.values())}
    whole: dict[str, Any] = {"model": values, "state": state}
    world_size: int = data.draw(st.integers(1, 4))
    trees = []
    for rank in range(world_size):
        mine: set[str] = data.draw(st.sets(st.sampled_from(sorted(SIZES)))) if rank else set(SIZES)
        model = {name: value if name in mine else meta(value) for name, value in values.items()}
        known = {i: state[i] if name in mine else ELSEWHERE for i, name in enumerate(values)}
        trees.append({"model": model, "state": known})
    trees = data.draw(st.permutations(trees))
    found = together(trees)
    assert set(found) == {Agreed(fingerprint(whole), any(tree["state"] != whole["state"] for tree in trees))}


def test_a_change_of_any_copy_shows() -> None:
    values = {name: torch.randn(shape) for name, shape in SIZES.items() if name != "e"}
    for changed in values:
        for odd in (1, 2):
            trees: list[dict[str, torch.Tensor]] = [
                {name: meta(value) for name, value in values.items()},
                dict(values),
                {**values, "b" if changed != "b" else "c": meta(values["b" if changed != "b" else "c"])},
            ]
            assert {one.value for one in together(trees)} == {fingerprint(values)}
            trees[odd][changed] = values[changed] + 1
            assert {one.value for one in together(trees)} == {None}
            assert [path for path, _ in differing([by_path(tree, parts=True) for tree in trees])] == [changed]


def test_state_that_an_owner_has_not_is_nowhere_and_a_plain_value_is_everywhere() -> None:
    w = torch.ones(3)
    trees: list[Any] = [{"w": w, "s": {0: 1.0, 1: ELSEWHERE}}, {"w": meta(w), "s": {0: ELSEWHERE}}]
    assert {one.value for one in together(trees)} == {fingerprint({"w": w, "s": {0: 1.0}})}
    trees[1]["s"] = {}  # it should know of 0, or say that others do
    assert {one.value for one in together(trees)} == {None}
    trees[1]["s"] = {0: 2.0}
    assert {one.value for one in together(trees)} == {None}
    trees[1] = {"w": meta(torch.ones(4)), "s": {0: ELSEWHERE}}
    assert {one.value for one in together(trees)} == {None}


def test_what_nobody_has_is_named() -> None:
    with pytest.raises(UsageError, match=r"no process has the values of m\.w"):
        together([{"m": {"w": meta(torch.ones(2))}}, {"m": {"w": meta(torch.ones(2))}}])


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 20), st.integers(0, 20))), max_size=6))
def test_every_element_is_in_one_part_with_all_that_have_it(spans: list[tuple[int, int] | None]) -> None:
    spans = [None if span is None or span[0] == span[1] else (min(span), max(span)) for span in spans]
    parts = holders(20, tuple(spans))
    assert [i for first, last, _ in parts for i in range(first, last)] == list(range(20))
    for first, last, ranks in parts:
        for i in range(first, last):
            assert ranks == tuple(r for r, span in enumerate(spans) if span is not None and span[0] <= i < span[1])
