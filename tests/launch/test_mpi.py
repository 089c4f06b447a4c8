"""mpirun on two hosts."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Hosts, hosts, needs_hosts
from tests.launch.launching import Result, command, evenstep, training, write_script

pytestmark = pytest.mark.slow

SCRIPT = training(
    start="run=sys.argv[1]",
    epochs="1",
    stepped="",
    ends="""
    if run.rank == 0:
        own = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
               if os.path.islink(f"/proc/self/fd/{fd}")]
        sockets = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}")]
        print("listens at", {s[1].split(":")[0] for s in sockets if s[3] == "0A" and f"socket:[{s[9]}]" in own})
    """,
)


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    needs_hosts()
    with hosts(2) as made:
        yield made


def mpirun(made: Hosts, folder: Path, kind: str, *words: object, per_host: str) -> Result:
    """Run the command in one process for each place of `per_host`, started on host 1."""
    program = shutil.which(f"mpirun.{kind}")
    if program is None:
        pytest.skip(f"there is no mpirun.{kind} (apt install {kind if kind == 'mpich' else 'openmpi-bin'})")
    agent = folder / "agent"  # what mpirun takes for ssh: it enters the other host
    agent.write_text(
        "#!/bin/sh\nwhile case $1 in -*) true;; *) false;; esac; do shift; done\nhost=$1; shift\n"
        f'exec ip netns exec {made.prefix}h${{host#host}} unshare --uts sh -c "hostname $host; $*"\n'
    )
    agent.chmod(0o700)
    options: list[object]
    if kind == "openmpi":
        options = ["--allow-run-as-root", "--oversubscribe", "--host", per_host, "--mca", "plm_rsh_agent", agent]
        for part in ("oob", "btl"):
            options += ["--mca", f"{part}_tcp_if_include", "eth0"]
    else:
        count = sum(int(one.rpartition(":")[2]) for one in per_host.split(","))
        options = ["-launcher", "rsh", "-launcher-exec", agent, "-iface", "eth0", "-hosts", per_host, "-n", count]
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return made.start(1, program, *options, *words, folder=folder, env=env).wait(110)


@pytest.mark.parametrize(("kind", "per_host"), [("openmpi", "host1:2,host2:1"), ("mpich", "host1:1,host2:1")])
def test_the_fingerprint_of_one_process(two: Hosts, tmp_path: Path, kind: str, per_host: str) -> None:
    write_script(tmp_path, SCRIPT)
    alone = evenstep(tmp_path, "run", "--run", "alone", "script.py", "alone")
    done = mpirun(two, tmp_path, kind, sys.executable, "script.py", "run", per_host=per_host)
    assert done.code == 0, done
    assert f"{3 if kind == 'openmpi' else 2} processes" in done.err
    assert done.out.splitlines()[-1] == alone.out.splitlines()[-1]
    assert "fingerprint" in done.out
    listens = done.out.splitlines()[-2]  # as the kernel writes it; MPICH's own library may listen at 0.0.0.0
    assert ("listens at" in listens, "'0B004D0A'" in listens, "0" * 32 in listens) == (True, True, False), listens


def test_one_launcher_a_host_runs_a_plain_script(two: Hosts, tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1) * dist.get_rank()
        dist.all_reduce(total)
        print(dist.get_rank(), os.uname().nodename, total.item(), flush=True)
        dist.destroy_process_group()
        """,
    )
    words = command("run", "--run", "run", "--processes", 2, "--output", "all", "script.py")
    done = mpirun(two, tmp_path, "mpich", *words, per_host="host1:1,host2:1")
    assert done.code == 0, done
    said = sorted(re.findall(r"(\d) (host\d) 6.0", done.out))
    assert said == [(str(rank), f"host{1 + rank // 2}") for rank in range(4)]
