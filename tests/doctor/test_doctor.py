"""`evenstep doctor` on real hosts, good and bad ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import evenstep as package
from tests.launch.launching import Result, evenstep, write_script
from tests.ssh import SshHosts, needs_ssh, ssh_hosts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    needs_ssh()
    with ssh_hosts(3, tmp_path_factory.mktemp("ssh"), {3: {"EVENSTEP_CLOCK_OFFSET": "300"}}) as made:
        yield made


def on(three: SshHosts, host: int, *words: str) -> None:
    subprocess.run(["ip", "netns", "exec", three.made.namespace(host), *words], check=True, capture_output=True)


def test_good_hosts_by_ssh(three: SshHosts, tmp_path: Path) -> None:
    write_script(tmp_path, "import torch")
    done = three.start("doctor", "--json", "--hosts", "host1:2,alias2", "script.py", folder=tmp_path).wait()
    assert done.code == 0, done
    report = json.loads(done.out)
    assert report["would_start"]
    assert [(host["host"], host["processes"], host["address"]) for host in report["hosts"]] == [
        ("host1", 2, "10.77.0.11"),
        ("host2", 1, "10.77.0.12"),
    ]
    for host in report["hosts"]:
        assert host["interfaces"] == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
        assert host["shared"]
        assert abs(host["clock"]["before_the_first"]) < 1
        assert host["same"]["torch"] == host["torch"]["version"]
    assert {(link["from"], link["to"]) for link in report["links"]} == {("host1", "host2"), ("host2", "host1")}
    assert all(link["bandwidth"] > 1e6 and 0 < link["latency"] < 1 for link in report["links"])
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_each_fault_of_bad_hosts_is_named(three: SshHosts, tmp_path: Path) -> None:
    write_script(tmp_path, "import torch")
    if shutil.which("nft") is None or shutil.which("tc") is None:
        pytest.skip("there is no nft or no tc (nftables, iproute2)")
    site = three.private / "site" / "torch-2.9.0.dist-info"
    three.on(3, f"mkdir -p {site}; printf 'Name: torch\\nVersion: 2.9.0\\n' > {site}/METADATA")
    three.on(3, f"mkdir {three.private}/run; cat /dev/zero > {three.private}/run/full 2> /dev/null || true")
    on(
        three,
        3,
        "tc",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "50mbit",
        "burst",
        "64kb",
        "latency",
        "99ms",
    )
    on(three, 2, "nft", "add table inet t; add chain inet t c { type filter hook input priority 0; }")
    on(three, 2, "nft", "add rule inet t c tcp dport 1024-65535 tcp flags & (syn | ack) == syn drop")
    env = {"PYTHONPATH": f"{site.parent}:{Path(package.__file__).parents[1]}"}
    words = ("doctor", "--run", three.private / "run", "--hosts", "host1,host2,host3,nohost", "script.py")
    try:
        done = three.start(*words, folder=tmp_path, env=env).wait()
    finally:
        on(three, 2, "nft", "delete table inet t")
        on(three, 3, "tc", "qdisc", "del", "dev", "eth0", "root")
        three.on(3, f"rm -r {three.private}/*")
    assert done.code == 4, done
    words_of = " ".join(done.out.split())
    for said in (
        "fails nohost: was not reached: ssh: Could not resolve hostname",
        "fails host3: torch differs: 2.13",
        "; 2.9.0 on host3",
        f"fails host3: nothing can be written into {three.private}/run: No space left on device",
        "fails host1 -> host2: cannot connect to 10.77.0.12: timed out",
        "fails host3 -> host2: cannot connect to 10.77.0.12: timed out",
        "warning host3: its clock is 300 s before that of host1",
        "warning host3 -> host1: a slow link: ",
        "the slowest link: host3 -> host1",
        "warning host3: does not share the run directory",
        "a launch would fail: 5 faults",
    ):
        assert said in words_of, done.out
    assert "fails host2 -> host1" not in words_of


def test_by_hand_on_each_node(three: SshHosts, tmp_path: Path) -> None:
    write_script(tmp_path, "import torch")
    words = ("doctor", "--nodes", 2, "--master-addr", "10.77.0.11", "--master-port", 1234, "--run", "run")

    def both(*more: object) -> list[Result]:
        env = {"EVENSTEP_TOKEN": "a secret"}
        started = [
            three.start(*words, "--node-rank", node, *more, host=node + 1, folder=tmp_path, env=env) for node in (0, 1)
        ]
        return [one.wait() for one in started]

    first, second = both("script.py")
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.out == second.out
    assert "eth0: it has 10.77.0.12, where the other" in first.out
    assert "a launch would start" in first.out
    on(three, 1, "nft", "add table inet t; add chain inet t c { type filter hook input priority 0; }")
    on(three, 1, "nft", "add rule inet t c tcp dport 1234 drop")
    try:
        first, second = both("--join-timeout", 3, "no-such-script.py")
    finally:
        on(three, 1, "nft", "delete table inet t")
    assert (first.code, second.code) == (4, 4), (first, second)
    assert "node 1: was not reached: it did not come to 10.77.0.11:1234 within 3 s" in first.out
    assert "node 0 did not answer at 10.77.0.11:1234 within 3 s: timed out" in " ".join(second.out.split())
    assert "there is no script no-such-script.py" in second.out


def test_help_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from evenstep.cli.main import main; main(['doctor', '--help']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "Examine the hosts of a launch" in done.stdout
    run_options = evenstep(tmp_path, "run", "--help").out
    assert "--json" not in run_options
    assert all(line in run_options for line in done.stdout.splitlines() if line.strip().startswith("--node"))
