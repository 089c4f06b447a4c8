"""How training processes ended, and which end came first."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from evenstep.record.uncaught import Uncaught

# What gloo, NCCL and torch's store say when another process is gone: a consequence, seldom the cause.
_PEER_GONE = re.compile(
    r"connection (closed|reset) by peer|connection was (closed|reset|aborted)|broken pipe|socket closed"
    r"|timed out waiting .*(recv|send) operation|(recv|send)value failed|failed to recv, got 0 bytes"
    r"|remote process exited|remote error|connectfullmesh failed|gloo connect|NCCL communicator was aborted"
    r"|wait timeout after|the client socket has (failed|timed out)",
    re.IGNORECASE,
)


# Errors that the same command meets again.
_LASTING = {
    f"evenstep.errors.{name}"
    for name in ("UsageError", "IdentityError", "LossError", "CheckpointError", "MismatchError")
}
_USAGE = 2  # as in cli/exits.py


@dataclass(frozen=True)
class Exit:
    """A training process's end, as its parent saw it."""

    rank: int
    code: int  # 0 and above: exit code; below: minus the signal
    stopped: bool  # after the launcher had told it to stop
    time: float  # seconds since 1970

    orderly: bool = False  # it had been asked to stop by a signal, and has finished its step first

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.orderly

    def describe(self) -> str:
        """In words: the exit code, or the signal by name."""
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        hint = ""
        if self.code == -signal.SIGKILL:
            hint = " (by `kill -9`, or by the kernel's out-of-memory killer: see `dmesg`; fewer processes take less)"
        elif self.code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE):
            hint = " (a crash in native code; its log has the Python stack)"
        return f"was killed by {name}{hint}"


@dataclass(frozen=True)
class Failure:
    """The one failure that is reported, with what the process said of it."""

    exit: Exit
    uncaught: Uncaught | None

    @property
    def when(self) -> float:
        """When it raised, or else ended (seconds since 1970)."""
        return self.exit.time if self.uncaught is None else self.uncaught.time

    @property
    def lasting(self) -> bool:
        """Whether the same command is bound to meet it again."""
        return self.exit.code == _USAGE or (self.uncaught is not None and self.uncaught.type in _LASTING)


def is_secondary(error: BaseException) -> bool:
    """Whether an exception looks like the consequence of another process's failure."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if any(kind.__name__ == "PeerFailed" for kind in type(cause).__mro__):
            return True
        # ConnectionError and its like from the user's own network traffic are no RuntimeErrors.
        if isinstance(cause, RuntimeError) and _PEER_GONE.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def first_failure(exits: Iterable[Exit], uncaught: Iterable[Uncaught]) -> Failure | None:
    """Of the processes that failed, the one that led: neither stopped by the launcher nor felled by a peer's end.

    Among equals, who raised or ended first; but if all failed alike, as on a wrong argument, the lowest rank of them.
    """
    said = {error.rank: error for error in uncaught}
    failures = [Failure(exit, said.get(exit.rank)) for exit in exits if exit.failed]
    first = min(failures, key=lambda one: (_remove(one), one.when), default=None)
    if first is None or first.uncaught is None:
        return first
    alike = [one for one in failures if _remove(one) == _remove(first) and _what(one) == _what(first)]
    return min(alike, key=lambda one: one.exit.rank)


def ended_before(exits: Iterable[Exit], failure: Failure) -> str:
    """Who had ended well before a failure that looks like the consequence of another's end; "" for others."""
    if failure.uncaught is None or not failure.uncaught.secondary:
        return ""
    ranks = sorted(one.rank for one in exits if one.code == 0 and one.time < failure.exit.time)
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some} had ended before, with exit code 0" if ranks else ""


def _what(failure: Failure) -> tuple[str, str] | None:
    return None if failure.uncaught is None else (failure.uncaught.type, failure.uncaught.message)


def _remove(failure: Failure) -> int:
    """How far from the cause: 0 may be it, 1 a peer's end, 2 the launcher's own doing."""
    error = failure.uncaught
    if failure.exit.stopped and (error is None or error.type in ("SystemExit", "KeyboardInterrupt")):
        return 2
    return 1 if error is not None and error.secondary else 0
