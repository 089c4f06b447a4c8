"""A look at some samples before the loop begins: are they the same when they are read again?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from evenstep.errors import DataError, UsageError
from evenstep.plan.order import Order
from evenstep.train.data.reading import Reader, say_on_stderr
from evenstep.train.data.rows import runs_no_code
from evenstep.train.data.samples import MicroBatch, digest


def probe(
    data: Any,
    order: Order,
    positions: Iterable[int] = (),
    *,
    seed: int,
    rank: int = 0,
    loaders: int = 0,
    seconds: float = sys.float_info.max,
    say: Callable[[str], None] = say_on_stderr,
) -> dict[int, str]:
    """By position of epoch 0, a digest of the sample there, as hex: of position 0 and the others, in their order. ""
    if it is of a type unknown. Those behind one that cannot be read, or `seconds` after the first, are not there.

    Sample 0 is read twice under one key. UsageError if the two differ in a bit: the data set has randomness or state of
    its own, which is neither the same on all processes nor after a resume. The generators are kept.

    With `loaders` a process of its own reads, if there is code of the user's: a file that the data set opens at its
    first sample is then not open when loader processes begin, which would share its place in it.
    """
    micro_batches = [MicroBatch(0, 0, 0, position, position + 1) for position in (0, 0, *positions)]
    found: dict[int, str] = {}
    began = time.monotonic()
    with Reader(
        data,
        order,
        micro_batches,
        seed=seed,
        rank=rank,
        collate=_digested,
        loaders=0 if runs_no_code(data) else min(loaders, 1),
        prefetch=1,
        say=say,
    ) as reader:
        try:
            for number, (micro_batch, read) in enumerate(reader):
                _refuse_other(data, order, found.setdefault(micro_batch.start, read), read)
                if not number:
                    began = time.monotonic()  # of a process of its own it is known now that it has begun
                elif time.monotonic() > began + seconds:
                    break
        except DataError:
            pass  # the training's reader says it, with the sample and the process
    return found


def _digested(samples: list[Any]) -> str:
    """At once: the data set may hand out the same object again."""
    return digest(samples[0])


def _refuse_other(data: Any, order: Order, first: str, again: str) -> None:
    if first != again:
        raise UsageError(
            f"{type(data).__name__} gave two different samples for sample {order.indices(0, 0, 1)[0]} (position 0 of "
            "epoch 0) with the generators set alike: it has randomness or state of its own (a torch.Generator or numpy "
            "Generator object, a counter)",
            do="draw from the global generators of torch, numpy and random, which evenstep keys for each sample, "
            "or seed the generator of its own from torch.initial_seed() in __getitem__",
        )
