"""A loss function computes; it must leave everything else as it is. What it changes would depend on the layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from evenstep.errors import LossError, UsageError
from evenstep.train.batch import tensors

_ONCE_A_STEP = (
    "update it once a step, outside the loss function, from values that step.backward returns; or put the layer "
    "into eval mode (spectral_norm, statistics of normalisation layers)"
)


class Untouched:
    """Watches the models of one step.backward while their loss is computed, by counts that torch keeps of writes."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._parameters = dict(_named(models, "named_parameters"))
        self._buffers = dict(_named(models, "named_buffers"))

    @contextmanager
    def while_computing(self, batch: Any) -> Iterator[None]:
        """LossError or UsageError, by name, for what the block changed besides what it returns."""
        parameters, buffers, inputs = list(self._parameters.values()), list(self._buffers.values()), tensors(batch)
        trained = [p.requires_grad for p in parameters]
        grads = [p.grad for p in parameters]
        written = [t._version for t in parameters + buffers]
        read = [t._version for t in inputs]
        yield
        if any(p.requires_grad != before for p, before in zip(parameters, trained, strict=True)):
            name = next(
                n for n, was in zip(self._parameters, trained, strict=True) if self._parameters[n].requires_grad != was
            )
            raise LossError(
                f"the loss function freezes or unfreezes {name}",
                do="call requires_grad_ in the loop, before step.backward",
            )
        if any(p.grad is not before for p, before in zip(parameters, grads, strict=True)):
            raise LossError(
                "the loss function changes .grad (zero_grad, or a backward of its own)",
                do="leave zero_grad and backward to the loop; for gradients inside a loss use torch.autograd.grad",
            )
        if [t._version for t in inputs] != read:
            raise LossError(
                "the loss function changes its batch in place: a second call, or a step done again, would see another",
                do="compute a new tensor: x = x / 255, not x /= 255 or x.div_(255)",
            )
        now = [t._version for t in parameters + buffers]
        if now != written:
            names = [*self._parameters, *self._buffers]
            wrote = [name for name, a, b in zip(names, written, now, strict=True) if a != b]
            _refuse(wrote)

    def check_buffers(self) -> None:
        """UsageError where a forward replaced or added a buffer."""
        now = dict(_named(self._models, "named_buffers"))
        if len(now) != len(self._buffers) or any(now.get(name) is not b for name, b in self._buffers.items()):
            _refuse([name for name in now if now[name] is not self._buffers.get(name)])


def refuse_strangers(loss: Tensor, known: set[int]) -> None:
    """LossError if the graph of `loss` reaches an nn.Parameter whose id is not in `known`."""
    seen: set[Any] = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead.extend(function for function, _ in node.next_functions)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and id(variable) not in known:
            raise LossError(
                f"the loss depends on a parameter of shape {tuple(variable.shape)} that belongs to no prepared model: "
                "its gradient would differ between processes",
                do="put it into a module and prepare that, or freeze it (requires_grad_(False))",
            )


def _named(models: Sequence[nn.Module], method: str) -> Iterator[tuple[str, Tensor]]:
    for k, model in enumerate(models):
        prefix = f"{type(model).__name__}." if k else ""
        yield from ((prefix + name, tensor) for name, tensor in getattr(model, method)())


def _refuse(names: Sequence[str]) -> None:
    raise UsageError(
        f"the forward pass writes the model's own state in training: {', '.join(names[:5])}. On several processes each "
        "would write what its own micro-batches give",
        do=_ONCE_A_STEP,
    )
