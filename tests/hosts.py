"""Real hosts for tests: network namespaces on one switch, each with processes of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launch.launching import PATIENCE, Result, clean_environ


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def needs_hosts() -> None:
    """Skip the test where network namespaces cannot be made."""
    if reason := why_no_hosts():
        pytest.skip(reason)


def why_no_hosts() -> str | None:
    """Why network namespaces cannot be made here; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces can be made by root only"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (iproute2, util-linux)"
    try:
        name = f"ev{secrets.token_hex(3)}t"
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"
    return None


@dataclass
class Command:
    """A command on a host, under way."""

    popen: subprocess.Popen[str]

    def wait(self, seconds: float = PATIENCE) -> Result:
        """To its end."""
        out, err = self.popen.communicate(timeout=seconds)
        return Result(self.popen.returncode, out, err)


@dataclass
class Hosts:
    """Hosts 1..count, called host1, host2, ..."""

    prefix: str
    count: int
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def address(self, host: int) -> str:
        return f"10.77.0.{10 + host}"

    def namespace(self, host: int) -> str:
        return f"{self.prefix}h{host}"

    def words(self, host: int, *words: object) -> list[str]:
        """The command line that runs `words` on the host, with a process table of its own."""
        inside = [
            "unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child",
            "sh", "-c", f'hostname host{host}; exec "$@"', "sh", *map(str, words),
        ]  # fmt: skip
        return ["ip", "netns", "exec", self.namespace(host), *inside]

    def start(
        self, host: int, *words: object, folder: Path, env: Mapping[str, str] | None = None, stdin: bool = False
    ) -> Command:
        """Start a command on the host. `stdin`: it is to be told things."""
        popen = subprocess.Popen(
            self.words(host, *words),
            cwd=folder,
            env=clean_environ(env),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(popen)
        return Command(popen)

    def serve(self, host: int, *words: object, folder: Path, env: Mapping[str, str] | None = None) -> None:
        """Start a daemon on the host, to its last hour."""
        self.running.append(
            subprocess.Popen(
                self.words(host, *words),
                cwd=folder,
                env=clean_environ({"PATH": f"{os.environ['PATH']}:/usr/sbin", **(env or {})}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        )

    def pids(self, host: int) -> list[int]:
        """What runs on the host."""
        done = subprocess.run(["ip", "netns", "pids", self.namespace(host)], check=True, capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def find(self, host: int, *parts: str) -> list[int]:
        """Processes of the host whose command line has all these parts."""
        found = []
        for pid in self.pids(host):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(part in line for part in parts):
                    found.append(pid)
        return found

    def cut(self, host: int) -> None:
        """Pull the host's cable at the switch."""
        _ip("-n", f"{self.prefix}sw", "link", "set", f"p{host}", "down")

    def join(self, host: int) -> None:
        """Plug it in again."""
        _ip("-n", f"{self.prefix}sw", "link", "set", f"p{host}", "up")

    def slow_down(self, megabits: int) -> None:
        """No host sends faster than so many Mbit/s."""
        for host in range(1, self.count + 1):
            rate = ["rate", f"{megabits}mbit", "burst", "32kb", "latency", "50ms"]
            words = ["tc", "-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate]
            subprocess.run(words, check=True, capture_output=True)

    def power_off(self, host: int) -> None:
        """Everything on the host ends at once, and nobody hears of it: the cable goes first."""
        self.cut(host)
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """`count` hosts, 10.77.0.11 and so on; gone afterwards with all that runs on them."""
    made = Hosts(f"ev{secrets.token_hex(3)}", count)
    switch = f"{made.prefix}sw"
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(1, count + 1):
            name = made.namespace(host)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{host}", "netns", switch)
            _ip("-n", switch, "link", "set", f"p{host}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{made.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
            names = Path(f"/etc/netns/{name}/hosts")
            names.parent.mkdir(parents=True, exist_ok=True)
            known = "".join(f"{made.address(k)} host{k}\n" for k in range(1, count + 1))
            names.write_text("127.0.0.1 localhost\n" + known)
        yield made
    finally:
        for popen in made.running:
            if popen.poll() is None:
                popen.kill()
            popen.communicate()
        for name in [switch, *(made.namespace(host) for host in range(1, count + 1))]:
            with suppress(subprocess.CalledProcessError):
                for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
