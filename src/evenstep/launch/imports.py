"""What a script imports, read from its source: installed packages, and whether evenstep is among them.

Nothing is imported here, and none of the user's code runs.
"""

from __future__ import annotations

import ast
import importlib.util
import site
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_STANDARD = Path(ast.__file__).parent


@dataclass(frozen=True)
class Imports:
    """What a script and the user's own modules that it imports ask for."""

    installed: tuple[str, ...]  # dotted names under site-packages, imported whenever the script runs, in order
    uses_evenstep: bool  # anywhere, also inside functions
    readable: bool = True  # False: some file is not Python, so nobody knows what it asks for
    own: tuple[Path, ...] = ()  # the files of the script and of those modules


@dataclass(frozen=True)
class _Source:
    path: Path
    package: str  # what relative imports in it are relative to


@dataclass(frozen=True)
class _Found:
    name: str  # dotted, absolute
    always: bool  # not inside a function, nor for a type checker only


def scan_script(script: Path) -> Imports:
    """Scan a script file, or a directory with __main__.py."""
    if script.is_dir():
        return _scan([_Source(script / "__main__.py", "")], [str(script), *sys.path])
    return _scan([_Source(script, "")], [str(script.resolve().parent), *sys.path])


def scan_module(name: str, cwd: Path) -> Imports:
    """Scan what `python -m name` would run."""
    search = [str(cwd), *sys.path]
    return _scan(list(_own_sources(name, search)) + list(_own_sources(f"{name}.__main__", search)), search)


def _scan(sources: list[_Source], search: list[str]) -> Imports:
    installed: dict[str, None] = {}
    uses_evenstep, readable = False, True
    seen: dict[Path, None] = {}
    queue = list(sources)
    while queue:
        source = queue.pop(0)
        if source.path in seen:
            continue
        seen[source.path] = None
        tree = _parse(source.path)
        if tree is None:
            readable = False
            continue
        for found in _walk(tree.body, source.package, always=True):
            top = found.name.partition(".")[0]
            if top == "evenstep":
                uses_evenstep = True
            if top in sys.builtin_module_names:
                continue
            spec = _find(top, search)
            if spec is None:
                continue
            if top == "evenstep" or _is_installed(spec):
                if found.always:
                    installed[found.name] = None
            elif not _is_standard(spec):
                queue.extend(_own_sources(found.name, search))
    return Imports(tuple(installed), uses_evenstep, readable, tuple(seen))


def _parse(path: Path) -> ast.Module | None:
    """None for what cannot be read: the script itself will say so when it runs."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def is_foreign(found: Imports) -> bool:
    """Whether the script does not use evenstep, as far as can be seen."""
    return found.readable and not found.uses_evenstep


def _walk(body: list[ast.stmt], package: str, *, always: bool) -> Iterator[_Found]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (_Found(alias.name, always) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            base = _absolute(statement, package)
            if base is None:
                continue
            if base:
                yield _Found(base, always)
            for alias in statement.names:  # each may be a module too
                if alias.name != "*":
                    yield _Found(f"{base}.{alias.name}" if base else alias.name, always)
        else:
            in_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            for_checker = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test)
            for inner in _bodies(statement):
                yield from _walk(inner, package, always=always and not in_function and not for_checker)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks inside a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        yield part.body


def _absolute(statement: ast.ImportFrom, package: str) -> str | None:
    """The absolute name of what `from ... import` reads; None if it climbs out of its package."""
    if statement.level == 0:
        return statement.module or ""
    parts = package.split(".") if package else []
    if statement.level > max(1, len(parts)):
        return None
    parts = parts[: len(parts) - statement.level + 1]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _find(top: str, search: list[str]) -> ModuleSpec | None:
    """Where a top-level name comes from: the search path first, then finders that packages in development add."""
    try:
        return PathFinder.find_spec(top, search) or importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None


def _own_sources(name: str, search: list[str]) -> Iterator[_Source]:
    """The files that importing the user's own module `name` runs: its packages' __init__.py and itself."""
    path: list[str] | None = search
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        try:
            spec = _find(full, search) if end == 1 else PathFinder.find_spec(full, path)
        except (ImportError, ValueError, AttributeError):
            return
        if spec is None:
            return
        is_package = spec.submodule_search_locations is not None
        if spec.origin is not None and spec.origin.endswith(".py"):
            yield _Source(Path(spec.origin), full if is_package else full.rpartition(".")[0])
        if not is_package:
            return
        path = list(spec.submodule_search_locations or [])


def _is_installed(spec: ModuleSpec) -> bool:
    return any(_under(place, folder) for place in _places(spec) for folder in _site_folders())


def _is_standard(spec: ModuleSpec) -> bool:
    if spec.origin in ("built-in", "frozen"):
        return True
    # A file of the user's may have the name of a standard module.
    return spec.name in sys.stdlib_module_names and all(_under(place, _STANDARD) for place in _places(spec))


def _places(spec: ModuleSpec) -> list[Path]:
    origins = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    return [Path(origin) for origin in origins]


def _site_folders() -> list[Path]:
    return [Path(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())]


def _under(place: Path, folder: Path) -> bool:
    return place.is_relative_to(folder) or place.resolve().is_relative_to(folder.resolve())
