"""What must be the same on every host of a launch: the code and the environment that it runs in."""

from __future__ import annotations

import hashlib
import platform
import shlex
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from evenstep import __version__
from evenstep.launch.imports import scan_module, scan_script
from evenstep.launch.job import Script

_PACKAGE = Path(__file__).resolve().parents[2]
NONE = "none"


def same_on_all(script: Script | None) -> dict[str, str]:
    """By name, each thing and what this host has of it. Hashes of files are of their content.

    Of a script: its text, its arguments, the user's own modules that it imports, and the versions of the installed
    packages that it imports, as far as its source tells.
    """
    said = {"evenstep": evenstep_version(), "torch": version_of("torch"), "python": platform.python_version()}
    if script is None:
        return said
    path = Path(script.name)
    found = scan_module(script.name, Path.cwd()) if script.as_module else scan_script(path)
    folder = Path.cwd() if script.as_module else (path if path.is_dir() else path.parent).resolve()
    said["the script"] = _digest([path]) if path.is_file() and not script.as_module else script.name
    said["the script's argument list"] = shlex.join(script.arguments)
    for own in found.own:
        if own.resolve() != path.resolve():
            name = own.resolve().relative_to(folder) if own.resolve().is_relative_to(folder) else own.name
            said[f"the module {name}"] = _digest([own])
    for package in dict.fromkeys(["numpy", *(name.partition(".")[0] for name in found.installed)]):
        if package not in said:
            said[package] = version_of(package)
    return said


def evenstep_version() -> str:
    """The version of evenstep with a hash of its source, since one in development keeps its number."""
    return f"{__version__}, source {_source()}"


@cache
def _source() -> str:
    return _digest(sorted(_PACKAGE.rglob("*.py")))


def version_of(package: str) -> str:
    """The version of an installed package, by the name by which it is imported; "none" if there is none."""
    with suppress(PackageNotFoundError):
        return version(package)
    for distribution in packages_distributions().get(package, []):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return NONE


def _digest(files: Iterable[Path]) -> str:
    """Of their names and content."""
    digest = hashlib.blake2b(digest_size=6)
    for file in files:
        with suppress(OSError):
            data = file.read_bytes()
            digest.update(f"{file.name} {len(data)} ".encode() + data)
    return digest.hexdigest()
