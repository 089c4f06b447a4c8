"""Data parallelism: each process has a whole model and computes neighbouring micro-batches, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenstep.train.work import Work


def compute(work: Work) -> None:
    """The leaves of this process. Gradients leave while the backward pass of the last one still runs."""
    if not work.share:
        work.open()
    for i in work.share:
        loss = work.leaf(i)
        assert loss is not None
        if i == work.share[-1]:
            work.open()
        if loss.requires_grad:
            with work.step.undrawn():
                loss.backward()
        del loss
        work.reduction.leaf_done()
