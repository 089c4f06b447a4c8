"""Tar files in webdataset's layout, read sample by sample, from any place on."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Sequence
from typing import Any

from evenstep.train.data.file_readers import END, Reader, open_file

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # as webdataset has it: the key ends at the first dot
_CHUNK = 128 * tarfile.BLOCKSIZE  # bytes of an archive's end at a time


class Tar(Reader):
    """Samples: the neighbouring members of one key, {"__key__": key, suffix: bytes}.

    Archives that were written one behind the other (`cat a.tar b.tar`) are read to the last one's end.
    """

    def __init__(self, path: str, at: Any, columns: Sequence[str] | None) -> None:
        self._file = open_file(path)
        try:
            self._open(at or 0)
            self._member = self._advance()
        except Exception:
            self._file.close()
            raise

    @property
    def at(self) -> int:
        return self._tar.offset if self._member is None else self._member.offset

    def read(self) -> Any:
        return self._sample(keep=True)

    def skip(self) -> bool:
        return self._sample(keep=False) is not END

    def close(self) -> None:
        self._tar.close()
        self._file.close()

    def _open(self, at: int) -> None:
        self._file.seek(at)
        self._tar = tarfile.open(fileobj=self._file, mode="r:")  # what is compressed is opened as such

    def _sample(self, keep: bool) -> Any:
        if self._member is None:
            return END
        key = _split(self._member.name)[0]
        sample: dict[str, Any] = {"__key__": key}
        while self._member is not None:
            there, suffix = _split(self._member.name)
            if there != key or (self._begins and len(sample) > 1):
                break
            if suffix in sample:
                raise ValueError(f"two members of {key!r} have the suffix {suffix!r}")
            opened = self._tar.extractfile(self._member) if keep else None
            sample[suffix] = opened.read() if opened is not None else None
            self._member = self._advance()
        return sample

    def _advance(self) -> tarfile.TarInfo | None:
        """The next member that is part of a sample."""
        self._begins = False  # whether it is the first of a further archive
        while True:
            member = self._tar.next()
            self._tar.members.clear()  # type: ignore[attr-defined]  # a large file has many
            if member is None:
                if not self._open_next():
                    return None
                self._begins = True
            elif member.isdir() or not _NAME.fullmatch(member.name):
                continue
            elif member.isfile():
                return member
            else:
                raise ValueError(
                    f"{member.name!r} is not a file but refers to {member.linkname!r}: write links out "
                    "(tar --dereference --hard-dereference)"
                )

    def _open_next(self) -> bool:
        """Go on to the archive behind this one's end. False if there is none.

        ValueError where this one does not end as tar files do, with zeros: all else is an end for tarfile, too.
        """
        at = self._tar.offset
        self._file.seek(at)
        block = self._file.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE or any(block):
            raise ValueError(f"there is no member of a tar file at byte {at}, nor its end: it is torn")
        at += len(block)
        while chunk := self._file.read(_CHUNK):
            if rest := chunk.lstrip(b"\0"):
                zeros = len(chunk) - len(rest)
                self._open(at + zeros - zeros % tarfile.BLOCKSIZE)
                return True
            at += len(chunk)
        return False


def _split(name: str) -> tuple[str, str]:
    found = _NAME.fullmatch(name)
    assert found is not None
    return found[1], found[2].lower()
