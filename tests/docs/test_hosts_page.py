"""What docs/hosts.md and docs/trouble.md show is what is there: the script, the commands, the words of the messages.

The README's commands too."""

from __future__ import annotations

import ast
import copy
import re
import shlex
from functools import cache
from pathlib import Path

import click
import pytest

import evenstep.train.start  # noqa: F401  once, before the forks
from evenstep.cli.main import evenstep as command_line
from tests.docs.page import Page, play

ROOT = Path(__file__).parents[2]
README, HOSTS, TROUBLE = (Page(ROOT / name) for name in ("README.md", "docs/hosts.md", "docs/trouble.md"))
COMMANDS = [
    match[0]
    for line in HOSTS.commands
    + re.findall(r"^ {4}(evenstep .+?)(?:  #|$)", README.prose, re.MULTILINE)
    + re.findall(r"`(evenstep (?:run|doctor) [^`]+)`", HOSTS.prose + TROUBLE.prose)
    if (match := re.search(r"evenstep (run|doctor|prove) .*", line)) and "..." not in line
]
OF_OTHERS = ("[W", "error: ", "srun: ")  # torch's, kubectl's and srun's own lines
FEWEST = 5  # letters of a message that are always the same
MARK = "^(evenstep: |  what to do: )"
ANYTHING = "\0"


def messages() -> list[str]:
    """Every line that is shown as printed by evenstep, without what marks it."""
    lines = [
        line
        for page in (HOSTS, TROUBLE)
        for block in page.blocks
        if block.language == "text"
        for line in block.text.splitlines()
        if line.startswith(("evenstep: ", "  what to do: ")) or page is TROUBLE
    ]
    plain = [re.sub(MARK, "", line) for line in lines if not line.startswith(OF_OTHERS)]
    return list(dict.fromkeys(line for line in plain if line != "..."))


@cache
def templates() -> list[re.Pattern[str]]:
    """Every line of text in the source, as a pattern: what is put in at run time may be anything."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for line in text_of(node).splitlines():
                plain = re.sub(MARK, "", line)
                if len(re.findall("[a-z]", plain)) >= FEWEST:
                    found.add(re.escape(plain).replace(ANYTHING, ".*"))
    return [re.compile(pattern) for pattern in found]


def text_of(node: ast.AST) -> str:
    """What an expression says, with a mark for each part that is known at run time only."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ANYTHING


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_one_that_evenstep_takes(command: str) -> None:
    _, verb, *words = shlex.split(command if ".py" in command else f"{command} train.py")
    with click.Context(command_line) as outer:
        taken = command_line.get_command(outer, verb)
        assert taken is not None
        copy.copy(taken).make_context(verb, words, parent=outer, obj=words)  # it keeps what it has made for --help


def test_each_message_has_the_words_of_the_source() -> None:
    unknown = [message for message in messages() if not is_said(message)]
    assert not unknown
    assert len(messages()) >= 80
    assert len(COMMANDS) >= 15


def is_said(message: str) -> bool:
    """Whether the source has such a text; a line may be put together from two: `{host} -> {host}: {what}`."""
    starts = [message, *(message[at.end() :] for at in re.finditer(": ", message))]
    return any(pattern.fullmatch(start) for pattern in templates() for start in starts[:2])


def test_other_words_are_noticed() -> None:
    for said in ("waits at 10.77.0.11:1234 for node 1 of 2", "two hosts have --node-rank 1: host2 and host3"):
        assert not is_said(said)


def test_the_script_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HOSTS.scripts["train.py"])
    printed = play(tmp_path, "train.py").splitlines()
    shown = HOSTS.printed("python train.py").splitlines()
    assert [line for line in printed if line.startswith("epoch")] == [
        line for line in shown if line.startswith("epoch")
    ]
    assert re.fullmatch("fingerprint: [0-9a-f]{16}", shown[-1])
    assert re.fullmatch("fingerprint: [0-9a-f]{16}", printed[-1])
    assert set(re.findall("fingerprint: 09.*", HOSTS.text)) == {shown[-1]}  # each way ends with the same
