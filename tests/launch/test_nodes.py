"""Several hosts, started by hand: they begin together, end together, and say why."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from evenstep.record.activity import SCRIPT as SCRIPTS_OWN
from evenstep.record.activity import Doing, read_activity
from evenstep.record.events import read_events
from evenstep.record.paths import RunPaths
from evenstep.record.uncaught import error_path, read_uncaught
from tests.hosts import Command, Hosts, hosts, needs_hosts
from tests.launch.launching import Result, command, evenstep, eventually, installed_package, training, write_script

pytestmark = pytest.mark.slow

SCRIPT = training()


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    needs_hosts()
    with hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of one process that trains for two epochs."""
    folder = tmp_path_factory.mktemp("alone")
    write_script(folder, SCRIPT)
    return evenstep(folder, "run", "script.py", 2, 0).out.splitlines()[-1]


def start(
    made: Hosts, folder: Path, node: int, *words: object, count: int = 2, processes: int = 1, token: str = "a secret",
    env: Mapping[str, str] | None = None,
) -> Command:  # fmt: skip
    return made.start(
        node + 1, *command("run"), "--nodes", count, "--node-rank", node, "--master-addr", made.address(1),
        "--master-port", 1234, "--processes", processes, *words, folder=folder,
        env={"EVENSTEP_TOKEN": token, **(env or {})},
    )  # fmt: skip


def steps_done(folder: Path) -> int:
    path = folder / "run0" / "events" / "rank-0.jsonl"
    return sum(event["kind"] == "step" for event in read_events(path)) if path.exists() else 0


def test_the_fingerprint_of_one_process(two: Hosts, tmp_path: Path, alone: str) -> None:
    write_script(tmp_path, SCRIPT)
    # The later node first: the order does not matter. The nodes have different numbers of processes.
    second = start(two, tmp_path, 1, "--run", "run1", "script.py", 2, 0, processes=2)
    first = start(two, tmp_path, 0, "--run", "run0", "script.py", 2, 0)
    done, other = first.wait(), second.wait()
    assert (done.code, other.code) == (0, 0), (done, other)
    assert "3 processes" in done.err
    assert done.out.splitlines()[-1] == alone
    assert "fingerprint" in done.out
    assert {path.name for path in (tmp_path / "run1" / "logs").iterdir()} == {"rank-1.log", "rank-2.log"}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (["--nodes", 2, "--node-rank", 0], ["--nodes", 2, "--node-rank", 0], "two nodes have --node-rank 0"),
        (["--nodes", 2, "--node-rank", 0], ["--nodes", 3, "--node-rank", 1], "with --nodes 3"),
        (["--nodes", 1, "--node-rank", 0], ["--nodes", 1, "--node-rank", 1], "--nodes is 1"),
    ],
)
def test_a_mistake_is_named_on_every_node(
    two: Hosts, tmp_path: Path, first: list[object], second: list[object], said: str
) -> None:
    write_script(tmp_path, SCRIPT)
    commands = [
        two.start(
            node + 1, *command("run"), *options, "--master-addr", two.address(1), "--master-port", 1234,
            "--run", f"run{node}", "script.py", 50, 0.05, folder=tmp_path, env={"EVENSTEP_TOKEN": "a secret"},
        )
        for node, options in enumerate((first, second))
    ]  # fmt: skip
    results = [one.wait() for one in commands]
    if second[-1] == 0:  # it cannot listen at the other host's address
        assert "10.77.0.11 is not an address of this host" in results.pop().err
    for result in results:
        assert result.code == 2, result
        assert said in result.err


