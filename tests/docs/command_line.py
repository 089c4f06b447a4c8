"""The command line's help as a page. `python -m tests.docs.command_line` writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from evenstep.cli.main import evenstep

PAGE = Path(__file__).parent.parent.parent / "docs" / "command-line.md"


def page() -> str:
    """What each verb's `--help` prints."""
    verbs = [[], *([verb] for verb in evenstep.list_commands(click.Context(evenstep)))]
    parts = ["# Command line", "Written by `make help-page` from `--help`; do not edit."]
    for words in verbs:
        parts += [f"## {' '.join(['evenstep', *words])}", f"```text\n{_help(words)}```"]
    return "\n\n".join(parts) + "\n"


def _help(words: list[str]) -> str:
    # In a process of its own: a click command keeps what it has made for --help under another context.
    command = [sys.executable, "-m", "evenstep", *words, "--help"]
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


if __name__ == "__main__":
    PAGE.write_text(page())
