"""What starts `evenstep node` on a host: ssh, or whatever else runs a command there with our pipes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from evenstep.environment import SSH, TOKEN
from evenstep.errors import UsageError
from evenstep.launch.hosts.hostfile import Host

# Nobody is there to answer a question. A connection that is cut before our own beats go over it ends by itself.
_SSH_OPTIONS = [
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=3"),
    *("-o", "ServerAliveCountMax=2"),
]
_FORWARDED = re.compile(r"^(EVENSTEP_|PYTHON|OMP_|MKL_|OPENBLAS_|NCCL_|GLOO_|TORCH|CUDA_|HF_|PATH$|LD_LIBRARY_PATH$)")

Transport = Callable[[Host], list[str]]
"""The command that runs a shell command line, its last word, on a host, with our pipes."""


def by_ssh(host: Host) -> list[str]:
    """The system's ssh client, so that the user's configuration, agent and jump hosts count."""
    client = _ssh_client()
    if shutil.which(client[0]) is None:
        raise UsageError(f"there is no ssh client {client[0]} on this host", do=f"install openssh-client, or see {SSH}")
    return [*client, *_SSH_OPTIONS, "--", host.name]


def _ssh_client() -> list[str]:
    return shlex.split(os.environ.get(SSH, "")) or ["ssh"]


def ssh_meaning(name: str) -> str:
    """The host name or address that a name has in the user's configuration of ssh."""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([*_ssh_client(), "-G", "--", name], capture_output=True, text=True, timeout=5).stdout
        return next((line.split()[1] for line in said.splitlines() if line.startswith("hostname ")), name)
    return name


def command_on(host: Host, transport: Transport) -> list[str]:
    """What starts `evenstep node` on a host."""
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    words = ["cd", os.getcwd()], ["exec", "env", *path, sys.executable, "-P", "-m", "evenstep", "node"]
    line = " && ".join(map(shlex.join, words))
    return ["sh", "-c", line] if host.is_here else [*transport(host), line]


def forwarded() -> dict[str, str]:
    """What of this environment counts on every host."""
    return {name: value for name, value in os.environ.items() if _FORWARDED.match(name) and name != TOKEN}
