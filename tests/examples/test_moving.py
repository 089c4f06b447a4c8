"""docs/moving.md: the diff that it shows is that of two scripts, which run; one and two processes, one fingerprint."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import runpy
from collections.abc import Iterable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import accelerate
import pytest
import sklearn.datasets  # noqa: F401  # it sets environment variables, once
import torch.utils.tensorboard  # noqa: F401  # once, before the forks
import transformers

from evenstep.cli.run import run as command
from evenstep.record.paths import RunPaths
from evenstep.train.run import Run
from evenstep.train.start import start
from evenstep.train.step import Step
from evenstep.train.steps import Steps
from tests.ranks import run_ranks

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "moving.md").read_text()
BEFORE, AFTER = DOCS / "moving" / "before.py", DOCS / "moving" / "after.py"
NEWCOMER = 12  # lines at most, of a script of about sixty


def test_the_page_shows_what_changes_and_it_is_little() -> None:
    before, after = BEFORE.read_text().splitlines(), AFTER.read_text().splitlines()
    diff = list(difflib.unified_diff(before, after, BEFORE.name, AFTER.name, lineterm="", n=2))
    (shown,) = re.findall(r"```diff\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown.splitlines() == diff
    new = [line for line in diff[2:] if line.startswith("+")]
    gone = [line for line in diff[2:] if line.startswith("-")]
    assert f"of {len(before)} lines" in PAGE
    assert f"{len(new)} lines are new or\nchanged, {len(gone)} go" in PAGE
    assert len(before) >= 60
    assert len(new) <= NEWCOMER
    for kept in ("evaluate", "CosineAnnealingLR", "add_scalar", "torch.save", "load_state_dict"):
        assert kept in BEFORE.read_text(), "the script has what a script has"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", PAGE)
    assert links
    assert [link for link in links if not (DOCS / link).exists()] == []
    examples = re.findall(r"`(examples/[\w./]+)`", PAGE)
    assert examples
    assert [name for name in examples if not (DOCS.parent / name).exists()] == []


def test_what_the_tables_name_is_there() -> None:
    """In evenstep, and in what people move from, as far as it is installed here."""
    code = re.findall(r"`([^`\n]+)`", PAGE)
    sections = dict(re.findall(r"^## From (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))

    def named(pattern: str, where: Iterable[str] = code) -> set[str]:
        return {name for text in where for name in re.findall(pattern, text)}

    attributes = {"rank", "device", "directory"}
    assert {name for name in named(r"\brun\.(\w+)") if not hasattr(Run, name)} == attributes
    assert {name for name in named(r"\bsteps\.(\w+)") if not hasattr(Steps, name)} == set()
    assert {name for name in named(r"\bstep\.(\w+)") if not hasattr(Step, name)} == {"number", "epoch", "ends_epoch"}
    calls = named(r"start\(([^)]*)\)")
    assert {n for call in calls for n in re.findall(r"(\w+)=", call)} <= inspect.signature(start).parameters.keys()
    options = {option for parameter in command.params for option in parameter.opts}
    assert named(r"(?<!\S)(--[a-z_-]+)") - options == {"--num_processes"}  # that is accelerate's
    assert {n for n in named(r"accelerator\.(\w+)") if not hasattr(accelerate.Accelerator, n)} == set()
    before = re.findall(r"^\| (.*?) \|", sections["the transformers Trainer"], re.MULTILINE)
    arguments = named(r"`(\w+)(?:=[^`]*)?`", [text.replace(", ", "`, `") for text in before])
    takers = (transformers.TrainingArguments, transformers.Trainer)
    known = {name for taker in takers for name in inspect.signature(taker).parameters}
    assert len(arguments) > 30
    assert {name for name in arguments - known if not hasattr(transformers, name)} == set()


def test_the_script_before_trains_and_goes_on(tmp_path: Path) -> None:
    def train() -> list[bool]:
        os.chdir(tmp_path)
        runs = [runpy.run_path(str(BEFORE)), runpy.run_path(str(BEFORE))]
        assert runs[1]["first"] == runs[1]["EPOCHS"]
        return ["accuracy" in names for names in runs]

    assert run_ranks(train, 1) == [[True, False]]


def test_the_script_after_is_the_same_on_two_processes_and_goes_on(tmp_path: Path) -> None:
    def train(directory: Path) -> str:
        os.environ["EVENSTEP_RUN"] = str(directory)
        names = runpy.run_path(str(AFTER))
        names["run"].close()
        assert names["accuracy"] > 0.9
        found: str = json.loads(RunPaths(directory).finished.read_text())["fingerprint"]
        return found

    def cut() -> None:
        os.environ["EVENSTEP_STOP_AFTER"] = "50"
        with pytest.raises(SystemExit):
            train(tmp_path / "two")

    (alone,) = run_ranks(train, 1, tmp_path / "one")
    run_ranks(cut, 2)
    assert run_ranks(train, 2, tmp_path / "two") == [alone, alone]
