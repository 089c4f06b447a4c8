"""docs/trackers.md: its recipes, offline, in a run that is killed and goes on: one id, all values, one talks."""

from __future__ import annotations

import json
import os
import re
import runpy
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstep.errors import PeerFailed
from evenstep.record.metrics import read_metrics
from evenstep.record.paths import RunPaths
from tests.ranks import RanksFailed, run_ranks

PAGE = (Path(__file__).parent.parent.parent / "docs" / "trackers.md").read_text()
RECIPES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STEPS = 16
SCRIPT = (
    f"""
import os, signal, torch
import evenstep
from pathlib import Path
from torch.utils.data import TensorDataset

def loss_fn(model, batch):
    return model(batch[0]).square().sum(), len(batch[0])

run = evenstep.start(global_batch=12, micro_batch=4, checkpoint_every=3)
model = run.prepare(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
steps = run.steps(TensorDataset(torch.randn(48, 4)), steps={STEPS})
run.restore(model=model, optimizer=optimizer)
"""
    + "\n".join(RECIPES)
    + """
for step in steps:
    result = step.backward(loss_fn)
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=result.loss)
    if step.number % 4 == 3:
        run.log(twice=2 * result.loss)
    if step.number == 10 and run.rank == 0 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
if run.rank == 0:
    assert len(rows) == sum(1 for _ in open("first/metrics.jsonl"))
"""
)


def train(place: Path) -> None:
    """In this process: the script, to its end."""
    os.chdir(place)
    os.environ.update(
        EVENSTEP_RUN="first",
        WANDB_MODE="offline",
        MLFLOW_TRACKING_URI=f"file:{place / 'mlruns'}",
        MLFLOW_ALLOW_FILE_STORE="true",
    )
    names = runpy.run_path("train.py")
    if "wandb" in names:
        names["wandb"].finish()
    names["run"].close()


def records(path: Path) -> Iterator[bytes]:
    """Of a .wandb file: a log in LevelDB's format, behind a header of 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def of_wandb(path: Path) -> tuple[set[str], dict[tuple[int, str], float]]:
    """The ids of the runs in a .wandb file, and the values by step and name."""
    from wandb.proto import wandb_internal_pb2

    ids, values = set(), {}
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            ids.add(record.run.run_id)
        if record.HasField("history"):
            row = {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = row["_step"]
            values.update({(step, name): value for name, value in row.items() if not name.startswith("_")})
    return ids, values


def of_mlflow(store: Path) -> tuple[set[str], dict[tuple[int, str], float]]:
    """The ids of the runs in a store of files, and the values by step and name."""
    runs = [path.parent for path in store.glob("*/*/metrics")]
    values: dict[tuple[int, str], float] = {}
    for path in (path for run in runs for path in (run / "metrics").iterdir()):
        for line in path.read_text().splitlines():
            _, value, step, *_ = line.split()
            assert values.setdefault((int(step), path.name), float(value)) == float(value), "done again, it is the same"
    return {run.name for run in runs}, values


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of wandb and mlflow, and what they import
def test_trackers_go_on_with_one_id_and_have_every_value(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises((PeerFailed, RanksFailed)):
        run_ranks(train, 2, tmp_path)
    assert (tmp_path / "killed").exists()
    run_ranks(train, 1, tmp_path)
    paths = RunPaths(tmp_path / "first")
    logged = {(row["step"], name): v for row in read_metrics(paths.metrics_jsonl) for name, v in row["values"].items()}
    assert len(logged) == STEPS + STEPS // 4
    files = sorted((paths.root / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 2, "one for each start, whatever the number of processes"
    ids, values = of_wandb(files[-1])
    assert values == logged
    assert ids == {(paths.root / "wandb-run").read_text()} == {path.stem.removeprefix("run-") for path in files}
    ids, values = of_mlflow(tmp_path / "mlruns")
    assert values == logged
    assert ids == {(paths.root / "mlflow-run").read_text()}
