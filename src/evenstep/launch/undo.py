"""Take back the folders of a launch that was refused before it started anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from evenstep.errors import EvenstepError
from evenstep.record.paths import RunPaths


def absent(folder: Path) -> tuple[Path, ...]:
    """The folder and those above it that do not exist yet, innermost first: what making it will make."""
    missing: list[Path] = []
    for place in (folder, *folder.parents):
        if place.exists():
            break
        missing.append(place)
    return tuple(missing)


@contextmanager
def taken_back_if_refused(paths: RunPaths, made: Sequence[Path]) -> Iterator[None]:
    """Does `take_back` after an error of evenstep's inside, all of which come before the first process."""
    try:
        yield
    except EvenstepError:
        take_back(paths, made)
        raise


def take_back(paths: RunPaths, made: Sequence[Path]) -> None:
    """Remove the folders that this launch made (innermost first), and in a new run directory our own beginnings.

    Whatever holds something else stays. To be called with the run directory locked.
    """
    if paths.root in made:
        with suppress(OSError):
            paths.run_id.unlink()
        with suppress(OSError):
            paths.launcher_events.unlink()
    ours = (paths.launcher_events.parent, paths.log(0).parent) if paths.root in made else ()
    for folder in (*ours, *made):
        with suppress(OSError):
            folder.rmdir()  # which does nothing to a folder that is not empty
