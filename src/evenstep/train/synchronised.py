"""`batchnorm="sync"`: BatchNorm layers that normalise over what the processes compute at the same time.

The j-th micro-batches of all processes are one batch to these layers. So the number of processes is part of the result:
it is equal to rounding at one number of them, and another result at another. torch's SyncBatchNorm does it on GPUs; it
does not run on the CPU, where the sums are exchanged here, in float64, with the same arithmetic.

Their running statistics are those of `statistics`: once a step, from all micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.errors import EvenstepError, MismatchError, PeerFailed, UsageError
from evenstep.plan.schedule import Schedule
from evenstep.train.meeting import Meeting, by_value, ranks_text

_END = "the end of its micro-batches"
_FAILED = "failed"


class Together:
    """The processes over which BatchNorm layers are synchronised.

    On the CPU every exchange says which layer it is for. A process that fails says so in its next one, so that the
    others do not wait for it; `end` is the last exchange of a step.backward.
    """

    def __init__(self, meeting: Meeting, group: dist.ProcessGroup | None) -> None:
        """`group` is for torch's SyncBatchNorm on GPUs."""
        self._meeting, self.group = meeting, group
        self._names: dict[int, str] = {}
        self.told = False  # the others know of a failure, or this process learnt of one

    @property
    def unreachable(self) -> bool:
        """Whether the others cannot learn that this process has failed, since they wait on GPUs: it must end at once,
        for them to end."""
        return self.group is not None

    @property
    def world_size(self) -> int:
        return self._meeting.world_size

    def line(self) -> str:
        """What to know about it at the start of a run."""
        return (
            f'batchnorm="sync": BatchNorm normalises over what {self.world_size} processes compute at one time; the '
            f"result is equal, to rounding, on {self.world_size} processes only"
        )

    def convert(self, model: nn.Module) -> None:
        """Turns the BatchNorm layers of `model` into synchronised ones, in place: parameters, buffers, names and hooks
        stay. UsageError for a layer that has a forward of its own."""
        for name, module in model.named_modules():
            if not isinstance(module, _BatchNorm):
                continue
            if type(module) not in _KINDS and not isinstance(module, Synchronised):
                raise UsageError(
                    f"{name or 'the model'} is a {type(module).__name__}, which cannot be synchronised",
                    do='use nn.BatchNorm1d, 2d or 3d, or batchnorm="exact" (the default)',
                )
            module.__class__ = _KINDS.get(type(module), type(module))  # a copy of a converted layer is one already
            assert isinstance(module, Synchronised)
            module.over = _Over(self, name or "the model")

    def refuse_uneven(self, schedule: Schedule) -> None:
        """UsageError, before the loop, where the processes would not run the same number of micro-batches."""
        for number in {0, min(schedule.steps_per_epoch, len(schedule)) - 1}:
            plan = schedule.step(number)
            if plan.micro_batches % self.world_size:
                last = "the last step of each epoch" if number else "a step"
                raise UsageError(
                    f'batchnorm="sync": {last} has {plan.micro_batches} micro-batches ({plan.samples} samples), which '
                    f"{self.world_size} processes cannot share out evenly",
                    do="leave out the samples that do not fill a global batch, run.steps(..., drop_last=True), and "
                    "choose a global batch whose micro-batches divide by the number of processes; or use "
                    'batchnorm="exact"',
                )

    def end(self) -> None:
        """All micro-batches of this process are done. PeerFailed if another process failed in one."""
        self.exchange(_END, torch.empty(0, dtype=torch.float64))

    def fail(self) -> None:
        """This process has failed in a micro-batch: the others learn it in the exchange that they are at or come to."""
        if not self.told and self.group is None:
            with suppress(EvenstepError):  # gone too; this process's own error is what counts
                self.exchange(_FAILED, torch.empty(0, dtype=torch.float64))

    def exchange(self, what: str, values: Tensor) -> list[Tensor]:
        """The `values` (float64, of one length) of every process, by rank, all for the same `what`."""
        try:
            answers = [answer.partition(b"\n") for answer in self._exchange(what, values.numpy().tobytes())]
            said = by_value(name.decode() for name, _, _ in answers)
            if _FAILED in said:
                raise PeerFailed(
                    f"{ranks_text(said[_FAILED])} failed in a micro-batch of this step",
                    do="see that process's log for its traceback",
                )
            if len(said) > 1:
                raise MismatchError(
                    'batchnorm="sync": the processes are at different BatchNorm layers: '
                    + "; ".join(f"{ranks_text(ranks)}: {name}" for name, ranks in said.items()),
                    do="every micro-batch must call the same layers, in one order",
                )
        except Exception:
            self.told = True
            raise
        return [torch.frombuffer(bytearray(raw), dtype=torch.float64) if raw else values for _, _, raw in answers]

    def _exchange(self, what: str, raw: bytes) -> list[bytes]:
        return self._meeting.exchange('batchnorm="sync"', what.encode() + b"\n" + raw, site="")


