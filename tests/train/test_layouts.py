"""The promise as a table: layouts × models × precisions, and a checkpoint of each layout under each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.layouts import (
    ALONE,
    CELLS,
    CHECKPOINT,
    LAYOUTS,
    MISSING,
    STEPS,
    TABLE,
    Outcome,
    copy_checkpoint,
    each,
    go_on,
    outcomes,
    table,
)

# (layout, training): what is not offered, and words of the error that says so.
REFUSED: dict[tuple[str, str], str] = {
    # Its branch is added to what goes around it, and the second cut lies between.
    ("3 stages", "encoder"): "an argument of second depends on the output of first, which lies on another stage",
}

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


def missing(outcome: dict[tuple[str, str], Outcome]) -> bool:
    return any(isinstance(seen, str) and seen.endswith(MISSING) for seen in outcome.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_that_of_one_process(layout: str, directory: Path, found: Found) -> None:
    alone, here = look(ALONE, directory, found), look(layout, directory, found)
    if missing(here):
        pytest.skip(f"{layout} {MISSING}")
    assert len({print_ for seen in alone.values() for print_ in seen}) == len(CELLS) * STEPS, "every step counts"
    for training, precision in CELLS:
        seen, reason = here[training, precision], REFUSED.get((layout, training))
        if reason is None:
            assert seen == alone[training, precision], f"{training} in {precision}"
        else:
            assert isinstance(seen, str)
            assert reason in seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_goes_on_from_a_checkpoint_of_every_other_layout(layout: str, directory: Path, found: Found) -> None:
    all_found = {source: look(source, directory, found) for source in LAYOUTS}
    if missing(all_found[layout]):
        pytest.skip(f"{layout} {MISSING}")
    sources = [source for source in LAYOUTS if isinstance(all_found[source]["gpt", "fp32"], list)]
    copies = [directory / f"{source} under {layout}" for source in sources]
    for source, copy in zip(sources, copies, strict=True):
        copy_checkpoint(directory / source / "gpt-fp32", copy)
    expected = all_found[ALONE]["gpt", "fp32"][CHECKPOINT:]
    for rank, ends in enumerate(each(layout, go_on, copies)):
        assert dict(zip(sources, ends, strict=True)) == dict.fromkeys(sources, expected), f"rank {rank}"


def test_the_table_in_the_docs_says_what_was_found(directory: Path, found: Found) -> None:
    all_found = {layout: look(layout, directory, found) for layout in LAYOUTS}
    absent = [layout for layout in LAYOUTS if missing(all_found[layout])]
    if absent:
        pytest.skip(f"{', '.join(absent)} {MISSING}")
    assert TABLE.read_text() == table(all_found), "docs/layouts.md is out of date: make layouts"
