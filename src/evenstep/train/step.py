"""One optimizer step: the loss of every micro-batch of the global batch, and the mean gradient of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from evenstep.errors import UsageError
from evenstep.plan.lanes import Plan
from evenstep.plan.schedule import StepPlan
from evenstep.plan.tree import tree_sum
from evenstep.record.activity import COMPUTING, READING, Activity
from evenstep.train.batch import to_device
from evenstep.train.gradients import LeftGradients
from evenstep.train.layout import Layout
from evenstep.train.loss import FORM, LossFn, leaf, refuse_tensor
from evenstep.train.meeting import Meeting, call_site
from evenstep.train.models import Models
from evenstep.train.precision import Precision
from evenstep.train.randomness import Randomness
from evenstep.train.trace import Trace
from evenstep.train.whole import Whole
from evenstep.train.work import Result, Work, refuse_failed

Choose = Callable[[int, Callable[[Any], None], Sequence[nn.Module], str], StepPlan]
"""From a step's number, what does the passes over a batch, its models, and the line of the user's code, to the step in
micro-batches."""


class Step:
    """One optimizer step of `run.steps`.

    `number` counts from 0 over the whole run, `epoch` from 0; `ends_epoch` says that it is its epoch's last;
    `samples` is the size of its global batch (smaller for a ragged last one).
    """

    def __init__(
        self,
        plan: Plan,
        batches: Iterator[Any],
        models: Models,
        layout: Layout,
        randomness: Randomness,
        meeting: Meeting,
        device: torch.device,
        precision: Precision,
        activity: Activity,
        choose: Choose | None,
    ) -> None:
        """`choose`: the micro-batch is chosen at the first call of backward."""
        self.number, self.epoch, self.ends_epoch, self.samples = plan.number, plan.epoch, plan.ends_epoch, plan.samples
        self.result: Result | None = None  # of the last call of backward
        self.stepped = False  # an optimizer has used it
        self._over = False
        self._source = batches
        self._read: list[Any] = []
        self._models, self._layout, self._randomness = models, layout, randomness
        self._meeting, self._device, self._precision = meeting, device, precision
        self._activity = activity
        self._calls = 0
        self._choose = choose
        self.trace: Trace | None = None  # of this step, where it is asked for
        self.gradients: LeftGradients | None = None  # where a process has a part of the model
        self.look_before: Callable[[Sequence[nn.Module]], None] | None = None  # at the models, before the first call
        self._cut(plan)

    def __iter__(self) -> NoReturn:
        """UsageError: `for inputs, labels in steps` is how one loops over a DataLoader."""
        raise UsageError(
            f"step {self.number} was taken for a batch: it is an optimizer step, and which process reads what of its "
            "global batch is up to evenstep",
            do=f"write `for step in steps:` and a function of one micro-batch\n\n        {FORM}",
        )

    def _cut(self, plan: Plan) -> None:
        """Into micro-batches, of which this process has some."""
        self._plan = plan
        self._first = plan.among(range(plan.micro_batches))[0]  # the first micro-batch that there is
        self._share = plan.among(self._layout.grid.leaves(plan.micro_batches, self._meeting.rank))

    def _chosen(self, loss_of: Callable[[Any], torch.Tensor], models: Sequence[nn.Module], site: str) -> None:
        """Chooses the micro-batch, where that is still to be done. `loss_of(batch)` is what is tried."""
        if self._choose is None:
            return

        def compute(batch: Any) -> None:
            self._layout.statistics.watch(self._models.modules().items())
            with self._randomness.keyed(), self._layout.statistics.active():
                self._randomness.begin_micro_batch(self.number, 0, 0)
                with torch.enable_grad(), self._precision.computing():
                    loss = loss_of(to_device(batch, self._device))
                if loss.requires_grad:
                    loss.backward()

        self._cut(self._choose(self.number, compute, models, site))
        self._choose = None

    def backward(self, loss_fn: LossFn, *models: nn.Module) -> Result:
        """Put the mean gradient of the global batch into `.grad` of every parameter (added to what is there, as
        `Tensor.backward` does; None stays where no micro-batch used a parameter).

        `loss_fn(*models, batch)` computes one micro-batch: it returns (sum over samples, weight), and as a third item,
        if wanted, metrics {name: (sum, weight)}. `models` default to all that were prepared, in that order. The
        gradient is that of the sum over the whole global batch, divided by the total weight; with the weight None it
        is not divided. It may be called several times in a step, each with another loss.

        Raises LossError for a loss that is not of this form or not additive over samples, and whatever `loss_fn`
        raises. Then `.grad` is what it was before, on every process, and the step can be done again; the other
        processes get PeerFailed.
        """
        refuse_tensor(loss_fn)
        self._refuse_if_over()
        chosen = self._models.chosen(models)
        call = self._calls
        self._calls += 1
        site = call_site()
        self._chosen(lambda batch: leaf(loss_fn(*chosen, batch), 0).total, chosen, site)
        return self._do(lambda: Work(self, loss_fn, chosen, call, site), chosen)

    def backward_whole(self, embed_fn: Callable[..., Any], loss_fn: Callable[..., Any], *models: nn.Module) -> Result:
        """As `backward`, for a loss that compares the samples of the global batch with each other (contrastive).

        `embed_fn(*models, batch)` gives the embeddings of one micro-batch: a tensor, or a dict or tuple of tensors,
        with a row a sample, and whatever else the loss needs of the samples (labels). `loss_fn(*models, embeddings)`
        gets those of the whole global batch, in order, and returns its loss, normalised as it likes, or
        (loss, {name: number}). Every process computes it, so every device has room for all embeddings; the model runs
        twice over each micro-batch (method: arXiv:2101.06983). The loss may use parameters of the models itself.

        Raises as `backward` does. Not offered with --stages.
        """
        self._refuse_if_over()
        chosen = self._models.chosen(models)
        call = self._calls
        self._calls += 1
        site = call_site()
        whole = Whole(self, embed_fn, loss_fn, chosen, call, site)
        self._chosen(whole.trial, chosen, site)
        return self._do(lambda: Work(self, embed_fn, chosen, call, site, whole.differentiate()), chosen)

    def _do(self, work: Callable[[], Work], models: Sequence[nn.Module]) -> Result:
        """Does the work of one call, again where it overflows."""
        with self._activity.during(COMPUTING):
            return self._done(work, models)

    def _done(self, work: Callable[[], Work], models: Sequence[nn.Module]) -> Result:
        if self.look_before is not None:
            self.look_before(models)
            self.look_before = None
        if self.gradients is not None:
            self.gradients.check()
        scaler = self._precision.scaler
        if scaler is None:
            done = work()
            done.run()
        else:
            trained = [p for _, p in self._models.parameters(models) if p.requires_grad]
            done = scaler.until_finite(work, trained, self._agree)
        done.commit()
        if self.gradients is not None:
            self.gradients.record(contents=self.number == self._models.first_step)
        if self.trace is not None:
            self.trace.gradients(done.call)
        assert self.result is not None
        return self.result

    def _agree(self, finite: bool) -> bool:
        """Whether it is so on every process: those of one replica hold different parameters."""
        grid = self._layout.grid
        if grid.stages == grid.shards == 1:
            return finite
        return all(self._exchange("step.backward, are gradients finite", finite, ""))

    def _told(self, error: Exception) -> object:
        """What other processes are told of an error. That a model cannot lie on several stages concerns them all."""
        if self._layout.grid.stages > 1 and isinstance(error, UsageError):
            return {"message": error.message, "do": error.do}
        return f"{type(error).__name__}: {error}".strip()

    def total(self, fn: Callable[[Any], Any]) -> Any:
        """The sums over the global batch of `fn(batch)`: a number, or a dict {name: number}. Equal on every process.

        For a loss of several terms with denominators of their own: take the totals first, divide each term by its
        total inside the loss function and return None as the weight.

            totals = step.total(lambda batch: {"boxes": n_boxes(batch), "pixels": n_pixels(batch)})
            step.backward(lambda model, batch: (boxes / totals["boxes"] + pixels / totals["pixels"], None))
        """
        self._refuse_if_over()
        error: Exception | None = None
        rows: list[Any] = []
        single = False
        try:
            with self._randomness.keyed():
                for i in self._share:
                    self._randomness.begin("total", self.number, self._calls, i)
                    value = fn(self._batch(i))
                    single = not isinstance(value, Mapping)
                    named = {"": value} if single else value
                    rows.append((i, {str(name): float(v) for name, v in named.items()}))
        except Exception as caught:
            error = caught
        said = {"failed": None if error is None else self._told(error), "rows": rows, "single": single}
        answers = self._exchange("step.total", said, call_site())
        if error is not None:
            raise error
        refuse_failed(answers, self.number)
        by_leaf: list[dict[str, float]] = [
            row for _, row in sorted({i: r for a in answers for i, r in a["rows"]}.items())
        ]
        names = list(dict.fromkeys(name for row in by_leaf for name in row))
        sums = {name: tree_sum(row.get(name) for row in by_leaf) for name in names}
        return sums[""] if any(a["single"] for a in answers) else sums

    def undrawn(self) -> AbstractContextManager[None]:
        """Around each backward pass."""
        return self._randomness.undrawn()

    def _exchange(self, kind: str, said: object, site: str) -> list[Any]:
        return self._meeting.say(kind, said, signature=f"step {self.number}", site=site)

    def _batch(self, index: int, device: torch.device | None = None) -> Any:
        """Micro-batch `index` of those that this process reads, on the device (the run's)."""
        if self._choose is not None:
            raise _not_chosen("step.total was called")
        count = self._share.index(index) + 1
        self._read_to(count)
        return to_device(self._read[count - 1], device or self._device)

    def _read_to(self, count: int) -> None:
        """Read the first `count` micro-batches of this process, as far as they have not been."""
        while len(self._read) < count:
            with self._activity.during(READING):
                self._read.append(next(self._source))

    def _close(self) -> None:
        """What the loop's body did not read is read now: the next step's micro-batches come after it."""
        if self._choose is not None:
            raise _not_chosen(f"step {self.number} ended")
        self._read_to(len(self._share))
        self._read.clear()
        self._over = True

    def _refuse_if_over(self) -> None:
        if self._over:
            raise UsageError(
                f"step {self.number} is over: the loop has gone on", do="use a step inside its own turn of the loop"
            )


def _not_chosen(what: str) -> UsageError:
    return UsageError(
        f'{what} before the first step.backward, where micro_batch="auto" is chosen',
        do="call step.backward before, or give a number (--micro-batch N)",
    )
