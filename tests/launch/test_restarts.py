"""`--restarts`: a run that fails is started again by itself, and ends as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstep.record.events import read_events
from tests.hosts import Command, Hosts, hosts, needs_hosts
from tests.launch.launching import command, evenstep, eventually, training, write_script
from tests.ssh import needs_ssh, ssh_hosts

SCRIPT = training(
    epochs="4",
    begins="""
    kills = os.environ.get("KILLS", "").split(",")  # in which step, by start
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    """,
    computed="""
    if start < len(kills) and kills[start] == str(step.number + 1) and run.rank == run.world_size - 1:
        os.kill(os.getpid(), 9)
    """,
    stepped='time.sleep(float(os.environ.get("PYTHONPAUSE", "0")))',
)


def fingerprint(out: str) -> str:
    last = out.splitlines()[-1]
    assert last.startswith("fingerprint: ")
    return last


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run that nothing happens to ends with."""
    folder = tmp_path_factory.mktemp("whole")
    write_script(folder, SCRIPT)
    return fingerprint(evenstep(folder, "run", "script.py").out)


def test_it_ends_as_if_nothing_had_been(tmp_path: Path, whole: str) -> None:
    write_script(tmp_path, SCRIPT)
    words = ("run", "--processes", 2, "--restarts", 2)
    killed = evenstep(tmp_path, *words, "--run", "killed", "script.py", env={"KILLS": "2,8"})
    assert killed.code == 0, killed
    assert fingerprint(killed.out) == whole
    assert "rank 1 was killed by SIGKILL" in killed.err
    assert "rank 1 was in step 2, in the script's own code" in killed.err
    assert "starting again (1 of 2), from the beginning (there is no checkpoint), with 2 processes" in killed.err
    assert f"starting again (2 of 2), from step 6 ({tmp_path}/killed/checkpoints/step-0000000006)" in killed.err


