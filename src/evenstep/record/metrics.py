"""Logged values, in three forms: JSON lines (the truth), CSV, and TensorBoard's curves."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evenstep.errors import MachineError
from evenstep.record.append import AppendFile
from evenstep.record.lines import SCHEMA, read_lines, to_line
from evenstep.record.paths import RunPaths
from evenstep.record.publish import whole_file
from evenstep.record.tensorboard import ScalarWriter


class MetricsWriter:
    """Writes logged values into the run directory. For one process.

    A disk that takes no more never stops training: values are dropped and `on_error` is told once, with the reason.
    What is in the JSON lines is in the CSV as soon as there is room again.
    """

    def __init__(self, paths: RunPaths, *, on_error: Callable[[str], None] | None = None) -> None:
        self._paths = paths
        self._on_error = on_error
        self._lines = AppendFile(paths.metrics_jsonl, self._complain, line_end=b"\n")
        self._csv = AppendFile(paths.metrics_csv, self._complain)
        self._curves = ScalarWriter(paths.tensorboard, on_error=self._complain)
        self._columns: dict[str, None] = {}  # an ordered set
        self._csv_is_stale = paths.metrics_jsonl.exists()  # another process may have died while adding a row

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Add `values` by name, of after `step` optimizer steps, in `epoch`: a row of their own."""
        values = {name: float(value) for name, value in values.items()}
        if self._lines.append(to_line({"v": SCHEMA, "step": step, "epoch": epoch, "values": values})):
            if self._csv_is_stale or not values.keys() <= self._columns.keys():
                self._columns.update(dict.fromkeys(values))
                self._write_csv()
            else:
                self._csv_is_stale = not self._csv.append(_row([step, epoch, *map(values.get, self._columns)]))
        self._curves.write(step, values)

    def rows(self, step: int) -> list[dict[str, Any]]:
        """What has been written, by this process or others before it, up to `step`."""
        return [row for row in read_metrics(self._paths.metrics_jsonl) if row["step"] <= step]

    def cut(self, step: int) -> None:
        """Drop the rows of steps after `step`: training goes on there, and will write them again.

        MachineError if the disk does not take what stays.
        """
        self._lines.close()
        kept = (row for row in read_lines(self._paths.metrics_jsonl) if row["step"] <= step)
        if self._paths.metrics_jsonl.exists():
            with whole_file(self._paths.metrics_jsonl) as file:
                file.writelines(map(to_line, kept))
            self._write_csv()
        if self._paths.tensorboard.exists():
            self._curves.purge(step + 1)

    def close(self) -> None:
        """Close the files."""
        for file in (self._lines, self._csv, self._curves):
            file.close()

    def _write_csv(self) -> None:
        """Publish the CSV anew, with all columns, from the JSON lines."""
        self._csv.close()
        self._csv_is_stale = True
        for row in read_metrics(self._paths.metrics_jsonl):
            self._columns.update(dict.fromkeys(row["values"]))
        try:
            with whole_file(self._paths.metrics_csv) as file:
                file.write(_row(["step", "epoch", *self._columns]))
                for row in read_metrics(self._paths.metrics_jsonl):
                    file.write(_row([row["step"], row["epoch"], *map(row["values"].get, self._columns)]))
        except MachineError as error:
            self._complain(f"{error.message}; training goes on without it")
        else:
            self._csv_is_stale = False

    def _complain(self, reason: str) -> None:
        if self._on_error is not None:
            on_error, self._on_error = self._on_error, None
            on_error(reason)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl, in order: step, epoch and values by name, floats that are not finite too."""
    for row in read_lines(path):
        row["values"] = {name: float(value) for name, value in row["values"].items()}
        yield row


def _row(cells: list[object]) -> bytes:
    text = io.StringIO()
    # None, a value that this row does not have, becomes an empty cell; floats are written so that they read back.
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
