"""The exit codes of every verb, in one place (docs/design.md, section 6)."""

from __future__ import annotations

DONE = 0
SCRIPT_FAILED = 1  # the user's script failed, with whatever code of its own
WRONG_USAGE = 2
FOUND = 3  # `check` or `prove` found something
MACHINE_FAILED = 4  # hosts, network or disk


def by_signal(number: int) -> int:
    """What a shell reports for a command that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number
