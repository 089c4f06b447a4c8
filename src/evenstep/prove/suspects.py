"""Places in the user's source that read what differs between processes, starts and layouts. Nothing is run.

They are evidence and no proof: they are named only near the place where two layouts were seen to part.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLACE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
_KINDS: dict[str, frozenset[str]] = {
    "rank": frozenset({"rank", "world_size", "local_rank", "get_rank", "get_world_size", "get_node_local_rank"}),
    "process": frozenset({"getpid", "get_worker_info", "gethostname", "get_ident"}),
    "time": frozenset({"time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today"}),
    "randomness": frozenset(
        {"Generator", "default_rng", "RandomState", "Random", "SystemRandom", "urandom", "getrandom", "uuid4", "uuid1",
         "token_bytes", "token_hex", "randbits", "randbelow"}
    ),
    "hash": frozenset({"hash", "set", "frozenset", "id"}),
    "threads": frozenset({"set_num_threads"}),
}  # fmt: skip
_CHANGING = {"append", "extend", "add", "update", "pop", "clear"}
_ATTRIBUTES = {"rank", "world_size", "local_rank"}  # they count where they are only read, too


@dataclass(frozen=True)
class Suspect:
    """One place. `kind`: a key of the table above, or "state" for what is changed in place."""

    kind: str
    file: str
    line: int  # from 1
    text: str  # of the line

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line}: {self.text}"


def suspects(lines: Sequence[Any] | None, *kinds: str) -> list[Suspect]:
    """Those of `kinds` between two lines of a file, [file, first, last]; of the whole file without numbers."""
    if lines is None:
        return []
    file, first, last = (*lines, 1, 1 << 30)[:3]
    return [one for one in _of_file(file) if one.kind in kinds and first <= one.line <= last]


def loop_at(lines: Sequence[Any] | None) -> list[Any] | None:
    """The lines of the innermost loop around a line; the line alone where there is none."""
    if lines is None:
        return None
    file, line = lines[0], lines[1]
    around = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(_parsed(file)[0])
        if isinstance(node, (ast.For, ast.While)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return [file, *max(around, default=(line, line))]


def names_in(lines: Sequence[Any] | None) -> set[str]:
    """The names and attributes that the code between two lines uses."""
    if lines is None:
        return set()
    found: set[str] = set()
    for node in ast.walk(_parsed(lines[0])[0]):
        if lines[1] <= getattr(node, "lineno", 0) <= lines[2]:
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
    return found


def _of_file(file: str) -> list[Suspect]:
    tree, text = _parsed(file)
    found = sorted({(node_line, kind) for node in ast.walk(tree) for node_line, kind in _kinds(node)})
    return [Suspect(kind, file, line, text[line - 1].strip()) for line, kind in found if line <= len(text)]


def _kinds(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and node.value in _PLACE:
        yield node.lineno, "rank"
    if isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
        yield node.lineno, "rank"
    if isinstance(node, ast.Call):
        name = _called(node)
        for kind, names in _KINDS.items():
            if name in names:
                yield node.lineno, kind
    if isinstance(node, (ast.Set, ast.SetComp)):
        yield node.lineno, "hash"
    target = node.target if isinstance(node, ast.AugAssign) else None
    if isinstance(target, (ast.Attribute, ast.Subscript)):
        yield target.lineno, "state"
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        yield node.lineno, "state"
    if isinstance(node, ast.FunctionDef) and node.name != "__init__":
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and any(_is_own(one) for one in inner.targets):
                yield inner.lineno, "state"
    if isinstance(node, ast.Call) and _called(node) in _CHANGING and _is_own(getattr(node.func, "value", node)):
        yield node.lineno, "state"


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _parsed(file: str) -> tuple[ast.AST, list[str]]:
    try:
        text = Path(file).read_text()
        return ast.parse(text), text.splitlines()
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], []), []


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
