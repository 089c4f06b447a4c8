"""A process that has imported what a script needs, for whoever starts the same script several times.

Each start then costs a fork in place of an import: the process forks a fork server off itself, which becomes the
launcher's own child.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Protocol

from evenstep.environment import TOKEN
from evenstep.errors import MachineError
from evenstep.launch import fork_server, kinship
from evenstep.launch.job import Job, Script, all_of_it, to_json

_warm: set[int] = set()  # pids; see `spared`


class Server(Protocol):
    """A fork server, as its launcher holds it: what subprocess.Popen has."""

    stdin: IO[bytes] | None

    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Warm:
    """The process, from its start to `close`. It imports while the caller goes on; the first `start` waits for it."""

    def __init__(self, script: Script, *, hash_seed: int | None = None, once: bool = False) -> None:
        """`hash_seed` is that of the script's processes (PYTHONHASHSEED), None: as in this process's environment. With
        `once` the first `start` closes it."""
        self._once = once
        kinship.adopt_orphans()
        environment = {name: value for name, value in os.environ.items() if name != TOKEN} | fork_server.QUIET
        if hash_seed is not None:
            environment["PYTHONHASHSEED"] = str(hash_seed)
        job = os.memfd_create("evenstep-warm")
        os.write(job, to_json(_about(script)))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                fork_server.command("warm", job, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(job, theirs.fileno()),
                start_new_session=True,  # Ctrl-C is the launcher's to pass on
            )
        except OSError as error:
            self._socket.close()
            raise MachineError(f"cannot start a process: {error}", do="see `ulimit -u` and free memory") from error
        finally:
            os.close(job)
            theirs.close()
        _warm.add(self._process.pid)
        self._said: dict[str, object] | None = None

    def wait(self, seconds: float) -> bool:
        """Whether it has imported all, within so many seconds."""
        return self._said is not None or bool(select.select([self._socket], [], [], seconds)[0])

    def refusal(self) -> str | None:
        """Why it cannot be forked, so that every start must import for itself; None if it can."""
        said = self._hello()
        return None if said["plain"] is None else str(said["plain"])

    def is_foreign(self) -> bool:
        """Whether the script does not import evenstep. False where it is not Python: its start says what is wrong."""
        return bool(self._hello()["foreign"])

    def start(self, job: int, events: int, outputs: Sequence[int], held: Sequence[int]) -> Server:
        """Fork a fork server that is given these descriptors: the job's JSON, the events, and what the job names."""
        self._hello()
        read, write = os.pipe()
        try:
            said = json.dumps({"outputs": list(outputs), "held": list(held)}).encode()
            socket.send_fds(self._socket, [said], [job, events, read, *outputs, *held])
            answer = self._socket.recv(64)
        except OSError:
            answer = b""
        finally:
            os.close(read)
        if not answer:
            os.close(write)
            raise MachineError("the process that had imported what the script needs is gone", do="try again")
        if self._once:
            self.close()
        return _Forked(int(answer), os.fdopen(write, "wb", buffering=0))

    def _hello(self) -> dict[str, object]:
        if self._said is None:
            data = self._socket.recv(1 << 16)
            self._said = json.loads(data) if data else {"foreign": False, "plain": "the import ended the process"}
        return self._said

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        _warm.discard(self._process.pid)

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def spared() -> frozenset[int]:
    """The processes of this kind: they outlive the launches that they start."""
    return frozenset(_warm)


class _Forked:
    """A fork server that was forked elsewhere and is our child by adoption."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self._pid = pid
        self._code: int | None = None
        self.stdin: IO[bytes] | None = stdin

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, 9)

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            ended = os.pidfd_open(self._pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            finally:
                os.close(ended)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


def _about(script: Script) -> Job:
    """What the process needs to know beforehand."""
    return Job(script, all_of_it(0, 0, ""), "", {}, None, (), (), os.getpid())
