"""What of a stream must be the same on every process, and again after a resume."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evenstep.errors import IdentityError, UsageError
from evenstep.train.data.lane import Mark
from evenstep.train.data.lane_reader import Found

ALIKE = (
    "let it depend on lane, lanes and epoch alone: not on the rank, nor on files that only one host has; give a "
    "shuffle of its own a seed"
)
_NAMED = 4  # names in a message, at most


def of_stream(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a checkpoint says of a stream."""
    saved: Mapping[str, Any] | None = about.get("stream")
    if saved is None:
        raise IdentityError(
            "the checkpoint was made with a map-style data set, now there is a stream",
            do="go on with the same data, or start another run directory (--run DIR)",
        )
    return saved


def refuse_other(saved: Mapping[str, Any] | None, now: Mapping[str, Any], parts: str) -> None:
    """IdentityError where a checkpoint was made with another stream than that of which `now` tells."""
    for name, value in now.items():
        if saved is None or saved[name] == value:
            continue
        what = f"the checkpoint was made with a stream of {name}={saved[name]}, now it is {value}"
        if name == "source" and "parts" in saved:
            what = "; ".join([what, *changes(unpacked(saved["parts"]), unpacked(parts), "gone", "new")])
        raise IdentityError(
            f"{what}: the rest would be another",
            do="go on with the same stream and options, or start another run directory (--run DIR)",
        )


def packed(parts: Sequence[str]) -> str:
    """`parts` as a short text: there can be many thousands."""
    return base64.b64encode(zlib.compress(json.dumps(parts).encode())).decode()


def unpacked(parts: str) -> list[str]:
    """What was `packed`."""
    found: list[str] = json.loads(zlib.decompress(base64.b64decode(parts)))
    return found


def changes(before: Sequence[str], now: Sequence[str], gone: str, new: str) -> list[str]:
    """How lists of names differ, for people."""
    said = []
    for what, names in ((gone, Counter(before) - Counter(now)), (new, Counter(now) - Counter(before))):
        some = [*names.elements()]
        if some:
            more = f" and {len(some) - _NAMED} more" if len(some) > _NAMED else ""
            said.append(f"{what}: {', '.join(some[:_NAMED])}{more}")
    if not said:
        said += [f"another order: {b}, then {n}" for b, n in zip(before, now, strict=True) if b != n][:1]
    return said


def hash_of(beginning: Mark | None) -> str:
    """Of the first records of a lane; "" for records of types unknown."""
    return beginning.hash if beginning is not None else "none"


def beginnings(read: Mapping[int, Found]) -> dict[str, str]:
    """By lane, the hashes of the first samples, where these are not all the same."""
    return {
        str(lane): found.beginning.hash
        for lane, found in read.items()
        if found.beginning is not None and found.beginning.hash and not found.beginning.alike
    }


def refuse_unlike(begun: Sequence[Mapping[str, str]], epoch: int) -> None:
    """UsageError where processes find different samples at the beginning of one lane. `begun`: by rank, the hashes."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, hashes in enumerate(begun):
        for lane, found in hashes.items():
            first, before = seen.setdefault(lane, (rank, found))
            if found and before and found != before:
                raise UsageError(
                    f"lane {lane} of the stream begins with other samples on rank {rank} than on rank {first} (epoch "
                    f"{epoch}: hash {found}, and {before})",
                    do=ALIKE,
                )


def refuse_alike(found: Iterable[Mapping[str, str]]) -> None:
    """UsageError where two lanes begin with the same samples. `found`: the `beginnings` of all processes."""
    seen: dict[str, int] = {}
    by_lane = {int(lane): beginning for part in found for lane, beginning in part.items()}
    for lane, beginning in sorted(by_lane.items()):
        if beginning in seen:
            raise UsageError(
                f"lanes {seen[beginning]} and {lane} of the stream begin with the same samples: each sample would be "
                "read several times",
                do="let make(lane, lanes, epoch) read a part of its own in each lane: files[lane::lanes], or "
                "itertools.islice(records, lane, None, lanes); of files: is one there twice?",
            )
        seen[beginning] = lane
