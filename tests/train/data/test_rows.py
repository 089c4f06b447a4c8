"""Rows of data sets that are put together: read at once where the parts are, and as each of them reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from evenstep.plan.order import Fixed
from evenstep.plan.schedule import Schedule
from evenstep.train.data.samples import Samples
from tests.train.data.test_reading import Drawing, DrawingMany, read, same

stack: Any = StackDataset  # of whatever has rows, not of data sets of torch's alone


class Own(DrawingMany):
    """Reads by its own `__getitem__`, though it inherits a `__getitems__`."""

    def __getitem__(self, index: Any) -> Any:
        return index, torch.rand(())


def test_what_is_put_together_is_read_at_once_where_its_parts_are(tmp_path: Path) -> None:
    calls: list[list[int]] = []

    class Rows(list[Any], Dataset[Any]):  # type: ignore[misc]
        def __getitems__(self, indices: list[int]) -> list[Any]:
            calls.append(indices)
            return [self[i] for i in indices]

    both: Any = ConcatDataset([Rows(range(6)), Subset(Rows(range(100, 110)), [9, 1, 2])])
    schedule = Schedule(9, 5, 5, epochs=1)
    found = read(both, schedule, order=Fixed(np.array([7, 0, 6, 5, 8, 1, 2, 3, 4])))
    assert [batch.tolist() for batch in found.values()] == [[101, 0, 109, 5, 102], [1, 2, 3, 4]]
    assert calls == [[0, 5], [1, 9, 2], [1, 2, 3, 4]]
    array = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(9, 2))
    array[:] = np.arange(18).reshape(9, 2)
    array.flush()
    mapped = np.memmap(tmp_path / "rows", np.float32, "r", shape=(9, 2))
    pairs: Any = stack(mapped, torch.arange(9))
    named: Any = stack(x=mapped, y=both)
    for data, kept in [(mapped, np.array(mapped)), (pairs, TensorDataset(torch.tensor(mapped), torch.arange(9)))]:
        one, other = read(data, schedule), read(kept, schedule)
        assert all(same(one[k], other[k]) for k in other)
        assert samples_of(data).draws_nothing
    assert same(read(named, schedule)[0, 0]["x"], read(mapped, schedule)[0, 0])
    assert samples_of(mapped)._at_once
    assert samples_of(named)._at_once
    assert not samples_of(ConcatDataset([both, Drawing(2)]))._at_once
    assert not samples_of(Own(3))._at_once
    own = read(Own(9), schedule)
    assert len({x.item() for _, noise in own.values() for x in noise}) == 9


def samples_of(data: Any) -> Any:
    return Samples(data, None, 0)
