"""Files of JSON objects, one a line, that survive a torn line: the form of events and of logged values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evenstep.errors import UsageError

SCHEMA = 1  # in each line, as "v"


def to_line(record: Mapping[str, object]) -> bytes:
    """`record` as one line of strict JSON: numbers that JSON lacks become "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_plain(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in `path`, in order; nothing if there is no such file. A torn line is skipped.

    A process that died while writing leaves the last line torn; the next start ends it and goes on below. UsageError
    for a line of a later evenstep.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict):
                continue
            if record.get("v") != SCHEMA:
                raise UsageError(
                    f"{path} has lines of schema {record.get('v')}; this evenstep reads {SCHEMA}",
                    do="read it with the evenstep that wrote it, or a later one",
                )
            yield record


def _plain(value: object) -> object:
    """`value` as JSON holds it: objects, lists, strings, numbers, booleans and null."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [_plain(item) for item in value]
    return str(value)
