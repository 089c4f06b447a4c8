"""Several hosts by one command, over real ssh."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import evenstep as package
from tests.hosts import Command
from tests.launch.launching import Result, evenstep, eventually, training, write_script
from tests.ssh import SshHosts, needs_ssh, ssh_hosts

pytestmark = pytest.mark.slow

SCRIPT = training(
    first="import beside",
    begins='print(f"rank {run.rank} got {sys.argv[3:]}", flush=True)',
    stepped='time.sleep(float(sys.argv[2]) if os.path.exists("slow") else 0)',
)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    needs_ssh()
    with ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as made:
        yield made


def write(folder: Path) -> Path:
    write_script(folder, "x = 1", "beside.py")
    return write_script(folder, SCRIPT)


def left(three: SshHosts) -> list[int]:
    """What a launch has left on any host."""
    return [pid for host in (1, 2, 3) for word in ("script.py", "evenstep") for pid in three.made.find(host, word)]


def test_the_fingerprint_of_one_process_from_a_folder_with_an_odd_name(three: SshHosts, tmp_path: Path) -> None:
    odd = ["a b", "it's", '"', "$(touch hacked)", "`touch hacked`", "", "é\n"]
    folder = tmp_path / "a b's $(touch hacked)"
    write(folder)
    alone = evenstep(folder, "run", "--run", "alone", "script.py", 2, 0)
    words = ("--hosts", "alias2:2,host3,host1", "--output", "all", "--run", "run", "script.py", 2, 0, *odd)
    done = three.start("run", *words, folder=folder).wait()
    assert done.code == 0, done
    assert "4 processes" in done.err
    assert alone.out.splitlines()[-1] in done.out.splitlines()
    for rank in range(4):
        assert f"{f'[{rank}] ' if rank else ''}rank {rank} got {odd}\n" in done.out
        assert f"rank {rank} got {odd}" in (folder / "run" / "logs" / f"rank-{rank}.log").read_text()
    assert not list(tmp_path.rglob("hacked"))
    assert not left(three)


def refused(three: SshHosts, folder: Path, hosts: str, env: dict[str, str] | None = None) -> Result:
    began = time.monotonic()
    result = three.start("run", "--hosts", hosts, "script.py", 2, 0, folder=folder, env=env).wait()
    assert time.monotonic() - began < 20
    assert not left(three)
    assert not list(folder.glob("runs/*"))
    return result


def test_a_host_that_cannot_be_reached_is_named(three: SshHosts, tmp_path: Path) -> None:
    write(tmp_path)
    for host, said in (("refused", "Permission denied"), ("nowhere", "Could not resolve hostname nowhere")):
        result = refused(three, tmp_path, f"host3,{host}")
        assert (result.code, f"no launcher could be started on {host}" in result.err, said in result.err) == (
            4, True, True,
        ), result  # fmt: skip
    python = three.private / "python"  # which host 1 alone has
    python.symlink_to(sys.executable)
    path = ":".join(entry for entry in sys.path if entry.endswith("packages"))
    env = {"EVENSTEP_SSH": three.client, "PYTHONPATH": f"{Path(package.__file__).parents[1]}:{path}"}
    words = (python, "-m", "evenstep", "run", "--hosts", "host1,host2", "script.py", 1, 0)
    result = three.made.start(1, *words, folder=tmp_path, env=env).wait()
    python.unlink()
    assert (result.code, "no launcher could be started on host2" in result.err) == (4, True), result
    assert f"{python}’: No such file" in result.err or f"{python}': No such file" in result.err
    result = refused(three, tmp_path, "host3,host2", {"EVENSTEP_SSH": "no-such-client"})
    assert (result.code, "there is no ssh client no-such-client" in result.err) == (2, True)


def test_what_differs_between_hosts_is_named(three: SshHosts, tmp_path: Path) -> None:
    write(tmp_path)
    site = three.private / "site"
    source = Path(package.__file__).parents[1]
    env = {"PYTHONPATH": f"{site}:{source}"}
    old = f"{site}/torch-2.9.0.dist-info"
    three.on(3, f"mkdir -p {old}; printf 'Name: torch\\nVersion: 2.9.0\\n' > {old}/METADATA")
    result = refused(three, tmp_path, "host2,host3", env)
    assert result.code == 2
    assert "torch differs: " in result.err
    assert "2.9.0 on host3" in result.err
    three.on(3, f"rm -r {site}/*; cp -r {source}/evenstep {site}/; echo >> {site}/evenstep/errors.py")
    result = refused(three, tmp_path, "host2,host3", env)
    assert (result.code, "evenstep differs: " in result.err) == (2, True), result
    three.on(3, f"rm -r {site}")
    folder = three.private / "work"
    write(folder)
    three.on(2, f"cp -r {tmp_path} {folder}")
    result = refused(three, folder, "host1,host3")
    assert (result.code, "no launcher could be started on host3" in result.err) == (4, True), result
    assert f"cd: {folder}: No such file" in result.err
    three.on(3, f"cp -r {tmp_path} {folder}; echo y = 1 >> {folder}/beside.py")
    result = refused(three, folder, "host1,host3")
    assert (result.code, "the module beside.py differs" in result.err) == (2, True), result
    three.on(3, f"cp {tmp_path}/beside.py {folder}; echo print >> {folder}/script.py")
    assert "the script differs" in refused(three, folder, "host1,host3").err
    three.on(3, f"rm {folder}/script.py")
    assert "host3: there is no script script.py" in refused(three, folder, "host1,host3").err
    for host in (2, 3):
        three.on(host, f"rm -r {folder}")
    shutil.rmtree(folder)


def test_a_full_disk_of_a_host_is_named(three: SshHosts, tmp_path: Path) -> None:
    write_script(tmp_path, "print(1)")
    full = three.private / "full"
    three.on(3, f"mkdir {full}; mount -t tmpfs -o size=4k tmpfs {full}; ! cat /dev/zero > {full}/x")
    result = three.start("run", "--hosts", "host2,host3", "--run", full, "script.py", folder=tmp_path).wait()
    assert (result.code, "the run failed on host3 (node 1): cannot write " in result.err) == (4, True), result
    assert "No space left on device" in result.err


def test_a_host_that_is_lost_before_the_beginning(three: SshHosts, tmp_path: Path) -> None:
    write(tmp_path)
    env = {"EVENSTEP_SSH": f"{three.client} -o ConnectTimeout=60"}
    command = three.start("run", "--hosts", "host2,never", "script.py", 1, 0, folder=tmp_path, env=env)
    assert command.popen.stderr is not None
    while (said := command.popen.stderr.readline()) != "evenstep: waiting for never\n":
        assert "waiting for" in said, said
    three.made.cut(2)
    try:
        result = command.wait()
        assert eventually(lambda: not three.made.find(2, "evenstep"))
    finally:
        three.made.join(2)
    assert result.code == 4
    assert "host2 was lost before the run began: nothing was heard from it for 4." in result.err


def under_way(three: SshHosts, folder: Path, *words: object, run: Path | str = "run") -> Command:
    """A launch that has done some steps and written a checkpoint; it is slow until the file "slow" is removed."""
    write(folder)
    (folder / "slow").touch()
    words = ("run", *words, "--run", run, "--hosts", "host2,host3", "script.py", 40, 0.2)
    command = three.start(*words, folder=folder)
    assert eventually(lambda: len(list((folder / run).glob("checkpoints/step-*"))) > 0)
    return command


def test_a_terminal_that_stands_still_ends_nothing(three: SshHosts, tmp_path: Path) -> None:
    talk = "import time\nfor i in range(200):\n    print('x' * 50000, flush=True)\n    time.sleep(0.01)\nprint('end')\n"
    write_script(tmp_path, talk, "talk.py")
    command = three.start("run", "--hosts", "host2,host3", "talk.py", folder=tmp_path)
    assert command.popen.stdout is not None
    assert os.read(command.popen.stdout.fileno(), 1) == b"x"
    time.sleep(6.0)  # longer than any host may be silent
    result = command.wait()
    assert (result.code, len(result.out), result.out[-4:]) == (0, 200 * 50001 + 4 - 1, "end\n"), result.err


def signal_launcher(three: SshHosts, number: int) -> None:
    os.kill(three.made.find(1, "evenstep run")[-1], number)


def test_a_run_directory_that_is_not_shared(three: SshHosts, tmp_path: Path) -> None:
    run = three.private / "run"  # each host has one of its own
    command = under_way(three, tmp_path, run=run)
    signal_launcher(three, signal.SIGINT)  # Ctrl-C
    result = command.wait()
    assert result.code == 130, result
    assert not left(three)
    step = int(result.err.rpartition("to go on from step ")[2].partition(":")[0])
    assert (run / "checkpoints" / f"step-{step:010d}" / "manifest.json").exists()
    assert {path.name for path in run.glob("logs/*.log")} == {"rank-0.log", "rank-1.log"}
    # A new host in place of the first, which has nothing; the other one is first now.
    three.on(2, f"rm -r {run}/*")
    epochs = step // 5 + 2
    alone = evenstep(tmp_path, "run", "--run", "alone", "script.py", epochs, 0)
    words = ("run", "--run", run, "--hosts")
    done = three.start(*words, "host3,host2", "script.py", epochs, 0, folder=tmp_path).wait()
    assert done.code == 0, done
    assert f"the checkpoint of step {step} goes to host3, host2:" in done.err
    assert alone.out.splitlines()[-1] == done.out.splitlines()[-1]
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "alone" / "model.safetensors").read_bytes()
    assert (run / "logs" / "rank-1.log").read_text().count("rank 1 got") == 2
    three.on(3, f"echo another > {run}/run-id")
    result = three.start(*words, "host1,host3", "script.py", 1, 0, folder=tmp_path).wait()
    assert (result.code, "host3 does not share the run directory" in result.err) == (2, True), result


def test_a_killed_launcher_leaves_nothing_on_any_host(three: SshHosts, tmp_path: Path) -> None:
    command = under_way(three, tmp_path)
    signal_launcher(three, signal.SIGKILL)
    began = time.monotonic()
    command.wait()
    assert eventually(lambda: not left(three))
    assert time.monotonic() - began < 15


def test_the_others_go_on_from_a_copy_of_the_checkpoint_when_a_host_is_lost(three: SshHosts, tmp_path: Path) -> None:
    run = three.private / "again"  # each host has one of its own
    command = under_way(three, tmp_path, "--restarts", 1, "--min-hosts", 1, run=run)
    three.made.cut(2)
    (tmp_path / "slow").unlink()
    try:
        result = command.wait()
        assert eventually(lambda: not three.made.find(2, "script.py"))
    finally:
        three.made.join(2)
    assert result.code == 0, result
    assert "the run failed on host2 (node 0): nothing was heard from it for 4." in result.err
    assert " goes to host3: the run directory is not shared" in result.err
    alone = evenstep(tmp_path, "run", "--run", "alone", "script.py", 40, 0)
    assert alone.out.splitlines()[-1] == result.out.splitlines()[-1]
    assert (run / "finished.json").exists()
    assert eventually(lambda: not left(three))
