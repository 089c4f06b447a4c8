"""A small GPT that learns to write Python from the standard library's own source text, in about a minute.

Texts differ in length, so micro-batches are padded and the loss is weighted by tokens: the result is the mean over
all tokens of the global batch, on any number of processes.

    python examples/language.py
    evenstep run --processes 2 examples/language.py --steps 200
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import evenstep

LONGEST = 64  # tokens of a text; the rest of a longer one is left out
VOCABULARY = 1024
PAD = -100  # a target that does not count
WORD = re.compile(r" ?\w+|\n *|[^\w\n]")

Batch = tuple[Tensor, Tensor]  # input tokens and target tokens, both (texts, longest of them)


def read_texts(*, train: bool) -> list[str]:
    """Paragraphs of the standard library's modules; every tenth module is held out."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [path for number, path in enumerate(modules) if (number % 10 != 0) == train]
    source = "\n\n".join(path.read_text(errors="ignore").encode("ascii", "ignore").decode() for path in chosen)
    return [text.strip("\n") for text in source.split("\n\n") if len(text) >= 16]


class Tokens:
    """The most frequent words; what is not among them is spelt in characters."""

    def __init__(self, texts: list[str]) -> None:
        counts = Counter(word for text in texts for word in WORD.findall(text) if len(word) > 1)
        characters = [chr(number) for number in range(128)]
        self.words = characters + [word for word, _ in counts.most_common(VOCABULARY - len(characters))]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        parts = (part for word in WORD.findall(text) for part in ([word] if word in self.numbers else word))
        return [self.numbers[part] for part in parts]

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.words[number] for number in numbers)


class Texts(Dataset[Tensor]):
    def __init__(self, texts: list[str], tokens: Tokens) -> None:
        self.texts = [torch.tensor(tokens.encode(text)[:LONGEST]) for text in texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


def collate(texts: list[Tensor]) -> Batch:
    """Each token is to be told from those before it; token 0 stands before the first."""
    targets = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)
    inputs = F.pad(targets.clamp(min=0), (1, -1))
    return inputs, targets


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self, width: int = 96, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight  # tied
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, beginning: list[int], length: int) -> list[int]:
        written = list(beginning)
        while len(written) < length:
            tokens = torch.tensor([[0, *written[-(LONGEST - 1) :]]], device=self.token.weight.device)
            logits = self(tokens)[0, -1]
            written.append(int(torch.multinomial(torch.softmax(logits / 0.7, 0), 1)))
        return written


def loss_fn(model: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=PAD)
    return loss, (targets != PAD).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--loaders", type=int, default=0, help="loader processes of each training process")
    options = parser.parse_args()

    train_texts = read_texts(train=True)
    tokens = Tokens(train_texts)

    run = evenstep.start(global_batch=16, micro_batch=4, seed=0)
    model = run.prepare(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.1)
    train_set = Texts(train_texts, tokens)
    steps = run.steps(train_set, steps=options.steps, collate=collate, loaders=options.loaders)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=len(steps), pct_start=0.1)
    run.restore(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in steps:
        result = step.backward(loss_fn)
        norm = run.clip(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log(loss=result.loss, norm=norm)

    held_out = Texts(read_texts(train=False)[:1000], tokens)
    run.log(held_out_loss=run.evaluate(held_out, loss_fn, collate=collate))
    if run.rank == 0:
        model.eval()
        print(tokens.decode(model.write(tokens.encode("    def "), 80)))


if __name__ == "__main__":
    main()
