"""What docs/guide.md shows runs as it stands there, and fails where it says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import evenstep.train.start  # once, before the forks
from tests.docs.page import Page, play, shows
from tests.hosts import Command, Hosts, hosts, needs_hosts
from tests.launch.launching import PATIENCE, clean_environ
from tests.ranks import RanksFailed

ROOT = Path(__file__).parents[2]
ENGLISH = Page(ROOT / "docs" / "guide.md")

# What tests without GPUs say in place of what the page says. It is told at its beginning.
ON_THE_CPU = {'"cuda': '"cpu', '"nccl"': '"gloo"', "    torch.cuda.set_device(device)\n": ""}
TWO_PROCESSES = {"--processes 4": "--processes 2", "--nproc-per-node=4": "--nproc-per-node=2"}
ONE_PROCESS = {"--processes 4": "--processes 1", "--nproc-per-node=4": "--nproc-per-node=1"}

PARTS = ["parts.py", "connect.py"]  # imported by the others
RUN_ALONE = [
    "train.py", "split_model.py", "split_by_name.py", "accumulate.py", "mean_of_means.py", "no_zero_grad.py",
    "data_parallel.py", "no_set_epoch.py", "padding.py",
]  # fmt: skip
RUN_BY_TWO = ["ddp.py", "collectives.py", "reduced_loss.py", "sum_as_mean.py", "local_statistics.py"]
RUN_BY_TWO += ["even_collectives.py", "train_sync.py"]
NOTHING_SHOWN = ["split_model.py", "split_by_name.py", "data_parallel.py", "train_sync.py"]
FAIL = {"prefix.py": 1, "even_reduce_on_rank_0.py": 2, "sync_batchnorm.py": 2}  # in so many processes
HANG = ["reduce_on_rank_0.py"]
BY_COMMAND = ["local_rank.py"]

SAME_MODEL = [command for command in ENGLISH.commands if re.fullmatch(r"evenstep run (?!--nodes).* train.py", command)]
LOCAL_RANK = [command for command in ENGLISH.commands if command.endswith("local_rank.py")]
DDP = ["torchrun --standalone --nproc-per-node=4 ddp.py", "evenstep run --processes 4 ddp.py"]
TWO_NODES = [command for command in ENGLISH.commands if "192.168.1.1" in command]


def replaced(text: str, by: dict[str, str]) -> str:
    for old, new in by.items():
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of the page."""
    made = tmp_path_factory.mktemp("guide")
    for name, text in ENGLISH.scripts.items():
        (made / name).write_text(replaced(text, ON_THE_CPU))
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> str:
    """What `python train.py` prints."""
    return play(folder, "train.py")


def words(command: str, by: dict[str, str]) -> list[str]:
    program, *rest = replaced(command, by).split()
    return [sys.executable if program == "python" else str(Path(sys.executable).parent / program), *rest]


def command(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(line, TWO_PROCESSES),
        cwd=folder, env=clean_environ(), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE,
    )  # fmt: skip


def test_every_block_is_run() -> None:
    played = [*PARTS, *RUN_ALONE, *RUN_BY_TWO, *FAIL, *HANG, *BY_COMMAND]
    assert sorted(played) == sorted(ENGLISH.scripts)
    run = ["python train.py", *SAME_MODEL, *LOCAL_RANK, *DDP, *TWO_NODES]
    assert sorted(run) == sorted(ENGLISH.commands)
    assert {block.language for block in ENGLISH.blocks} == {"python", "sh", "text"}


@pytest.mark.parametrize("script", RUN_ALONE)
def test_alone(folder: Path, alone: str, script: str) -> None:
    printed = alone if script == "train.py" else play(folder, script)
    if script not in NOTHING_SHOWN:
        shown = ENGLISH.printed("python train.py" if script == "train.py" else script)
        assert shows(shown, printed), printed


@pytest.mark.parametrize("script", RUN_BY_TWO)
def test_by_two_processes(folder: Path, script: str) -> None:
    printed = play(folder, script, 2)
    assert script in NOTHING_SHOWN or shows(ENGLISH.printed(script), printed), printed


@pytest.mark.parametrize("script", FAIL)
def test_a_mistake_that_ends_in_an_error(folder: Path, script: str) -> None:
    with pytest.raises((RuntimeError, ValueError, evenstep.EvenstepError)) as caught:
        play(folder, script, FAIL[script])
    assert shows(ENGLISH.printed(script), f"{caught.type.__name__}: {caught.value}"), caught.value


@pytest.mark.parametrize("script", HANG)
def test_a_mistake_that_hangs(folder: Path, script: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        play(folder, script, 2, timeout=6.0)
    assert caught.value.ranks == [0, 1]
    first, second = re.findall(rf'"{script}", line (\d+)', str(caught.value))
    lines = (folder / script).read_text().splitlines()
    assert "dist.reduce(" in lines[int(first) - 1]
    assert "model(" in lines[int(second) - 1]


@pytest.mark.slow
@pytest.mark.parametrize("line", SAME_MODEL)
def test_one_fingerprint(folder: Path, alone: str, line: str) -> None:
    done = command(folder, line)
    assert (done.returncode, done.stdout) == (0, alone), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", DDP)
def test_plain_ddp(folder: Path, line: str) -> None:
    done = command(folder, line)
    assert done.returncode == 0, done.stderr
    assert shows(ENGLISH.printed("ddp.py"), done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("line", LOCAL_RANK)
def test_the_argument_of_older_articles(folder: Path, line: str) -> None:
    done = command(folder, line)
    assert done.returncode == (0 if line.startswith("torchrun") else 1)
    assert shows(ENGLISH.printed(line), done.stdout + done.stderr), done.stderr


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    """Two hosts with the page's addresses."""
    needs_hosts()
    with hosts(2) as made:
        for host in (1, 2):
            add = ["ip", "-n", made.namespace(host), "addr", "add", f"192.168.1.{host}/24", "dev", "eth0"]
            subprocess.run(add, check=True)
        yield made


def on_nodes(two: Hosts, folder: Path, lines: list[str]) -> list[Command]:
    """The commands, by the number of their node."""
    env = {"EVENSTEP_TOKEN": "a secret", "PATH": os.environ["PATH"]}
    return [two.start(node + 1, *words(line, ONE_PROCESS), folder=folder, env=env) for node, line in enumerate(lines)]


def pair(start: str) -> list[str]:
    return [line for line in TWO_NODES if line.startswith(start)]


@pytest.mark.slow
def test_two_nodes(two: Hosts, folder: Path, alone: str) -> None:
    first, second = (node.wait() for node in on_nodes(two, folder, pair("evenstep run --nodes 2")))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.out == alone


@pytest.mark.slow
def test_two_nodes_by_torchrun(two: Hosts, folder: Path) -> None:
    first, second = (node.wait() for node in on_nodes(two, folder, pair("torchrun --nnodes=2")))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert shows(ENGLISH.printed("ddp.py"), first.out)


@pytest.mark.slow
def test_one_node_said_on_both(two: Hosts, folder: Path) -> None:
    wrong = pair("torchrun --nnodes=1")
    first, second = (node.wait() for node in on_nodes(two, folder, wrong))
    alone, reason = ENGLISH.printed(wrong[0]).splitlines()
    assert first.code == 0
    assert shows(alone, first.out)
    assert second.code == 1
    assert shows(reason, second.err)


def test_one_node_said_to_evenstep(folder: Path) -> None:
    (wrong,) = pair("evenstep run --nodes 1")
    done = command(folder, wrong)
    assert done.returncode == 2
    assert shows(ENGLISH.printed(wrong), done.stderr), done.stderr
