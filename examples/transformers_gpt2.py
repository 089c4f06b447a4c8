"""GPT-2 (or Llama: argument `llama`) of transformers, with random weights, learns the source text of Python: what
differs from a script for one process is marked. evenstep run --processes 2 examples/transformers_gpt2.py llama
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import evenstep  # evenstep

source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py")))
texts = [torch.tensor(list(text[:128])) for text in source.split(b"\n\n") if len(text) > 16]
limit = int(sys.argv[-1]) if sys.argv[-1].isdecimal() else 100
sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256, "bos_token_id": 0}


def collate(texts: list[Tensor]) -> dict[str, Tensor]:
    labels = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)  # -100 does not count
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    n = (batch["labels"][:, 1:] != -100).sum()  # evenstep: the model predicts the next token
    return model(**batch).loss * n, n  # evenstep: it returns a mean, times n is the sum


run = evenstep.start(global_batch=16, micro_batch=4, seed=0)  # evenstep
llama = LlamaConfig(**sizes, intermediate_size=128, attention_dropout=0.1, tie_word_embeddings=True, eos_token_id=0)
model = LlamaForCausalLM(llama) if "llama" in sys.argv else GPT2LMHeadModel(GPT2Config(**sizes))
run.prepare(model)  # evenstep
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.restore(model=model, optimizer=optimizer)  # evenstep
for step in run.steps(texts, steps=limit, collate=collate):  # evenstep
    run.log(loss=step.backward(loss_fn).loss)  # evenstep
    optimizer.step()
    optimizer.zero_grad()
