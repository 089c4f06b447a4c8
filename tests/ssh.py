"""Real ssh between the hosts of tests: a server on each, keys and a client configuration made for the test alone."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.hosts import Command, Hosts, hosts, needs_hosts
from tests.launch.launching import PATIENCE, command, eventually

_SERVER = "/usr/sbin/sshd"


def needs_ssh() -> None:
    """Skip the test where hosts or ssh servers cannot be started."""
    needs_hosts()
    if not Path(_SERVER).exists() or shutil.which("ssh") is None:
        pytest.skip("there is no sshd or no ssh client (openssh-server, openssh-client)")


@dataclass
class SshHosts:
    """Hosts that reach each other by ssh, as host1, host2, ...; `alias2` is host2 by another name."""

    made: Hosts
    folder: Path  # of keys and configuration
    private: Path  # a folder that each host has to itself
    environment: dict[int, dict[str, str]] = field(default_factory=dict)  # of what ssh starts on a host

    @property
    def client(self) -> str:
        """The ssh client with the test's configuration, for EVENSTEP_SSH."""
        return f"ssh -F '{self.folder}/ssh_config'"

    def start(self, *words: object, folder: Path, env: Mapping[str, str] | None = None, host: int = 1) -> Command:
        """`evenstep WORDS` on host 1, from which the others are reached."""
        return self.made.start(host, *command(*words), folder=folder, env={"EVENSTEP_SSH": self.client, **(env or {})})

    def on(self, host: int, script: str) -> None:
        """Run a shell script on the host, by ssh from host 1; it sees the host's own `private`."""
        words = ["ip", "netns", "exec", self.made.namespace(1), *shlex.split(self.client), f"host{host}", script]
        subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE)

    def serve(self, host: int) -> None:
        """Start the host's ssh server."""
        pid_file = self.folder / f"sshd{host}.pid"
        config = self.folder / f"sshd{host}.conf"
        config.write_text(
            f"ListenAddress {self.made.address(host)}\nHostKey {self.folder}/hostkey\nPidFile {pid_file}\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPermitRootLogin prohibit-password\n"
            f"SetEnv {' '.join(f'{name}={value}' for name, value in self.environment.get(host, {}).items()) or 'A=1'}\n"
            # As a login shell may, it prints something first.
            'ForceCommand echo hello; printf there; eval "$SSH_ORIGINAL_COMMAND"\n'
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\n"
        )
        (self.private / "empty").mkdir(parents=True, exist_ok=True)
        script = f"mount -t tmpfs -o size=64m tmpfs '{self.private}' && exec {_SERVER} -D -e -f '{config}'"
        self.made.start(host, "sh", "-c", script, folder=self.folder)
        assert eventually(pid_file.exists), f"no ssh server on host{host}"


@contextmanager
def ssh_hosts(count: int, folder: Path, environment: dict[int, dict[str, str]] | None = None) -> Iterator[SshHosts]:
    """`count` hosts with ssh servers; host 1 is that of the command line."""
    os.makedirs("/run/sshd", exist_ok=True)
    for key in ("id", "other", "hostkey"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "id.pub", folder / "authorized_keys")
    host_key = " ".join((folder / "hostkey.pub").read_text().split()[:2])
    with hosts(count) as made:
        known, config = "", ""
        for host in range(1, count + 1):
            known += f"host{host},{made.address(host)} {host_key}\n"
            config += f"Host alias{host}\n HostName {made.address(host)}\n HostKeyAlias host{host}\n"
        config += (
            "Host never\n ProxyCommand sleep 60\n"
            f"Match host refused\n HostName {made.address(2)}\n HostKeyAlias host2\n IdentityFile {folder}/other\n"
            f"Match host *,!refused originalhost *,!refused\n IdentityFile {folder}/id\n"
            f"Host *\n User root\n IdentitiesOnly yes\n UserKnownHostsFile {folder}/known\n"
            " GlobalKnownHostsFile none\n StrictHostKeyChecking yes\n LogLevel ERROR\n"
        )
        (folder / "known").write_text(known)
        (folder / "ssh_config").write_text(config)
        ready = SshHosts(made, folder, folder / "private", environment or {})
        for host in range(2, count + 1):
            ready.serve(host)
        yield ready
