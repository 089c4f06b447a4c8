"""A Slurm of one's own for tests: a controller and nodes on hosts of `tests.hosts`."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts import Command, Hosts, hosts
from tests.launch.launching import Result, eventually

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

_CONF = """\
ClusterName=rig
SlurmctldHost=host{controller}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SlurmdTimeout=8
SlurmctldParameters=node_reg_mem_percent=1
SlurmdParameters=config_overrides
KillWait=3
MessageTimeout=5
TCPTimeout=2
"""


@dataclass(frozen=True)
class Cluster:
    """Nodes host1, host2, ...; the last host is the controller, and where users log in."""

    hosts: Hosts
    folder: Path

    @property
    def login(self) -> int:
        return self.hosts.count

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self, *words: object, folder: Path, env: Mapping[str, str] | None = None) -> Command:
        """Start a command where users log in."""
        return self.hosts.start(self.login, *words, folder=folder, env={**self.env, **(env or {})})

    def run(self, *words: object, folder: Path | None = None, env: Mapping[str, str] | None = None) -> Result:
        """The same, to its end."""
        return self.start(*words, folder=folder or self.folder, env=env).wait()

    def start_node(self, node: int) -> None:
        """Switch a node on."""
        self._daemon(node, "slurmd", "-D", "-N", f"host{node}")

    def are_idle(self, count: int) -> bool:
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D").out.strip() == str(count)

    def state(self, job: str) -> str:
        """What Slurm calls the job's state, RUNNING for example."""
        said = self.run("scontrol", "show", "job", "-o", job).out
        return said.partition("JobState=")[2].partition(" ")[0]

    def _daemon(self, host: int, *words: object) -> None:
        self.hosts.serve(host, *words, folder=self.folder, env=self.env)


def needs_slurm() -> None:
    """Skip the test where Slurm is not installed."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)} (apt install slurmctld slurmd slurm-client munge)")


@contextmanager
def cluster(nodes: int, folder: Path) -> Iterator[Cluster]:
    """A Slurm with so many nodes of 4 CPUs, ready for jobs."""
    with hosts(nodes + 1) as made:
        folder.mkdir(mode=0o700)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        lines = [_CONF.format(folder=folder, controller=nodes + 1, address=made.address(nodes + 1), port=6817)]
        for k in range(1, nodes + 1):
            lines.append(f"NodeName=host{k} NodeAddr={made.address(k)} CPUs=4 RealMemory=4000 State=UNKNOWN\n")
        lines.append(f"PartitionName=main Nodes=host[1-{nodes}] Default=YES MaxTime=60 State=UP\n")
        (folder / "slurm.conf").write_text("".join(lines))
        # Nothing here uses cgroups, but slurmd looks for them where it is not told which, and a namespace has none.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        ready = Cluster(made, folder)
        ready._daemon(
            ready.login, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        assert eventually((folder / "munge.sock").exists)
        ready._daemon(ready.login, "slurmctld", "-D", "-f", folder / "slurm.conf")
        for node in range(1, nodes + 1):
            ready.start_node(node)
        assert eventually(lambda: ready.are_idle(nodes)), (folder / "slurmctld.log").read_text()
        yield ready
