"""Files of text, JSON lines and parquet, read record by record, from any place on."""

from __future__ import annotations

import codecs
import gzip
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO, Any

from evenstep.errors import UsageError

_ROWS = 256  # of a parquet file that are made Python objects at a time

END = object()


class Reader(ABC):
    """One file, from a place (None: its beginning) on."""

    @abstractmethod
    def __init__(self, path: str, at: Any, columns: Sequence[str] | None) -> None: ...

    @property
    @abstractmethod
    def at(self) -> Any:
        """The place of the next record, as plain values."""

    @abstractmethod
    def read(self) -> Any:
        """The next record, or END."""

    @abstractmethod
    def skip(self) -> bool:
        """Passes over the next record. False if there is none."""

    @abstractmethod
    def close(self) -> None: ...


class Text(Reader):
    """Lines of UTF-8, without their ends; nor is a byte order mark at the beginning of the file part of one."""

    def __init__(self, path: str, at: Any, columns: Sequence[str] | None) -> None:
        self._file, self._at = open_file(path), at or 0
        if self._at:
            self._file.seek(self._at)

    @property
    def at(self) -> int:
        return self._at

    def read(self) -> Any:
        line = self._line()
        return line.decode().rstrip("\r\n") if line else END

    def skip(self) -> bool:
        return bool(self._line())

    def close(self) -> None:
        self._file.close()

    def _line(self) -> bytes:
        line, first = self._file.readline(), self._at == 0
        self._at += len(line)
        return line.removeprefix(codecs.BOM_UTF8) if first else line


class JsonLines(Text):
    """A JSON value a line; blank lines are no records."""

    def read(self) -> Any:
        line = self._line()
        return json.loads(line) if line else END

    def _line(self) -> bytes:
        line = super()._line()
        while line and not line.strip():
            line = super()._line()
        return line


class Parquet(Reader):
    """Rows, as dicts."""

    def __init__(self, path: str, at: Any, columns: Sequence[str] | None) -> None:
        self._file = pyarrow_parquet().ParquetFile(path)
        self._columns = columns
        names = self._file.schema_arrow.names
        missing = [name for name in columns or () if name not in names and name.partition(".")[0] not in names]
        if missing:  # pyarrow would leave them out
            self._file.close()
            raise ValueError(f"it has no column {', '.join(missing)}, but {', '.join(names)}")
        self._group: int = at[0] if at else 0  # of the next record
        self._row: int = at[1] if at else 0
        self._rows: list[Any] = []
        self._taken = 0
        self._batches = self._from(self._group, self._row)

    @property
    def at(self) -> list[int]:
        return [self._group, self._row]

    def read(self) -> Any:
        if self._taken == len(self._rows):
            found = next(self._batches, None)
            if found is None:
                return END
            self._group, self._row, self._rows = found
            self._taken = 0
        record = self._rows[self._taken]
        self._taken += 1
        self._row += 1
        return record

    def skip(self) -> bool:
        return self.read() is not END

    def close(self) -> None:
        self._batches.close()
        self._file.close()

    def _from(self, group: int, row: int) -> Any:
        for g in range(group, self._file.num_row_groups):
            at = 0
            for batch in self._file.iter_batches(_ROWS, row_groups=[g], columns=self._columns):
                skipped = max(0, min(row - at, len(batch))) if g == group else 0
                if skipped < len(batch):
                    yield g, at + skipped, batch.slice(skipped).to_pylist()
                at += len(batch)


def open_file(path: str) -> IO[bytes]:
    """`path` for reading, of which the content is seen where it is compressed by gzip."""
    if path.endswith((".gz", ".tgz")):
        return gzip.open(path)  # type: ignore[return-value]
    return open(path, "rb", buffering=1 << 16)


def pyarrow_parquet() -> Any:
    """pyarrow.parquet. UsageError where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError("parquet files need pyarrow, which is not installed", do="pip install pyarrow") from error
    return pyarrow.parquet
