"""A loss function computes; it must leave everything else as it is. What it changes would depend on the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from evenstep.errors import LossError, UsageError
from evenstep.train.batch import tensors

_ONCE_A_STEP = (
    "update it once a step, outside the loss function, from values that step.backward returns; or put the layer "
    "into eval mode (spectral_norm, statistics of normalisation layers)"
)


class Untouched:
    """Watches the models of one step.backward while their loss is computed, by counts that torch keeps of writes.

    `parameters` by name; `find_buffers` gives the buffers that the models have at the time, by name; `modules` by name.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        find_buffers: Callable[[], dict[str, Tensor]],
        modules: Mapping[str, nn.Module],
    ) -> None:
        self._parameters, self._find_buffers, self._modules = parameters, find_buffers, modules
        self._buffers = find_buffers()

    @contextmanager
    def while_computing(self, batch: Any, *, contents: bool = False) -> Iterator[None]:
        """LossError or UsageError, by name, for what the block changed besides what it returns.

        With `contents` buffers are compared by value too: F.batch_norm writes into the running statistics that it is
        given, and torch does not count that.
        """
        copies = {name: b.clone() for name, b in self._buffers.items() if not b.is_meta} if contents else {}
        parameters, inputs = list(self._parameters.values()), tensors(batch)
        state: list[Tensor] = [*parameters, *self._buffers.values()]
        trained = [p.requires_grad for p in parameters]
        grads = [p.grad for p in parameters]
        written = [t._version for t in state]
        read = [t._version for t in inputs]
        yield
        for (name, p), before in zip(self._parameters.items(), trained, strict=True):
            if p.requires_grad != before:
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
        now = [t._version for t in state]
        if now != written:
            names = [*self._parameters, *self._buffers]
            self._refuse([name for name, a, b in zip(names, written, now, strict=True) if a != b])
        changed = [name for name, before in copies.items() if not _equal(before, self._buffers[name])]
        if changed:
            self._refuse(changed)

    def check_buffers(self) -> None:
        """UsageError where a forward replaced or added a buffer."""
        now = self._find_buffers()
        if len(now) != len(self._buffers) or any(now.get(name) is not b for name, b in self._buffers.items()):
            self._refuse([name for name in now if now[name] is not self._buffers.get(name)])

    def _refuse(self, names: Sequence[str]) -> None:
        refuse_writes([self._with_layer(name) for name in names])

    def _with_layer(self, name: str) -> str:
        """`name` of a tensor, and what layer it belongs to."""
        owner = self._modules.get(name.rpartition(".")[0])
        return name if owner is None else f"{name} (of a {type(owner).__name__})"


@contextmanager
def refusing_gradients(layout: str) -> Iterator[None]:
    """UsageError where torch.autograd.grad is called inside. `layout`: the options that it cannot be had with."""
    kept = torch.autograd.grad

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UsageError(
            f"gradients inside a loss (torch.autograd.grad, a gradient penalty) with {layout} are not offered",
            do=f"run without {layout}: --processes or --thread-replicas",
        )

    torch.autograd.grad = refuse
    try:
        yield
    finally:
        torch.autograd.grad = kept


def refuse_writes(names: Sequence[str]) -> None:
    """UsageError for these tensors of the models' state."""
    raise UsageError(
        f"the forward pass writes the model's own state in training: {', '.join(names[:5])}. On several processes each "
        "would write what its own micro-batches give",
        do=_ONCE_A_STEP,
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


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
