"""The command line's help as a page. `python -m tests.docs.command_line` writes it."""

from __future__ import annotations

from pathlib import Path

import click

from evenstep.cli.main import evenstep

PAGE = Path(__file__).parent.parent.parent / "docs" / "command-line.md"
_WIDTH = 100  # columns


def page() -> str:
    """What each verb's `--help` prints."""
    parts = ["# Command line", "Written by `make help-page` from `--help`; do not edit."]
    for name, command in {"": evenstep, **evenstep.commands}.items():
        if not command.hidden:
            words = f"evenstep {name}".strip()
            parts += [f"## {words}", f"```text\n{_help(command, words)}\n```"]
    return "\n\n".join(parts) + "\n"


def _help(command: click.Command, words: str) -> str:
    with click.Context(command, info_name=words, terminal_width=_WIDTH, max_content_width=_WIDTH) as context:
        return command.get_help(context)


if __name__ == "__main__":
    PAGE.write_text(page())