def test_it_gives_up_where_it_failed_before(tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    result = evenstep(tmp_path, "run", "--restarts", 5, "--run", "r", "script.py", env={"KILLS": "5,5,9"})
    assert result.code == 1
    assert "it failed in step 5 as it did before: not started again" in result.err
    assert f"the last checkpoint: {Path('r/checkpoints/step-0000000003')}" in result.err
    assert "to go on from step 3: evenstep run --restarts 5 --run r script.py" in result.err
    assert sum(event["kind"] == "launch" for event in read_events(tmp_path / "r" / "events" / "launcher.jsonl")) == 2


def test_wrong_usage_is_not_tried_again(tmp_path: Path) -> None:
    write_script(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n")
    result = evenstep(tmp_path, "run", "--restarts", 3, "script.py", "--nonsense")
    assert "starting again" not in result.err
    write_script(tmp_path, "import evenstep\nevenstep.start(global_batch=0)\n")
    result = evenstep(tmp_path, "run", "--restarts", 3, "script.py")
    assert (result.code, "starting again" in result.err) == (2, False), result


def test_a_plain_script_is_told_as_by_torchrun(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import os, sys
        print(os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
        sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "2" else 5)
        """,
    )
    result = evenstep(tmp_path, "run", "--max-restarts", 3, "script.py")
    assert (result.code, result.out) == (0, "0 3\n1 3\n2 3\n"), result
    result = evenstep(tmp_path, "run", "--restarts", 1, "script.py")
    assert (result.code, result.out) == (1, "0 1\n1 1\n"), result
    assert "it was started again once, as --restarts allows: no more" in result.err


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    needs_hosts()
    with hosts(2) as made:
        yield made


def start(made: Hosts, folder: Path, node: int, nodes: object, restarts: int) -> Command:
    return made.start(
        node + 1, *command("run"), "--nodes", nodes, "--node-rank", node, "--master-addr", made.address(1),
        "--master-port", 1234, "--restarts", restarts, "--run", f"run{node}", "script.py", folder=folder,
        env={"EVENSTEP_TOKEN": "a secret", "PYTHONPAUSE": "0.2"},
    )  # fmt: skip


def launches(folder: Path, node: int) -> int:
    """How often processes were started on a node."""
    path = folder / f"run{node}" / "events" / ("launcher.jsonl" if node == 0 else f"launcher-{node}.jsonl")
    return sum(event["kind"] == "started" for event in read_events(path)) if path.exists() else 0


def steps_since_start(folder: Path) -> int:
    """Steps that rank 0 has done since it was last started."""
    path = folder / "run0" / "events" / "rank-0.jsonl"
    kinds = [event["kind"] for event in read_events(path)] if path.exists() else []
    return kinds[::-1][: kinds[::-1].index("prepare")].count("step") if "prepare" in kinds else 0


def kill_launcher(made: Hosts, host: int) -> None:
    os.kill(made.find(host, "evenstep run", "--node-rank")[-1], signal.SIGKILL)


@pytest.mark.slow
def test_two_nodes_by_hand(two: Hosts, tmp_path: Path, whole: str) -> None:
    """A process, the launcher of node 1 and that of node 0 are killed; who is killed is started again by somebody."""
    write_script(tmp_path, SCRIPT)
    first, second = (start(two, tmp_path, node, 2, 5) for node in (0, 1))
    assert eventually(lambda: launches(tmp_path, 1) == 1 and steps_since_start(tmp_path) > 3)
    os.kill(two.find(2, "python script.py")[0], signal.SIGKILL)
    assert eventually(lambda: launches(tmp_path, 1) == 2 and steps_since_start(tmp_path) > 3)
    kill_launcher(two, 2)
    lost = second.wait()
    assert lost.code != 0
    second = start(two, tmp_path, 1, 2, 5)
    assert eventually(lambda: launches(tmp_path, 1) == 3 and steps_since_start(tmp_path) > 3)
    kill_launcher(two, 1)
    gone = first.wait()
    first = start(two, tmp_path, 0, 2, 5)
    done, other = first.wait(), second.wait()
    assert (done.code, other.code) == (0, 0), (gone, done, other)
    assert fingerprint(done.out) == whole
    assert re.search(r"starting again \(1 of 5\), from step \d", gone.err), gone
    assert "again on 2 hosts with 2 processes: host1 (1), host2 (1)" in gone.err
    assert "host2 (node 1): its launcher has ended" in gone.err
    assert re.search(r"starting again \(1 of 5\), from step \d", lost.err), lost
    assert "its launcher has ended" in other.err
    assert "waiting for node 0 to come back" in other.err
    assert two.pids(1) == two.pids(2) == []


@pytest.mark.slow
def test_it_goes_on_with_the_hosts_that_are_left(two: Hosts, tmp_path: Path, whole: str) -> None:
    write_script(tmp_path, SCRIPT)
    first, second = (start(two, tmp_path, node, "1:2", 1) for node in (0, 1))
    try:
        assert eventually(lambda: launches(tmp_path, 1) == 1 and steps_since_start(tmp_path) > 3)
        two.power_off(2)
        done = first.wait()
        second.wait()
    finally:
        two.join(2)
    assert done.code == 0, done
    assert fingerprint(done.out) == whole
    assert "host2 (node 1): nothing was heard from it for 4." in done.err
    assert "rank 1 was in step" in done.err
    assert "going on without node 1 of 2: 1 are enough" in done.err
    assert "again on 1 host with 1 process: host1 (1)" in done.err


@pytest.mark.slow
def test_hosts_by_ssh(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, whole: str) -> None:
    """A process is killed, then a host loses its power; the rest is done by the one that is left."""
    needs_ssh()
    write_script(tmp_path, SCRIPT)
    with ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as three:
        words = ("--hosts", "host2,host3", "--min-hosts", 1, "--restarts", 3, "--run", "run0", "script.py")
        launch = three.start("run", *words, folder=tmp_path, env={"PYTHONPAUSE": "0.2"})
        assert eventually(lambda: steps_since_start(tmp_path) > 3)
        os.kill(three.made.find(3, "python script.py")[0], signal.SIGKILL)
        assert eventually(lambda: launches(tmp_path, 0) == 2 and steps_since_start(tmp_path) > 3)
        three.made.power_off(3)
        done = launch.wait()
        assert done.code == 0, done
        assert fingerprint(done.out) == whole
        assert "host3 (node 1): rank 1 was killed by SIGKILL" in done.err
        assert re.search(r"starting again \(1 of 3\), from step \d", done.err), done
        assert "again on 2 hosts with 2 processes: host2 (1), host3 (1)" in done.err
        assert "host3 (node 1): nothing was heard from it for 4." in done.err
        assert "going on without host3" in done.err
        assert "again on 1 host with 1 process: host2 (1)" in done.err
        assert not three.made.find(2, "script.py")
