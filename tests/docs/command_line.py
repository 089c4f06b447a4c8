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
    verbs = evenstep.list_commands(click.Context(evenstep))
    for words, command in [("evenstep", evenstep), *((f"evenstep {verb}", _command(verb)) for verb in verbs)]:
        parts += [f"## {words}", f"```text\n{_help(command, words)}\n```"]
    return "\n\n".join(parts) + "\n"


def _command(verb: str) -> click.Command:
    command = evenstep.get_command(click.Context(evenstep), verb)
    assert command is not None
    return command


def _help(command: click.Command, words: str) -> str:
    top = command.make_context("evenstep", [], resilient_parsing=True) if command is evenstep else None
    context = top or click.Context(command, info_name=words, help_option_names=["-h", "--help"])
    context.terminal_width = context.max_content_width = _WIDTH
    return command.get_help(context)


if __name__ == "__main__":
    PAGE.write_text(page())
