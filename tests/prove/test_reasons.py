"""From what was seen to a name, where no small script shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenstep.errors import LossError
from evenstep.prove.parting import Parting, parting
from evenstep.prove.reasons import known_mistake, of_failure, of_itself, of_layout, of_resume
from evenstep.prove.suspects import loop_at, names_in, suspects
from evenstep.train.loss import leaf

SOURCE = """import os, time

class Net(nn.Module):
    def __init__(self):
        self.scale = 1

    def forward(self, x):
        self.scale += 1
        return x * float(os.environ["RANK"])

def train(run, steps):
    began = time.time()
    for step in steps:
        if run.rank == 0:
            print(hash("a"), {1, 2})
        while True:
            time.time()
"""


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Parting("model", module="0", module_class="Linear", exact=False), "nondeterministic-kernel"),
        (Parting("sum", names=("0.weight",), module="0", exact=False), "nondeterministic-kernel"),
        (Parting("model", module="0", module_class="Linear", exact=True), "randomness"),
        (Parting("nowhere"), "randomness"),
    ],
)
def test_a_layout_that_differs_from_itself(where: Parting, name: str) -> None:
    assert of_itself("1 process, again", 1, where, hashes=False).name == name
    assert of_itself("1 process, again", 1, where, hashes=True).name == "hash-order"


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Parting("model", module="1", module_class="SyncBatchNorm"), "batch-statistics"),
        (Parting("sum", names=("0.weight",), exact=False), "not-exact"),
        (Parting("sum", names=("0.weight",)), "unknown"),
        (Parting("data", micro_batch=1), "data-rank"),
        (Parting("data", micro_batch=1, stream=True), "stream"),
        (Parting("before", names=("model.weight",)), "initialisation"),
        (Parting("before", names=("optimizer.param_groups[0].lr",)), "learning-rate"),
        (Parting("nowhere"), "unknown"),
    ],
)
def test_a_layout_that_differs_from_one_process(where: Parting, name: str) -> None:
    finding = of_layout("2 processes", 1, where, loaders=False)
    assert finding.name == name
    assert finding.evidence
    assert finding.what
    assert finding.do


def test_what_the_code_at_fault_uses_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def loss_fn(model, batch):\n    return scale * model(batch).sum(), len(batch)\n")
    lines = [str(file), 1, 2]
    changed = {"calls": ["3", "4"]}
    values = {"other": ("1", "2"), "scale": ("1.0", "0.5")}
    where = Parting("loss", lines=lines, changed=changed, values=values)
    finding = of_layout("2 processes", 1, where, loaders=False)
    assert finding.name == "rank"
    assert finding.evidence[1:] == ("scale is 1.0 on 1 process and 0.5 here",)
    assert "scale is 1.0 undisturbed and 0.5 resumed" in of_resume("resumed", 3, where).evidence[1]
    begun = Parting("before", names=("model.weight",))
    assert [of_resume("resumed", step, begun).name for step in (1, 3)] == ["initialisation", "unsaved-state"]
    assert of_layout("2 processes", 1, Parting("loss", lines=lines, changed=changed), loaders=False).name == "state"


def test_a_failure_that_is_not_known() -> None:
    assert of_failure("2 processes", "evenstep.errors.MismatchError", "rank 0 is at a, rank 1 at b").name == "one-rank"
    assert of_failure("2 processes", "ValueError", "no").name == "failed"


def test_a_mistake_is_known_by_words_of_evenstep_alone() -> None:
    wrong = {
        "a sum of shape (2,); expected one number": (torch.ones(2), 2),
        "a weight that is a tensor of shape (2,); expected one number": (torch.tensor(1.0), torch.ones(2)),
        "a weight that is a str; expected a number": (torch.tensor(1.0), "many"),
        "a tensor of shape () alone; expected (sum over samples, weight)": torch.tensor(1.0),
    }
    for says, returned in wrong.items():
        with pytest.raises(LossError) as caught:
            leaf(returned, 0)
        assert says in caught.value.message
        assert known_mistake("evenstep.errors.LossError", caught.value.message) == "not-additive"
        assert known_mistake("ValueError", caught.value.message) is None
    metric = "the loss function returned, for micro-batch 0, as metric 'x' a tensor of shape (2,); expected one number"
    assert known_mistake("evenstep.errors.LossError", metric) is None
    data = "rank 1 has a, rank 0 has b: the data set, its length, its samples or its order differs between processes"
    assert known_mistake("evenstep.errors.UsageError", data) == "data-rank"
    stream = "lane 3 of the stream does not give the same samples again: block 1 of epoch 0 has the hash a, and had b"
    assert known_mistake("evenstep.errors.DataError", stream) == "stream"
    stages = (
        "stage 0 ended where a was called, and stage 1 begins with b: what the model does differs between processes"
    )
    assert known_mistake("evenstep.errors.UsageError", stages) is None


def test_suspects_are_found_by_lines_and_kind(tmp_path: Path) -> None:
    file = str(tmp_path / "a.py")
    Path(file).write_text(SOURCE)
    assert [one.line for one in suspects([file, 3, 9], "rank")] == [9]
    assert [one.line for one in suspects([file, 3, 9], "state")] == [8]
    assert [one.line for one in suspects([file], "time")] == [12, 17]
    assert [one.line for one in suspects([file], "hash")] == [15]
    assert str(suspects([file, 3, 9], "rank")[0]).endswith('a.py:9: return x * float(os.environ["RANK"])')
    assert loop_at([file, 13, 13]) == [file, 13, 17]
    assert loop_at([file, 17, 17]) == [file, 16, 17]
    assert loop_at([file, 12, 12]) == [file, 12, 12]
    assert {"environ", "x", "scale"} <= names_in([file, 3, 9])
    assert suspects(None, "rank") == suspects([str(tmp_path / "none.py"), 1, 9], "rank") == []


def test_the_module_around_code_between_two_modules_is_named() -> None:
    """Net multiplies between its two layers: the second one's input differs, the Net's does not."""

    def events(middle: str) -> list[dict[str, object]]:
        def call(module: str, parent: str | None, got: str, gave: str) -> dict[str, object]:
            about = {"kind": "forward", "call": 0, "micro_batch": 0, "nth": 0, "lines": None}
            return {**about, "module": module, "kind_of_module": "K", "parent": parent, "got": got, "hash": gave}

        read = {"kind": "batch", "call": 0, "micro_batch": 0, "hash": "b", "threads": 1}
        return [read, call("0", "Net", "b", "h"), call("1", "Net", middle, middle), call("Net", None, "b", middle)]

    found = parting([events("m")], [events("other")])
    assert (found.place, found.module, found.module_class) == ("model", "Net", "K")
    assert parting([events("m")], [events("m")]).place == "nowhere"