@pytest.mark.parametrize(
    ("node", "options", "said"),
    [
        (0, ["nope.py"], "there is no script nope.py"),
        (0, ["--run", "/proc/no", "script.py"], "cannot make the run directory /proc/no"),
        (1, ["--processes", "gpu", "script.py"], "torch sees no GPU here"),
    ],
)
def test_what_keeps_one_node_from_listening_or_calling_is_told_to_the_other(
    two: Hosts, tmp_path: Path, node: int, options: list[object], said: str
) -> None:
    write_script(tmp_path, "")
    commands = [start(two, tmp_path, k, *(options if k == node else ["script.py"])) for k in (1, 0)]
    other, own = (one.wait() for one in (commands if node == 0 else commands[::-1]))
    assert (own.code, f"evenstep: {said}" in own.err or said in own.err) == (2, True), own
    assert (other.code, f"evenstep: host{node + 1} (node {node}): " in other.err, said in other.err) == (
        2,
        True,
        True,
    ), other
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("host", [1, 2])
def test_a_full_disk_is_named_on_every_node(two: Hosts, tmp_path: Path, host: int) -> None:
    write_script(tmp_path, SCRIPT)
    full = f"mkdir full && mount -t tmpfs -o size=4k tmpfs full && ! cat /dev/zero > full/x 2> {os.devnull} && "
    commands = []
    for node in (0, 1):
        words = ["unshare", "-m", "sh", "-c", (full if node + 1 == host else "") + 'exec "$@"', "sh", *command("run")]
        words += ["--nodes", "2", "--node-rank", str(node), "--master-addr", two.address(1), "--master-port", "1234"]
        words += ["--run", "full" if node + 1 == host else "run", "script.py", "1", "0"]
        commands.append(two.start(node + 1, *words, folder=tmp_path, env={"EVENSTEP_TOKEN": "a secret"}))
    results = [one.wait() for one in commands]
    for node, result in enumerate(results):
        said = f"cannot write into the run directory {tmp_path}/full: No space left on device"
        prefix = "" if node + 1 == host else f"the run failed on host{host} (node {host - 1}): "
        assert (result.code, f"evenstep: {prefix}{said}" in result.err) == (4, True), result


@contextmanager
def firewall(made: Hosts, host: int, how: str) -> Iterator[Callable[[], None]]:
    """It lets only the master port through; gives what opens it."""
    if shutil.which("nft") is None:
        pytest.skip("there is no nft (apt install nftables)")
    nft = ["ip", "netns", "exec", made.namespace(host), "nft"]
    subprocess.run([*nft, "-f", "-"], input=FIREWALL.replace("drop", how), text=True, check=True)
    with ExitStack() as stack:
        stack.callback(subprocess.run, [*nft, "delete", "table", "ip", "closed"], check=True)
        yield stack.close


@pytest.mark.parametrize("closed", [1, 2])
def test_a_firewall_that_lets_only_the_master_port_through(two: Hosts, tmp_path: Path, closed: int) -> None:
    write_script(tmp_path, "")
    with firewall(two, closed, "reject with tcp reset"):
        commands = [start(two, tmp_path, node, "--restarts", 3, "script.py") for node in (0, 1)]
        results = [one.wait() for one in commands]
    for result in results:
        assert result.code == 4, result
        way = rf"cannot connect to {two.address(closed)}:\d+, as its processes will: Connection refused"
        assert len(re.findall(way, result.err)) == 2, result  # the second time is the last
        assert "starting again (1 of 3), from the beginning" in result.err
    assert "it failed before the first step as it did before: not started again" in results[closed - 1].err


def test_a_network_that_is_well_again_at_the_next_start(two: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, "")
    with firewall(two, 1, "drop") as opens:
        words = ("--restarts", 1, "script.py")
        first, second = (start(two, tmp_path, node, *words) for node in (0, 1))
        said = ""
        assert second.popen.stderr is not None
        while "starting again (1 of 1), from the beginning" not in said and second.popen.poll() is None:
            said += second.popen.stderr.readline()
        opens()
        results = [first.wait(), second.wait()]
    assert re.search(rf"cannot connect to {two.address(1)}:\d+, as its processes will: timed out", said), said
    assert [result.code for result in results] == [0, 0], (said, results)


FIREWALL = """
table ip closed {
    chain input {
        type filter hook input priority 0
        iifname eth0 ct state established,related accept
        iifname eth0 tcp dport 1234 accept
        iifname eth0 meta l4proto tcp drop
    }
}
"""


def test_a_name_that_is_the_loopback_interface_at_home(two: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, "")
    names = Path(f"/etc/netns/{two.namespace(1)}/hosts")
    before = names.read_text()
    names.write_text("127.0.1.1 host1\n" + before)
    try:
        words = ["--nodes", 2, "--node-rank", 0, "--master-addr", "host1", "--master-port", 1234, "script.py"]
        result = two.start(1, *command("run"), *words, folder=tmp_path).wait()
    finally:
        names.write_text(before)
    assert result.code == 2
    assert "--master-addr host1 is 127.0.1.1 on this host" in result.err
    assert "10.77.0.11 (eth0)" in result.err


