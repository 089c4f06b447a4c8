"""What people do beside plain training, each as an example of a page: one and two processes, one fingerprint.

The scripts run in forked ranks, where torch is imported already; `test_examples.py` starts scripts as a user does.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import peft  # noqa: F401  # this and the like once, before the forks
import pytest
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
import transformers
from safetensors.torch import load_file

from evenstep.errors import LossError
from evenstep.record.metrics import read_metrics
from evenstep.record.paths import RunPaths
from tests.ranks import run_ranks
from tests.train.scripts import training_run

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SHORT = {
    "ema": ["--epochs", "1"],
    "early_stopping": ["--patience", "1"],
    "gradient_checkpointing": ["--steps", "6"],
    "compiled": ["--steps", "6", "--backend", "eager"],  # test_compiling.py has inductor
    "lora": ["--steps", "4"],
}
MARK = "# evenstep"
OURS = re.compile(
    r"(?<![-.])\b(evenstep|run|steps|steps_of_epoch)\b"
)  # names that a script for one process does not have

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning"),  # of transformers
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's own
]


def train(name: str, directory: Path) -> dict[str, Any]:
    """Runs the example to its end, in this process; its global names. `directory` is the run's."""
    os.environ["EVENSTEP_RUN"] = str(directory)
    sys.argv = [f"{name}.py", *SHORT[name]]
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    names["run"].close()
    return names


def fingerprint(directory: Path) -> str:
    found: str = json.loads(RunPaths(directory).finished.read_text())["fingerprint"]
    return found


def on_one_and_two_processes(name: str, place: Path) -> list[dict[str, Any]]:
    """The values that were logged, on each; the fingerprints are equal."""
    found = []
    for processes in (1, 2):
        run_ranks(lambda p=processes: train(name, place / str(p)) and None, processes)
        found.append([row["values"] for row in read_metrics(RunPaths(place / str(processes)).metrics_jsonl)])
    assert fingerprint(place / "1") == fingerprint(place / "2")
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("name", [*SHORT, "transformers_gpt2"])
def test_an_example_is_a_page_and_marks_what_differs(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 60
    code = lines[lines.index('"""', 1) + 1 :]
    marked = [line for line in code if MARK in line]
    assert [line for line in code if OURS.search(line.partition("#")[0])] == [
        line for line in marked if OURS.search(line.partition("#")[0])
    ]
    assert len(marked) <= 14


def test_an_average_of_the_weights(tmp_path: Path) -> None:
    values = on_one_and_two_processes("ema", tmp_path)
    assert 0.1 < values[-1]["accuracy_of_average"] != values[-1]["accuracy"]


def test_early_stopping_keeps_the_best_model(tmp_path: Path) -> None:
    def stopped() -> tuple[float, int, int]:
        names = train("early_stopping", tmp_path / "again")
        saved = load_file(RunPaths(tmp_path / "again").model)
        assert all((saved[key] == value).all() for key, value in names["state"].weights.items())
        return names["state"].best, names["state"].best_epoch, names["epoch"]

    def in_stages() -> None:
        os.environ["EVENSTEP_STAGES"] = "2"
        train("early_stopping", tmp_path / "stages")

    on_one_and_two_processes("early_stopping", tmp_path)
    run_ranks(in_stages, 2)
    assert fingerprint(tmp_path / "stages") == fingerprint(tmp_path / "1"), "each process kept its part of the weights"
    (found,) = run_ranks(stopped, 1)
    best, best_epoch, epoch = found
    assert best > 0.8
    assert epoch == best_epoch + 1


def test_blocks_that_are_computed_again(tmp_path: Path) -> None:
    values = on_one_and_two_processes("gradient_checkpointing", tmp_path)
    assert values[-1]["loss"] < values[0]["loss"]


def test_a_compiled_model(tmp_path: Path) -> None:
    values = on_one_and_two_processes("compiled", tmp_path)
    assert values[-1]["loss"] < values[0]["loss"]


def test_adapters(tmp_path: Path) -> None:
    on_one_and_two_processes("lora", tmp_path)
    saved = load_file(tmp_path / "2" / "adapters" / "adapter_model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)


def test_a_model_that_knows_nothing_of_num_items_in_batch_is_refused(tmp_path: Path) -> None:
    """It returns a mean whatever it is given, and says nothing."""

    def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
        return model(**batch, num_items_in_batch=1).loss, len(batch["labels"])

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    with training_run(tmp_path, global_batch=4) as run:
        config = transformers.BertConfig(**sizes, vocab_size=16, num_labels=3)
        run.prepare(transformers.BertForSequenceClassification(config))
        samples = [{"input_ids": torch.arange(6), "labels": label} for label in (0, 1, 2, 0)]
        loop = iter(run.steps(samples, epochs=1))
        step = next(loop)
        with pytest.raises(LossError, match="not additive over samples"):
            step.backward(loss_fn)
