"""LoRA by peft: adapters on a Llama of transformers (with random weights) learn the source text of Python.

evenstep run --processes 2 examples/lora.py --steps 50

What differs from a script for one process is marked. Checkpoints and model.safetensors hold the adapters alone.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import evenstep  # evenstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py")))
texts = [torch.tensor(list(text[:128])) for text in source.split(b"\n\n") if len(text) > 16]
sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256, "bos_token_id": 0}


def collate(texts: list[Tensor]) -> dict[str, Tensor]:
    labels = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)  # -100 does not count
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    n = (batch["labels"][:, 1:] != -100).sum()  # evenstep: how many tokens are predicted
    return model(**batch, num_items_in_batch=1).loss, n  # evenstep: transformers' sum, divided by 1


run = evenstep.start(global_batch=16, micro_batch=4, seed=0)  # evenstep
base = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=128, eos_token_id=0))
adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
model = run.prepare(get_peft_model(base, adapters), save="trained")  # evenstep
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
steps = run.steps(texts, steps=options.steps, collate=collate)  # evenstep
run.restore(model=model, optimizer=optimizer)  # evenstep

for step in steps:  # evenstep
    run.log(loss=step.backward(loss_fn).loss)  # evenstep
    optimizer.step()
    optimizer.zero_grad()

if run.rank == 0:  # evenstep: one process writes
    trained = load_file(run.directory / "model.safetensors")  # evenstep: whole on every layout
    model.save_pretrained(run.directory / "adapters", state_dict=trained)  # evenstep
