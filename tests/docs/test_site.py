"""The documentation site builds without a warning, and what is generated is up to date."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import evenstep
from tests.docs.command_line import PAGE, page

ROOT = Path(__file__).parent.parent.parent


def test_the_command_lines_page_is_what_help_prints() -> None:
    assert PAGE.read_text() == page(), "write it anew: make help-page"


def test_every_page_is_in_the_contents() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    assert listed == {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "site" / "api.html").read_text()
    assert "Run.predict" in reference
    missing = [name for name in evenstep.__all__ if name != "__version__" and f'id="evenstep.{name}"' not in reference]
    assert not missing
