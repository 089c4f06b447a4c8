"""Every mistake of `mistakes/` is found, by its right name and in its right place; without one none is found."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenstep.prove.layouts import LAYOUTS
from evenstep.prove.reasons import REASONS, REFUSALS
from tests.launch.launching import clean_environ
from tests.prove.prover import MISTAKES, OTHER_HASHES

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "evenstep"

# Script -> layouts beside one process, the finding, the module, and what the evidence says.
EXPECTED: dict[str, tuple[str, str | None, str | None, list[str]]] = {
    "no_mistake": ("2,3,loaders,again,resumed", None, None, []),
    "seeded_generator": ("2", "randomness", "1", ["1 (Noise) gives another output", "1.generator"]),
    "unseeded_generator": ("again", "randomness", None, ["the model another input", "default_rng()"]),
    "clock": ("again", "time", None, ["another loss", "time.time()"]),
    "order_of_a_set": ("again", "hash-order", None, ["PYTHONHASHSEED", 'NAMES = {"height"', "another batch"]),
    "forgotten_temperature": ("resumed", "unsaved-state", None, ["temperature is 1.62 undisturbed and 2.0 resumed"]),
    "data_by_rank": ("shard", "data-rank", None, ["another batch for micro-batch 1", 'os.environ.get("RANK"']),
    "data_by_loader": ("2,loaders", "data-loaders", None, ["another batch for micro-batch 0", "get_worker_info()"]),
    "data_that_counts": ("2,loaders", "data-state", None, ["self.given += 1"]),
    "running_mean": ("threads", "state", "1", ["1 (Centre)", "changes 1.mean"]),
    "threads_by_layout": ("2", "threads", None, ["2 and 1 threads", "torch.set_num_threads(2 if"]),
    "mean_for_a_sum": ("2", "not-additive", None, []),
    "divided_by_processes": ("stages", "rank", None, ["another loss for micro-batch 0", "/ run.world_size"]),
    "module_by_rank": ("2", "rank", "1", ["1 (Scale)", "1.by is 1.0 on 1 process and 1.5 here"]),
    "optimizer_on_one_rank": ("2", "one-rank", None, ["if run.rank == 0:"]),
    "scaled_rate": ("2,3", "learning-rate", None, ["lr is 0.01 on 1 process and 0.02 here", "1e-2 * run.world_size"]),
    "model_by_rank": ("2", "initialisation", None, ["torch.manual_seed(run.rank)"]),
    "model_by_layout": ("2", "initialisation", None, ["model.0.weight", "torch.manual_seed(run.world_size)"]),
    "rounded": ("3", "not-exact", "0", ["the sum of equal gradients differs in 0.weight"]),
    "gradients_times_processes": ("2", "gradients", None, ["between step.backward and the optimizer", "mul_("]),
    "batch_times_processes": ("2", "options", None, ["global_batch: 12 on 1 process, 24 here"]),
    "decay_by_processes": ("stages,shard", "weights", None, ["from equal gradients", "parameter.mul_("]),
}
FAILS_ALONE = ["mean_for_a_sum"]


class Provers:
    """Two processes that prove the scripts, half of them each; a proof is there as soon as its line is."""

    def __init__(self, folder: Path) -> None:
        slow_first = sorted(EXPECTED, key=lambda name: name not in OTHER_HASHES)
        quick = slow_first[-len(slow_first) * 3 // 5 :]
        self._found: dict[str, Any] = {}
        self._running: list[tuple[list[str], subprocess.Popen[str]]] = []
        for names in ([name for name in slow_first if name not in quick], quick):
            asked = [f"{name}:{EXPECTED[name][0]}" for name in names]
            words = [sys.executable, "-m", "tests.prove.prover", str(folder), *asked]
            process = subprocess.Popen(words, cwd=ROOT, env=clean_environ(), stdout=subprocess.PIPE, text=True)
            self._running.append((names, process))

    def __getitem__(self, name: str) -> dict[str, Any]:
        (process,) = (process for names, process in self._running if name in names)
        assert process.stdout is not None
        while name not in self._found:
            proof = json.loads(process.stdout.readline())
            self._found[proof["name"]] = proof
        found: dict[str, Any] = self._found[name]
        return found

    def close(self) -> None:
        for _, process in self._running:
            process.terminate()
            process.communicate()


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provers]:
    provers = Provers(tmp_path_factory.mktemp("proofs"))
    yield provers
    provers.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_mistake_is_found(name: str, proofs: Provers) -> None:
    _, finding, module, says = EXPECTED[name]
    proof = proofs[name]
    if finding is None:
        assert proof["identical"]
        assert proof["findings"] == []
        return
    assert not proof["identical"]
    (found,) = proof["findings"]
    assert (found["name"], found["module"]) == (finding, module)
    for words in says:
        assert any(words in line for line in found["evidence"]), found["evidence"]
    assert proof["layouts"][0]["verdict"] == ("failed" if name in FAILS_ALONE else "reference")


@pytest.mark.slow
def test_where_they_part_is_told(proofs: Provers) -> None:
    (found,) = proofs["seeded_generator"]["findings"]
    assert (found["step"], found["tensor"], found["micro_batch"]) == (1, "model.0.weight", 2)
    (found,) = proofs["forgotten_temperature"]["findings"]
    assert (found["step"], found["layout"]) == (3, "1 process, resumed")
    (found,) = proofs["optimizer_on_one_rank"]["findings"]
    assert "rank 0 and rank 1 differ" in found["message"]
    (found,) = proofs["scaled_rate"]["findings"]
    assert (found["layout"], found["others"]) == ("2 processes", ["3 processes"])
    assert proofs["data_by_loader"]["layouts"][1]["verdict"] == "identical"
    assert proofs["no_mistake"]["summary"] == "6 layouts, 4 steps: identical"


@pytest.mark.slow
def test_a_look_at_a_step_finds_nothing_where_there_is_nothing(proofs: Provers) -> None:
    looks = proofs["no_mistake"]["looks"]
    assert set(looks.values()) == {"nowhere"}, looks
    assert looks.keys() == LAYOUTS.keys()


def test_every_mistake_has_a_script_and_every_script_is_expected() -> None:
    assert {path.stem for path in MISTAKES.glob("*.py")} == EXPECTED.keys()


def test_each_refusal_that_is_known_is_said_by_one_error() -> None:
    """`_number` is told the beginning of its error."""
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if path.parent != SOURCE / "prove"]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    errors = [ast.unparse(call) for call in calls if ast.unparse(call.func).endswith(("Error", "_number"))]
    assert len(errors) > 200
    for phrase, name in REFUSALS:
        assert sum(phrase in error for error in errors) == 1, phrase
        assert name in REASONS
