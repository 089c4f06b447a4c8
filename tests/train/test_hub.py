"""Models of transformers and peft, averages of weights and checkpointed blocks: the same bits on every layout."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from evenstep.errors import UsageError
from evenstep.record.paths import RunPaths
from evenstep.train.run import Run
from tests.train.layouts import LAYOUTS, copy_checkpoint, each
from tests.train.scripts import adamw, fingerprints, training_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning"),  # of transformers
]

CHOSEN = ["2 processes", "3 processes", "2 shards", "2 stages"]
STEPS = 4
# (option, training): what is not offered, and words of the error that says so.
REFUSED = {("stages", "average"): "a second model was prepared"}
NUMBERS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}


class Texts:
    """Tokens of different lengths; the first two are a prompt that does not count."""

    def __init__(self, length: int = 15) -> None:
        generator = torch.Generator().manual_seed(7)
        sizes = torch.randint(4, 13, (length,), generator=generator).tolist()
        self.rows = [torch.randint(0, 32, (size,), generator=generator) for size in sizes]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    batch = {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long()}
    labels[:, :2] = -100
    return {**batch, "labels": labels}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    n = (batch["labels"][:, 1:] != -100).sum()
    return model(**batch).loss * n, n


def by_items(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The sum as transformers gives it: its loss is divided by `num_items_in_batch`."""
    return model(**batch, num_items_in_batch=1).loss, (batch["labels"][:, 1:] != -100).sum()


def gpt2(**more: Any) -> Any:
    return GPT2LMHeadModel(GPT2Config(**NUMBERS, n_positions=16, n_embd=16, n_layer=3, n_head=2, **more))


def llama() -> Any:
    config = LlamaConfig(
        **NUMBERS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def checkpointed(model: Any, **arguments: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False, **arguments})
    return model


def lora() -> Any:
    config = LoraConfig(r=2, lora_dropout=0.2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(gpt2(), config)


def begin(directory: Path, options: Mapping[str, Any]) -> Run:
    return training_run(directory, global_batch=8, checkpoint_every=2, keep=STEPS, **options)


def train(
    directory: Path,
    options: Mapping[str, Any],
    make: Callable[[], Any],
    loss: Callable[..., Any] = loss_fn,
    save: str = "all",
    after: Callable[[Run, Any, Path], None] | None = None,
) -> list[str]:
    with begin(directory, options) as run:
        model = run.prepare(make(), save=save)
        optimizer = adamw(p for p in model.parameters() if p.requires_grad)
        steps = run.steps(Texts(), steps=STEPS, collate=collate)
        run.restore(model=model, optimizer=optimizer)
        for step in steps:
            step.backward(loss)
            run.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if after is not None and run.rank == 0:
            after(run, model, directory)
    return fingerprints(run)


def train_average(directory: Path, options: Mapping[str, Any]) -> list[str]:
    """With an average of the weights that decides when to stop."""
    with begin(directory, options) as run:
        model = gpt2()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        model, average = run.prepare(model, average)
        optimizer = adamw(model.parameters())
        steps = run.steps(Texts(), steps=50, collate=collate)
        state = run.restore(model=model, average=average, optimizer=optimizer, losses=[])
        for step in steps:
            step.backward(loss_fn, model)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            state.losses = [*state.losses, run.evaluate(Texts(7), loss_fn, average, collate=collate)]
            if len(state.losses) > 3 and state.losses[-1] < state.losses[0]:
                break
        assert step.number < STEPS + 2
        assert len(state.losses) == step.number + 1
    return [*fingerprints(run), repr(state.losses)]


def save_pretrained(run: Run, model: Any, directory: Path) -> None:
    """What a user does to hand the model on; from the run's file, which is whole on every layout."""
    trained = load_file(RunPaths(run.directory).model)
    model.save_pretrained(directory / "hub", state_dict=trained)
    loaded = type(model).from_pretrained(directory / "hub").state_dict()
    assert loaded.keys() >= trained.keys()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())


TRAININGS: dict[str, Callable[[Path, Mapping[str, Any]], list[str]]] = {
    "gpt2": lambda place, options: train(place, options, gpt2, after=save_pretrained),
    "gpt2, checkpointed": lambda place, options: train(place, options, lambda: checkpointed(gpt2())),
    "llama": lambda place, options: train(place, options, llama, after=save_pretrained),
    "llama, checkpointed": lambda place, options: train(place, options, lambda: checkpointed(llama())),
    "lora": lambda place, options: train(place, options, lora, save="trained"),
    "average": train_average,
}
RESUMED = ("gpt2", "lora", "average")


def train_all(options: Mapping[str, Any], directory: Path, copies: Mapping[str, Path]) -> dict[str, list[str] | str]:
    """Every training, and the rest of those that one process began; or why it is refused."""
    found: dict[str, list[str] | str] = {}
    for name, training in TRAININGS.items():
        try:
            found[name] = training(directory / name, options)
            if name in copies:
                found[f"{name}, resumed"] = training(copies[name], options)
        except UsageError as error:
            found[name] = error.message
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    directory = tmp_path_factory.mktemp("alone")

    def work(options: Mapping[str, Any]) -> dict[str, list[str] | str]:
        items = train(directory / "items", options, gpt2, loss=by_items)
        return {**train_all(options, directory, {}), "gpt2, num_items_in_batch": items}

    return directory, each("accumulate", work)[0]


@pytest.mark.parametrize("layout", CHOSEN)
def test_models_of_the_hub_are_the_same_on_every_layout(
    layout: str, alone: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    begun, expected = alone
    copies = {name: tmp_path / f"copy of {name}" for name in RESUMED}
    for name, copy in copies.items():
        copy_checkpoint(begun / name, copy)
    first, *others = each(layout, train_all, tmp_path, copies)
    assert all(other == first for other in others)
    for name in TRAININGS:
        reason = next((REFUSED[option, name] for option in LAYOUTS[layout].options if (option, name) in REFUSED), None)
        if reason is not None:
            assert reason in first[name], name
            continue
        assert first[name] == expected[name], name
        if name in RESUMED:
            assert first[f"{name}, resumed"] == expected[name][2:], name


def test_a_sum_in_another_form_and_checkpointed_blocks_change_no_bit(alone: tuple[Path, dict[str, list[str]]]) -> None:
    _, found = alone
    assert found["gpt2, num_items_in_batch"] == found["gpt2"]
    assert found["gpt2, checkpointed"] == found["gpt2"]
    assert found["llama, checkpointed"] == found["llama"]
    assert len(set(found["gpt2"])) == STEPS


def test_a_checkpoint_of_adapters_holds_them_alone(alone: tuple[Path, dict[str, list[str]]]) -> None:
    directory, _ = alone
    paths = RunPaths(directory / "lora")
    adapters = load_file(paths.model)
    assert adapters
    assert all("lora_" in name for name in adapters)
    checkpoint = sum(file.stat().st_size for file in paths.checkpoint(2).iterdir())
    whole = sum(file.stat().st_size for file in RunPaths(directory / "gpt2").checkpoint(2).iterdir())
    assert checkpoint < whole / 3
