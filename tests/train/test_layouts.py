"""The promise as a table: layouts × models × precisions, and a checkpoint of each layout under each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.record.paths import RunPaths
from tests.train.layouts import (
    ALONE,
    CELLS,
    CHECKPOINT,
    LAYOUTS,
    SAVED,
    STEPS,
    TABLE,
    Outcome,
    copy_checkpoint,
    each,
    go_on,
    outcomes,
    table,
)

# What is not offered, and words of the error that says so.
REFUSED = {
    "shards of stages": "--stages and --shard together",
    "stages of thread replicas": "--thread-replicas together with --stages",
    "stages over 2 devices each": "--split together with --stages",
    "shards of thread replicas": "--thread-replicas together with --shard",
    "shards over 2 devices each": "--split together with --shard",
}
REFUSED_OF_ONE = {
    # Its branch is added to what goes around it, and the second cut lies between.
    ("3 stages", "encoder"): "an argument of second depends on the output of first",
}
OFFERED = [layout for layout in LAYOUTS if layout not in REFUSED]

Found = dict[str, dict[tuple[str, str], Outcome]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def found() -> Found:
    return {}


def look(layout: str, directory: Path, found: Found) -> dict[tuple[str, str], Outcome]:
    """What is found on `layout`; each is launched once."""
    if layout not in found:
        found[layout] = outcomes(layout, directory / layout)
    return found[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_that_of_one_process_or_refused(layout: str, directory: Path, found: Found) -> None:
    alone, here = look(ALONE, directory, found), look(layout, directory, found)
    assert len({print_ for seen in alone.values() for print_ in seen}) == len(CELLS) * STEPS, "every step counts"
    for training, precision in CELLS:
        seen = here[training, precision]
        reason = REFUSED.get(layout) or REFUSED_OF_ONE.get((layout, training))
        if reason is None:
            assert seen == alone[training, precision], f"{training} in {precision}"
        else:
            assert isinstance(seen, str)
            assert reason in seen


@pytest.mark.parametrize("layout", OFFERED)
def test_it_goes_on_from_a_checkpoint_of_every_other_layout(layout: str, directory: Path, found: Found) -> None:
    """They write the same bytes, so one that goes on from that of one process does so from all of them."""
    alone, here = look(ALONE, directory, found), look(layout, directory, found)
    assert isinstance(here[SAVED], list)
    assert checkpoint_bytes(directory / layout) == checkpoint_bytes(directory / ALONE)
    copy = directory / f"{ALONE} under {layout}"
    copy_checkpoint(directory / ALONE / "-".join(SAVED), copy)
    for rest in each(layout, go_on, copy):
        assert rest == alone[SAVED][CHECKPOINT:]


def checkpoint_bytes(directory: Path) -> dict[str, bytes]:
    folder = RunPaths(directory / "-".join(SAVED)).checkpoint(CHECKPOINT)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_table_in_the_docs_says_what_was_found(directory: Path, found: Found) -> None:
    all_found = {layout: look(layout, directory, found) for layout in LAYOUTS}
    assert TABLE.read_text() == table(all_found), "docs/layouts.md is out of date: make layouts"