def test_what_keeps_one_host_from_starting_is_told_to_all(two: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, "import time; time.sleep(60)")
    commands = [
        start(two, tmp_path, node, "--restarts", 2, "--run", run, "script.py")
        for node, run in enumerate(("run0", "/proc/no"))
    ]
    first, second = (one.wait() for one in commands)
    assert (first.code, second.code) == (2, 2), (first, second)
    assert "the run failed on host2 (node 1): cannot make the run directory /proc/no" in first.err
    assert "cannot make the run directory /proc/no" in second.err


def test_another_node_0_that_has_not_got_the_checkpoint(two: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    for name in ("run", "host1", "host2"):
        (tmp_path / name).mkdir()

    def launch(*hosts: int) -> list[Result]:
        """Node 0, 1 on these hosts, each with a run directory of its own under the same name."""
        commands = []
        for node, host in enumerate(hosts):
            words = ["unshare", "-m", "sh", "-c", f'mount --bind host{host} run && exec "$@"', "sh", *command("run")]
            words += ["--nodes", "2", "--node-rank", str(node), "--master-addr", two.address(hosts[0])]
            words += ["--master-port", "1234", "--run", "run", "script.py", "1", "0"]
            commands.append(two.start(host, *words, folder=tmp_path, env={"EVENSTEP_TOKEN": "a secret"}))
        return [one.wait() for one in commands]

    assert [result.code for result in launch(1, 2)] == [0, 0]
    said = (
        f"host1 (node 1) has a checkpoint of step 5 in {tmp_path}/run, host2 (node 0) has none in {tmp_path}/run: "
        "they do not share the run directory\n  what to do: all go on from what node 0 has: start node 0 on host1"
    )
    for result in launch(2, 1):
        assert (result.code, said in result.err) == (2, True), result
    assert not list((tmp_path / "host2").glob("checkpoints/*"))


def test_two_processes_that_end_for_want_of_each_other(two: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, 'raise RuntimeError("Connection closed by peer")')
    for result in [one.wait() for one in [start(two, tmp_path, node, "script.py") for node in (0, 1)]]:
        assert result.code == 1, result
        assert "failed: RuntimeError: Connection closed by peer" in result.err


def test_scripts_that_differ(two: Hosts, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_script(folder, SCRIPT + ("print(1)" if folder == folders[1] else ""))
    commands = [start(two, folder, node, "script.py", 1, 0) for node, folder in enumerate(folders)]
    for one in commands:
        result = one.wait()
        assert result.code == 2
        assert "the script differs" in result.err
        assert "host1 (node 0)" in result.err
    assert not list(folders[0].glob("runs/*"))


def test_a_wrong_token_and_strangers_are_turned_away(two: Hosts, tmp_path: Path, alone: str) -> None:
    write_script(tmp_path, SCRIPT)
    first = start(two, tmp_path, 0, "--run", "run0", "script.py", 2, 0)
    wrong = start(two, tmp_path, 1, "--run", "runx", "script.py", 2, 0, token="a guess").wait()
    assert wrong.code == 2
    assert "EVENSTEP_TOKEN must be the same" in wrong.err
    noise = (
        "import os, socket\n"
        f"s = socket.create_connection(('{two.address(1)}', 1234))\n"
        "try:\n    for _ in range(160): s.sendall(os.urandom(1 << 16))\nexcept OSError: pass\n"
    )
    assert two.start(2, sys.executable, "-c", noise, folder=tmp_path).wait().code == 0
    second = start(two, tmp_path, 1, "--run", "run1", "script.py", 2, 0)
    done, other = first.wait(), second.wait()
    assert (done.code, other.code) == (0, 0), (done, other)
    assert done.out.splitlines()[-1] == alone
    assert f"turned away a connection from {two.address(2)}" in done.err


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, number)


def launcher(made: Hosts, host: int) -> list[int]:
    return made.find(host, "evenstep run", "--node-rank")[-1:]


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ("os._exit(0)", r"rank 1 of host2 \(node 1\) had ended before, with exit code 0"),
        ("sys.exit(0)", r"rank \d failed: evenstep.errors.MismatchError: the processes are at different calls"),
    ],
)
def test_a_process_that_leaves_early_is_named(two: Hosts, tmp_path: Path, leaves: str, said: str) -> None:
    write_script(tmp_path, training(stepped=f"if run.rank == 1 and step.number == 4: {leaves}"))
    commands = [start(two, tmp_path, node, "--run", "run", "script.py", 40, 0, processes=1 + node) for node in (0, 1)]
    for result in (one.wait() for one in commands):
        assert result.code == 1, result
        assert re.search(said, result.err), result
    own = read_uncaught(error_path(RunPaths(tmp_path / "run").log(1)))
    assert (own is None) == (leaves == "os._exit(0)")  # else it may be the one that is told of