@contextmanager
def working(together: Together | None) -> Iterator[None]:
    """This process computes its micro-batches, those of one step.backward; what fails in it, the others learn."""
    if together is None:
        yield
        return
    together.told = False
    try:
        yield
        together.end()
    except Exception:
        together.fail()
        raise


class _Over:
    """What a synchronised layer is synchronised over. For a copy of a layer, or one from a file: nothing."""

    def __init__(self, together: Together | None = None, name: str = "") -> None:
        self.together, self.name = together, name

    def __reduce__(self) -> tuple[type[_Over], tuple[()]]:
        return _Over, ()


class Synchronised(_BatchNorm):
    """A BatchNorm layer whose batch, in training, is that of all processes together. In eval mode it is as it was."""

    over: _Over
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """As nn.SyncBatchNorm has it."""
        return None if self.over.together is None else self.over.together.group

    def forward(self, input: Tensor) -> Tensor:
        together = self.over.together
        if together is None or together.world_size == 1 or not self.training:
            return super().forward(input)
        if input.is_cuda:
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        tracked = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        momentum = self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        result: Tensor = _Function.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, *tracked, momentum or 0.0, self.eps, self.over
        )
        return result


class Synchronised1d(Synchronised, nn.BatchNorm1d):
    pass


class Synchronised2d(Synchronised, nn.BatchNorm2d):
    pass


class Synchronised3d(Synchronised, nn.BatchNorm3d):
    pass


_KINDS: dict[type[nn.Module], type[Synchronised]] = {
    nn.BatchNorm1d: Synchronised1d,
    nn.BatchNorm2d: Synchronised2d,
    nn.BatchNorm3d: Synchronised3d,
}


class _Function(torch.autograd.Function):
    """Batch normalisation (Ioffe and Szegedy 2015) over the inputs of all processes."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        over: _Over,
    ) -> Tensor:
        x = _rows(input)
        n = float(x.shape[1])
        mine = x.sum(1) / n if n else x.sum(1)
        said = torch.cat([torch.tensor([n], dtype=torch.float64), mine, (x - mine[:, None]).square().sum(1)])
        assert over.together is not None
        counts, means, squares = [], [], []
        for part in over.together.exchange(f"{over.name}, forward", said):
            counts.append(part[:1])
            means.append(part[1 : 1 + len(mine)])
            squares.append(part[1 + len(mine) :])
        total = sum(counts)
        if not isinstance(total, Tensor) or total < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        mean = torch.stack([c * m for c, m in zip(counts, means, strict=True)]).sum(0) / total
        between = torch.stack([c * (m - mean).square() for c, m in zip(counts, means, strict=True)]).sum(0)
        variance = (torch.stack(squares).sum(0) + between) / total
        if running_mean is not None and running_var is not None:
            running_mean.copy_((1 - momentum) * running_mean.double() + momentum * mean)
            running_var.copy_((1 - momentum) * running_var.double() + momentum * variance * total / (total - 1))
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(input, weight, mean, scale, total)
        ctx.over, ctx.with_bias = over, bias is not None
        y = (x - mean[:, None]) * scale[:, None]
        if weight is not None:
            y = y * weight.double()[:, None]
        if bias is not None:
            y = y + bias.double()[:, None]
        return _like(y, input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale, total = ctx.saved_tensors
        dy = _rows(grad)
        normal = (_rows(input) - mean[:, None]) * scale[:, None]
        for_bias, for_weight = dy.sum(1), (dy * normal).sum(1)
        over: _Over = ctx.over
        assert over.together is not None
        parts = over.together.exchange(f"{over.name}, backward", torch.cat([for_bias, for_weight]))
        sums, products = (torch.stack(parts).sum(0) / total).chunk(2)
        dx = (dy - sums[:, None] - normal * products[:, None]) * scale[:, None]
        if weight is not None:
            dx = dx * weight.double()[:, None]
        to_weight = None if weight is None else for_weight.to(weight.dtype)
        to_bias = for_bias.to(weight.dtype) if ctx.with_bias else None
        return _like(dx, input), to_weight, to_bias, None, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """(samples, channels, ...) as (channels, values), in float64."""
    return x.detach().transpose(0, 1).flatten(1).double()


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """`rows` in the shape, dtype and memory order of `x`."""
    return torch.empty_like(x).copy_(rows.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1))
