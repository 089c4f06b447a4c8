"""What must be the same for a run to go on with the same bits: global batch, seed, torch version, device, ..."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from evenstep.errors import IdentityError
from evenstep.record.publish import write_whole

SCHEMA = 1

Scalar = str | int | float | bool | None
Identity = Mapping[str, Scalar]


def write_identity(path: Path, identity: Identity) -> None:
    """Publish `identity` as `path`. MachineError if the disk does not take it."""
    text = json.dumps({"v": SCHEMA, "identity": dict(identity)}, indent=2) + "\n"
    write_whole(path, text.encode())


def read_identity(path: Path) -> dict[str, Scalar] | None:
    """The identity in `path`, or None if there is no such file. IdentityError if it cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        content = json.loads(data)
        version = content["v"]
        identity = content["identity"]
        if not isinstance(identity, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        raise IdentityError(
            f"{path} is damaged: it holds no identity", do="start another run directory (--run DIR)"
        ) from error
    if version != SCHEMA:
        raise IdentityError(
            f"{path} has schema {version}; this evenstep reads {SCHEMA}",
            do="go on with the evenstep that wrote it, or start another run directory (--run DIR)",
        )
    return identity


def differences(
    old: Identity, new: Identity, where_old: str = "in the run directory", where_new: str = "now"
) -> list[str]:
    """One readable line for each name whose value differs, in the order of `new`, then `old`. Empty: the same."""
    names = [*new, *(name for name in old if name not in new)]
    lines = []
    for name in names:
        before, after = _shown(old, name), _shown(new, name)
        if before != after:
            lines.append(f"{name}: {before} {where_old}, {after} {where_new}")
    return lines


def _shown(identity: Identity, name: str) -> str:
    return json.dumps(identity[name]) if name in identity else "not given"
