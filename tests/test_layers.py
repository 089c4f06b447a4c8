"""What import-linter cannot see: what is imported when, and the names that are public."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import evenstep

PACKAGE = Path(evenstep.__file__).parent


@pytest.mark.parametrize(
    "module", ["evenstep", "evenstep.cli.main", "evenstep.launch", "evenstep.record", "evenstep.plan"]
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_public_names() -> None:
    assert sorted(evenstep.__all__) == evenstep.__all__
    for name in evenstep.__all__:
        assert getattr(evenstep, name) is not None
    assert dir(evenstep) == evenstep.__all__
    with pytest.raises(AttributeError, match="no attribute 'begin'"):
        _ = evenstep.begin


def test_no_folder_or_file_has_a_name_that_says_nothing() -> None:
    names = {path.stem for path in PACKAGE.rglob("*") if path.suffix in {"", ".py"}}
    assert not names & {"core", "common", "utils", "helpers", "util", "helper", "misc"}


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
