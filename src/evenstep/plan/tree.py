"""The fixed binary tree in which the micro-batches of a step are added, and who computes which leaf.

Leaves are numbered 0..V-1. node(l, j) = node(l-1, 2j) + node(l-1, 2j+1); a missing child passes the other
through. The tree depends on nothing but the numbers of the leaves, so neither does a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree: it covers the leaves [index << level, (index + 1) << level)."""

    level: int
    index: int


def share(micro_batches: int, processes: int, rank: int) -> range:
    """The neighbouring micro-batches that `rank` computes; the first ranks take one more where they do not divide."""
    quotient, remainder = divmod(micro_batches, processes)
    start = rank * quotient + min(rank, remainder)
    return range(start, start + quotient + (rank < remainder))


def subtrees(leaves: range) -> list[Node]:
    """The fewest whole nodes that cover `leaves` (neighbours), in order."""
    nodes = []
    start, stop = leaves.start, leaves.stop
    while start < stop:
        level = 0
        while start % (2 << level) == 0 and start + (2 << level) <= stop:
            level += 1
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return nodes


def root(leaves: int) -> Node:
    """The node that covers leaves 0..leaves-1."""
    return Node(max(leaves - 1, 0).bit_length(), 0)


def combine(parts: Mapping[Node, T], leaves: int, add: Callable[[T, T], T]) -> T | None:
    """The sum at the root, from nodes that together cover every leaf that counts. None if there are none."""
    return value_at(root(leaves), parts, leaves, add)


def value_at(node: Node, parts: Mapping[Node, T], leaves: int, add: Callable[[T, T], T]) -> T | None:
    """The sum at `node`, from nodes inside it. None if there are none."""
    if node in parts:
        return parts[node]
    level, index = node.level, node.index
    if level == 0 or index << level >= leaves:
        return None
    left = value_at(Node(level - 1, 2 * index), parts, leaves, add)
    right = value_at(Node(level - 1, 2 * index + 1), parts, leaves, add)
    if left is None:
        return right
    return left if right is None else add(left, right)


def tree_sum(leaves: Iterable[float | None]) -> float:
    """The sum of numbers in the fixed tree (float64); None is a missing leaf. 0.0 if all are missing."""
    values = list(leaves)
    parts = {Node(0, i): float(v) for i, v in enumerate(values) if v is not None}
    total = combine(parts, len(values), lambda a, b: a + b)
    return 0.0 if total is None else total
