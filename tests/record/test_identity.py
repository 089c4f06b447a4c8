from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.errors import IdentityError
from evenstep.record.identity import Identity, differences, read_identity, write_identity

IDENTITY: Identity = {"global batch": 256, "seed": 0, "torch": "2.13.0", "exact": True, "dtype": None, "x": 0.1}


def test_an_identity_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    assert read_identity(path) is None
    write_identity(path, IDENTITY)
    assert read_identity(path) == IDENTITY
    assert differences(IDENTITY, read_identity(path) or {}) == []


def test_differences_are_readable() -> None:
    new = {**IDENTITY, "global batch": 128, "exact": 1, "device": "cuda"}
    del new["dtype"]
    assert differences(IDENTITY, new) == [
        "global batch: 256 in the run directory, 128 now",
        "exact: true in the run directory, 1 now",
        'device: not given in the run directory, "cuda" now',
        "dtype: null in the run directory, not given now",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b"null", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b'{"v": 1}', "damaged"),
        (b'{"v": 1, "identity": 3}', "damaged"),
        (b'{"v": 2, "identity": {}}', "schema 2; this evenstep reads 1"),
    ],
)
def test_what_is_no_identity_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "identity.json"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=message):
        read_identity(path)
