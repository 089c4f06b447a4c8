"""The fenced blocks of a page of the docs, and how they are played."""

from __future__ import annotations

import atexit
import io
import os
import re
import runpy
import sys
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import run_ranks

ALONE = dict.fromkeys(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])


@dataclass(frozen=True)
class Block:
    """One fence: its language, the file's name if it has one, what is in it."""

    language: str
    title: str
    text: str

    @property
    def code(self) -> list[str]:
        """What it says, without comments and blank lines."""
        if self.language == "python":
            tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
            return [t.string for t in tokens if t.type not in (tokenize.COMMENT, tokenize.NL)]
        if self.language == "sh":
            return [line.split("  #")[0] for line in self.text.splitlines() if not line.startswith("#")]
        return self.text.splitlines()


class Page:
    """A page: its blocks, in order."""

    def __init__(self, path: Path) -> None:
        self.text, self.folder = path.read_text(), path.parent
        found = re.findall(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', self.text, re.MULTILINE | re.DOTALL)
        self.blocks = [Block(*parts) for parts in found]

    @property
    def prose(self) -> str:
        """All but the fences."""
        return re.sub(r"^```.*?^```$", "", self.text, flags=re.MULTILINE | re.DOTALL)

    @property
    def scripts(self) -> dict[str, str]:
        """The files that the page shows."""
        return {block.title: block.text for block in self.blocks if block.language == "python"}

    @property
    def commands(self) -> list[str]:
        """The lines of its shell blocks."""
        return [line for block in self.blocks if block.language == "sh" for line in block.code]

    def printed(self, of: str) -> str:
        """What the page says that a script, or the shell block with a line, prints."""
        at = next(i for i, block in enumerate(self.blocks) if block.title == of or of in block.code)
        after = self.blocks[at + 1]
        assert after.language == "text", f"no output is shown for {of}"
        return after.text


def shows(pattern: str, output: str) -> bool:
    """Whether all lines of `pattern` are in `output`, one after another; `...` stands for anything."""
    lines = [re.escape(line).replace(re.escape("..."), ".*") for line in pattern.splitlines()]
    return re.search("^.*" + r"\n(?:.*\n)*?.*".join(lines), output, re.MULTILINE) is not None


def play(folder: Path, script: str, ranks: int = 1, timeout: float = 60.0) -> str:
    """The script of `folder` in so many processes (1: as plain python does); what rank 0 printed, then rank 1, ..."""
    env: Mapping[str, str | None] = ALONE if ranks == 1 else {}
    return "".join(run_ranks(_play, ranks, folder, script, timeout=timeout, env=env))


def _play(folder: Path, script: str) -> str:
    atexit._clear()  # pytest's; what the script registers runs below
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = [script]
    sys.stdout = printed = io.StringIO()
    try:
        runpy.run_path(script, run_name="__main__")
        atexit._run_exitfuncs()
    finally:
        sys.stdout = sys.__stdout__
        print(printed.getvalue())
    return printed.getvalue()
