"""Where all processes meet: every call of evenstep that they must reach together, checked before anything is combined.

Each meeting starts with one fixed-size exchange over the control group, whatever the call. So two processes that are
at different calls always meet, learn so, and say both lines of code, instead of waiting for each other for ever.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from evenstep.errors import MismatchError, PeerFailed, UsageError
from evenstep.record.activity import MEETING, Activity

_HEADER = 32  # bytes: 16 of the call's hash, 8 of the payload's length, 1 the signal that asked to stop, 7 spare
_DETAIL = 2048  # bytes of JSON that say what a process is at, sent only when calls differ
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep
    for path in (os.path.dirname(os.path.abspath(__file__)), os.path.abspath(torch.__file__))
)


def call_site() -> str:
    """`file.py:line` of the user's code that called evenstep, or torch that called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def ranks_text(ranks: list[int]) -> str:
    """`rank 0`, `ranks 1, 2`, or `ranks 1 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def by_value(said: Iterable[str]) -> dict[str, list[int]]:
    """Which ranks said each thing; `said` is in the order of the ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(said):
        ranks.setdefault(value, []).append(rank)
    return ranks


def peer_failed(rank: int, what: str) -> PeerFailed:
    """What the others raise where `rank` has said that it failed."""
    return PeerFailed(f"rank {rank} {what}", do=f"see the log of rank {rank}")


def lost_contact(rank: int, error: BaseException, when: str) -> PeerFailed:
    """What `error`, of torch.distributed on `rank`, comes down to: another process has gone."""
    said = f"rank {rank} lost contact with another process {when}"
    lost = PeerFailed(said, do="see the log of the process that ended first")
    lost.__cause__ = error
    return lost


@dataclass
class Meeting:
    """Processes of a run and the group over which they exchange small things. `group` is None for one process.

    `ranks` are those of the run's processes that meet, in order, where these are not all; then `rank` is this one's
    place among them, and `world_size` their number.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None = None
    ranks: list[int] | None = None
    last: str = field(default="the start of the script", init=False)  # what was reached last, for messages
    closed: bool = field(default=False, init=False)
    asked_to_stop: int = field(default=0, init=False)  # the signal that this process got
    activity: Activity | None = field(default=None, init=False)  # where it is told that this process waits
    _stop: int = field(default=0, init=False)

    @property
    def stop(self) -> int:
        """The signal by which some process was asked to stop (0: none), as all knew at the last meeting."""
        return self.asked_to_stop if self.group is None else self._stop

    @property
    def members(self) -> list[int]:
        """The ranks that meet."""
        return list(range(self.world_size)) if self.ranks is None else self.ranks

    def exchange(self, kind: str, payload: bytes = b"", *, signature: str = "", site: str | None = None) -> list[bytes]:
        """Each process's `payload`, by rank. Payloads may differ in length.

        Every process must be at the same `kind`, `signature` and line of the user's code (`site`, found by itself
        where None); else every process gets a MismatchError that names ranks, calls and lines. A process that has
        gone gives PeerFailed.
        """
        if self.closed:
            raise UsageError(f"{kind} was called after the run had ended", do="call it before run.close()")
        site = call_site() if site is None else site
        self.last = _place(kind, site)
        if self.group is None:
            return [payload]
        try:
            if self.activity is not None:
                with self.activity.during(MEETING):
                    return self._exchange(kind, payload, signature, site)
            return self._exchange(kind, payload, signature, site)
        except RuntimeError as error:
            if isinstance(error, PeerFailed):
                raise
            raise lost_contact(self.members[self.rank], error, f"while all met at {self.last}") from error

    def say(self, kind: str, said: object, *, signature: str = "", site: str | None = None) -> list[Any]:
        """What each process has `said` (plain JSON values), by rank. Meets as `exchange` does."""
        answers = self.exchange(kind, json.dumps(said).encode(), signature=signature, site=site)
        return [json.loads(answer) for answer in answers]

    def _exchange(self, kind: str, payload: bytes, signature: str, site: str) -> list[bytes]:
        digest = hashlib.blake2b("\0".join((kind, signature, site)).encode(), digest_size=16).digest()
        header = digest + len(payload).to_bytes(8, "little") + bytes([self.asked_to_stop])
        headers = self._gather(header, _HEADER)
        self._stop = max(self._stop, *(other[24] for other in headers))
        if any(other[:16] != digest for other in headers):
            detail = json.dumps({"kind": kind, "signature": signature[:900], "site": site[:200]}).encode()
            details = self._gather(detail, _DETAIL)
            raise _mismatch([json.loads(d.rstrip(b"\0")) for d in details], self.members)
        lengths = [int.from_bytes(other[16:24], "little") for other in headers]
        longest = max(lengths)
        if longest == 0:
            return [b""] * self.world_size
        return [data[:n] for data, n in zip(self._gather(payload, longest), lengths, strict=True)]

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        out = torch.empty(self.world_size * size, dtype=torch.uint8)
        dist.all_gather_single(out, mine, group=self.group)
        raw = out.numpy().tobytes()
        return [raw[r * size : (r + 1) * size] for r in range(self.world_size)]


def _place(kind: str, site: str) -> str:
    return f"{kind} ({site})" if site else kind


def _mismatch(calls: list[dict[str, str]], members: list[int]) -> MismatchError:
    same_call = len({(c["kind"], c["site"]) for c in calls}) == 1
    texts = (c["signature"] if same_call and c["signature"] else _place(c["kind"], c["site"]) for c in calls)
    said = [f"{ranks_text([members[k] for k in places])}: {text}" for text, places in by_value(texts).items()]
    if same_call:
        what = f"the processes called {_place(calls[0]['kind'], calls[0]['site'])} with different things"
        do = "give the same structure, shapes, dtypes and operation on every process"
    else:
        what = "the processes are at different calls"
        do = (
            "every process must reach the same calls of evenstep in the same order: take the call out of "
            "`if rank == 0` (or out of a loop that ends earlier on some processes), and keep only the print inside"
        )
    return MismatchError(what + "\n    " + "\n    ".join(said), do=do)