LOST = "nothing was heard from it for 4."
# What to do to which host, and what the other is to say of it.
FAULTS: dict[str, tuple[Callable[[Hosts], None], int, str]] = {
    "a process killed": (lambda h: kill(h.find(2, "python script.py")), 2, "rank 1 was killed by SIGKILL"),
    "a process stopped": (lambda h: kill(h.find(2, "python script.py"), signal.SIGSTOP), 2, "rank 1 stands still"),
    "a launcher killed": (lambda h: kill(launcher(h, 2)), 2, "its launcher has ended"),
    "a launcher stopped": (lambda h: kill(launcher(h, 2), signal.SIGSTOP), 2, LOST),
    "a host without power": (lambda h: h.power_off(2), 2, LOST),
    "a cable cut": (lambda h: h.cut(2), 2, LOST),
    "the launcher of node 0 killed": (lambda h: kill(launcher(h, 1)), 1, "its launcher has ended"),
    "the launcher of node 0 stopped": (lambda h: kill(launcher(h, 1), signal.SIGSTOP), 1, LOST),
    "the host of node 0 without power": (lambda h: h.power_off(1), 1, LOST),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_ends_the_run_on_all_hosts(
    two: Hosts, tmp_path: Path, fault: str, record_property: Callable[[str, object], None]
) -> None:
    act, victim, said = FAULTS[fault]
    write_script(tmp_path, SCRIPT)
    commands = [start(two, tmp_path, node, "--run", f"run{node}", "script.py", 1000, 0.02) for node in (0, 1)]
    assert eventually(lambda: steps_done(tmp_path) > 8)
    began = time.monotonic()
    try:
        act(two)
        other = commands[2 - victim].wait()
        took = time.monotonic() - began
        assert eventually(lambda: not two.find(victim, "python script.py"))  # also where its launcher stands still
        for pid in launcher(two, victim):
            os.kill(pid, signal.SIGCONT)
        own = commands[victim - 1].wait()
    finally:
        two.join(victim)
    record_property(f"seconds until {fault} has ended the run", round(took, 1))
    assert other.code == (1 if "rank" in said else 4)
    host = "host2" if victim == 2 else two.address(1)
    assert f"the run failed on {host} (node {victim - 1}): {said}" in other.err
    assert re.search(rf"rank {victim - 1} was in step \d+, [a-z ']+\n", other.err), other.err
    assert "logs of every process: run" in other.err
    if victim == 2:  # node 0 has the checkpoints
        assert "the last checkpoint: run0/checkpoints/step-" in other.err
        assert "to go on from step" in other.err
    if fault in ("a launcher stopped", "a cable cut"):
        assert "the run failed on" in own.err, own
    if fault == "the launcher of node 0 stopped":
        assert "the run failed on host1 (node 0): its launcher stood still for " in own.err, own.err
    if said == LOST:  # on the launcher's own clock, since the last sign of life; then it ends its processes in a second
        silence = re.search(r"nothing was heard from it for (\d\.\d) s", other.err)
        assert silence is not None
        assert float(silence[1]) <= 4.5, other.err
    assert took < 10  # 5 on a machine that has nothing else to do
    assert two.pids(1) == two.pids(2) == []


def test_a_flap_of_two_seconds_ends_nothing(two: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    alone = evenstep(tmp_path, "run", "--run", "alone", "script.py", 20, 0)
    commands = [start(two, tmp_path, node, "--run", f"run{node}", "script.py", 20, 0.05) for node in (0, 1)]
    assert eventually(lambda: steps_done(tmp_path) > 8)
    two.cut(2)
    time.sleep(2.0)  # what is tested is this very time
    two.join(2)
    first, second = (one.wait() for one in commands)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.out.splitlines()[-1] == alone.out.splitlines()[-1]


def test_a_taken_port_and_a_wrong_address(tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    words = ("run", "--nodes", 2, "--node-rank", 0, "--master-addr")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = evenstep(tmp_path, *words, "127.0.0.1", "--master-port", port, "script.py", 1, 0)
    assert (result.code, f"port {port} of 127.0.0.1 is taken" in result.err) == (2, True), result
    result = evenstep(tmp_path, *words, "192.0.2.1", "--master-port", port, "script.py", 1, 0)
    assert (result.code, "192.0.2.1 is not an address of this host" in result.err) == (2, True), result
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_waits_for_a_host_that_is_still_importing(two: Hosts, tmp_path: Path, number: int) -> None:
    env = installed_package(tmp_path, "slow", "import os, time; time.sleep(float(os.environ.get('SLOW', '0')))")
    write_script(tmp_path, "import slow, time\ntime.sleep(600)")
    words = ("--run", "run", "script.py")
    commands = [
        start(two, tmp_path, 0, *words, processes=2, env={**env, "SLOW": "300"}),
        start(two, tmp_path, 1, *words, env=env),
    ]
    assert eventually(lambda: bool(two.find(2, "python script.py")))
    began = time.monotonic()
    if number == signal.SIGKILL:
        kill(two.find(2, "python script.py"), number)
    else:
        kill(launcher(two, 1), number)
    first, second = (one.wait() for one in commands)
    assert time.monotonic() - began < 20  # and not 300
    assert two.pids(1) == two.pids(2) == []
    if number == signal.SIGKILL:
        assert (first.code, "the run failed on host2 (node 1): rank 2 was killed by SIGKILL" in first.err) == (1, True)
    else:
        assert (first.code, "host1 (node 0): its launcher was stopped" in second.err) == (130, True), second


def test_a_run_directory_in_use_and_a_second_signal_that_ends_all_at_once(two: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    words = ("--run", "run", "script.py", 1000, 600)
    commands = [start(two, tmp_path, node, *words) for node in (0, 1)]
    paths = RunPaths(tmp_path / "run")
    assert eventually(lambda: read_activity(paths.activity(1)) == Doing(1, SCRIPTS_OWN)), paths.log(1).read_text()
    seen = [paths.log(rank).read_bytes() for rank in (0, 1)]

    # Another launch in the same run directory touches nothing.
    for refused in [start(two, tmp_path, node, "--master-port", 1235, *words) for node in (0, 1)]:
        result = refused.wait()
        assert (result.code, "is in use by another `evenstep run`" in result.err) == (2, True), result
    assert [paths.log(rank).read_bytes() for rank in (0, 1)] == seen
    assert read_activity(paths.activity(1)) == Doing(1, SCRIPTS_OWN)

    def ends() -> bool:
        for pid in launcher(two, 2):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        return commands[1].popen.poll() is not None

    assert eventually(ends, 20)  # the first signal alone would wait for the step, ten minutes
    first, second = (one.wait() for one in commands)
    assert second.code == 130
    assert "host2 (node 1): its launcher was stopped" in first.err
    assert two.pids(1) == two.pids(2) == []


@pytest.mark.parametrize(
    ("whom", "number"),
    [("evenstep run", signal.SIGTERM), ("evenstep run", signal.SIGINT), ("script.py", signal.SIGUSR1)],
)
def test_a_signal_on_one_node_stops_all_after_a_checkpoint(
    two: Hosts, tmp_path: Path, whom: str, number: signal.Signals
) -> None:
    write_script(tmp_path, SCRIPT)
    commands = [start(two, tmp_path, node, "--run", f"run{node}", "script.py", 1000, 0.02) for node in (0, 1)]
    assert eventually(lambda: steps_done(tmp_path) > 8)
    kill(two.find(2, whom)[-1:], number)
    first, second = (one.wait() for one in commands)
    assert (first.code, second.code) == (128 + number, 128 + number), (first, second)
    stopped = re.search(rf"stopped by {number.name} at the end of step (\d+); checkpoint (\d+) is written", first.err)
    assert stopped is not None, first
    assert stopped[1] == stopped[2]
    assert f"to go on from step {stopped[1]}: evenstep run --nodes 2 --node-rank 0" in first.err
    assert two.pids(1) == two.pids(2) == []
