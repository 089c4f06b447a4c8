"""The fixed tree: whoever computes which leaf, the sum is the same to the last bit."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from evenstep.plan.tree import Node, combine, root, share, subtrees, tree_sum


@given(st.integers(0, 200), st.integers(1, 40))
def test_shares_are_neighbours_and_differ_by_one_at_most(leaves: int, processes: int) -> None:
    shares = [share(leaves, processes, rank) for rank in range(processes)]
    assert [leaf for part in shares for leaf in part] == list(range(leaves))
    sizes = [len(part) for part in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 300), st.integers(0, 300))
def test_subtrees_cover_the_leaves_once_with_few_nodes(start: int, length: int) -> None:
    nodes = subtrees(range(start, start + length))
    covered = [leaf for n in nodes for leaf in range(n.index << n.level, (n.index + 1) << n.level)]
    assert covered == list(range(start, start + length))
    assert len(nodes) <= 2 * max(length, 1).bit_length()


def pairwise(values: list[float]) -> float:
    """The tree as DESIGN says it: node(l, j) = node(l-1, 2j) + node(l-1, 2j+1), a missing child passes through."""
    while len(values) > 1:
        values = [values[i] + values[i + 1] if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def floats(count: int) -> list[float]:
    generator = random.Random(count)
    return [generator.uniform(-1, 1) * 10.0 ** generator.randint(-12, 12) for _ in range(count)]


@given(st.integers(1, 130), st.integers(1, 20))
def test_a_sum_does_not_depend_on_the_shares(leaves: int, processes: int) -> None:
    values = floats(leaves)
    expected = pairwise(values)
    assert tree_sum(values) == expected
    parts: dict[Node, float] = {}
    for rank in range(processes):
        for node in subtrees(share(leaves, processes, rank)):
            start = node.index << node.level
            parts[node] = pairwise(values[start : start + (1 << node.level)])
    assert combine(parts, leaves, lambda a, b: a + b) == expected


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 7))
def test_missing_leaves_pass_the_others_through(there: list[bool], processes: int) -> None:
    values = [v if here else None for v, here in zip(floats(len(there)), there, strict=True)]
    alone = combine({Node(0, i): v for i, v in enumerate(values) if v is not None}, len(values), lambda a, b: a + b)
    parts: dict[Node, float] = {}
    for rank in range(processes):
        for node in subtrees(share(len(values), processes, rank)):
            start = node.index << node.level
            some = values[start : start + (1 << node.level)]
            found = combine({Node(0, i): v for i, v in enumerate(some) if v is not None}, len(some), lambda a, b: a + b)
            if found is not None:
                parts[node] = found
    assert combine(parts, len(values), lambda a, b: a + b) == alone
    assert tree_sum(values) == (0.0 if alone is None else alone)


def test_the_root_covers_every_leaf() -> None:
    assert [root(n) for n in (0, 1, 2, 3, 4, 5)] == [Node(k, 0) for k in (0, 0, 1, 2, 2, 3)]
    assert combine({}, 4, lambda a, b: a + b) is None
    assert tree_sum([]) == 0.0
