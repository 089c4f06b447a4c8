"""One call of step.backward: the losses of this process's micro-batches, their gradients, and what processes tell each
other of them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenstep.errors import EvenstepError, LossError, PeerFailed, UsageError
from evenstep.plan.tree import tree_sum
from evenstep.train.batch import split_batch
from evenstep.train.casts import no_cast_cache
from evenstep.train.compiling import any_compiled, naming_shapes, uncompiled
from evenstep.train.lockstep import HANDED_OVER
from evenstep.train.loss import Evaluated, Leaf, LossFn, additive, evaluating, leaf, naming_nondeterministic
from evenstep.train.models import buffers, modules
from evenstep.train.parallel.fan_out import refuse_other_order
from evenstep.train.purity import Untouched, refuse_strangers, refusing_gradients
from evenstep.train.reduce import Leaves
from evenstep.train.statistics import Change, Statistics, mixes_samples, refuse_statistics
from evenstep.train.synchronised import working
from evenstep.train.trace import traced
from evenstep.train.whole import Second

if TYPE_CHECKING:
    from evenstep.train.step import Step


@dataclass(frozen=True)
class Result:
    """What `step.backward` found, equal on every process.

    `loss` is the sum over the global batch divided by `weight` (the sum itself where the loss function gave the weight
    None); `metrics` has the means of what the loss function gave as third item.
    """

    loss: float
    weight: float | None
    metrics: Mapping[str, float]


class Work:
    """One call of step.backward: what a layout's `compute` is given.

    For each of the micro-batches `share`, in order: `leaf(i)` gives the loss with its graph; once before the last
    backward of the share (or at once where it is empty) `open()`; after each backward `reduction.leaf_done()`.
    """

    def __init__(
        self,
        step: Step,
        loss_fn: LossFn,
        models: Sequence[nn.Module],
        call: int,
        site: str,
        second: Second | None = None,
    ) -> None:
        self.step, self.loss_fn, self.models, self.call, self.site = step, loss_fn, models, call, site
        self.second = second  # of the two passes of step.backward_whole
        self.share = step._share
        self.device: torch.device | None = None  # where it is not the run's
        self.known: set[int] = set()  # ids of further parameters that the loss may reach
        self.first = step.number == step._models.first_step and call == 0
        self.leaves: dict[int, Leaf] = {}
        self.graph = False  # some loss of this process has one
        self.failed: object = None  # what the others are told of an error
        self.result: Result | None = None
        self.changes: list[Change] = []  # of running statistics

    def run(self) -> None:
        """Computes the gradients; nothing else is changed."""
        step, layout = self.step, self.step._layout
        mine = step._models.modules(self.models)
        refuse_statistics(mine.items())
        layout.statistics.watch(step._models.modules().items())
        named = step._models.parameters(self.models)
        if not any(p.requires_grad for _, p in named):
            raise UsageError(
                "no parameter of the model requires a gradient",
                do="unfreeze a parameter, or leave step.backward out",
            )
        layout.reducer.watch(layout.own(step._models.parameters()))
        if layout.grid.some_wait:
            signature = f"step {step.number}, call {self.call}"
            step._meeting.exchange("step.backward, its beginning", signature=signature, site=self.site)
        self.untouched = Untouched(dict(named), lambda: buffers(step._models.named(self.models)), mine)
        self.trained = _digest([name for name, p in named if p.requires_grad])
        self.reduction = layout.reducer.start(layout.own(named), step._plan.micro_batches, self.share)
        self.sums: Leaves = self.reduction  # what the gradients of a leaf go into
        self.statistics = layout.statistics  # what BatchNorm layers see goes there
        try:
            with (
                working(layout.together),
                step._randomness.keyed(),
                layout.statistics.active(),
                naming_nondeterministic(self.first and not any_compiled(mine)),
                no_cast_cache(),
                naming_shapes(),
            ):
                if self.first and self.second is None:
                    self._first_checks()
                layout.compute(self)
                self.untouched.check_buffers()
        except Exception as error:
            self.failed = step._told(error)
            if layout.together is not None and layout.together.unreachable:
                self.reduction.put_back()
            else:
                self.reduction.fail(self._meet, self._tell)
            raise
        except BaseException:  # Ctrl-C: this process ends now and waits for nobody
            self.reduction.put_back()
            raise
        self.reduction.finish(self._tell)
        layout.deliver()

    def commit(self) -> None:
        """After `run`: whatever else a step changes."""
        self.step._layout.statistics.apply(self.changes)
        self.step.result = self.result
        self.step.stepped = False

    @property
    def loss(self) -> float:
        """The mean, after `run`."""
        assert self.result is not None
        return self.result.loss

    @property
    def weight(self) -> float | None:
        """What the sum was divided by."""
        return None if self.result is None else self.result.weight

    def open(self) -> None:
        """Before the last backward of the share: losses and weights are exchanged, full buckets leave from now on."""
        self.reduction.open(self._meet)

    def on(
        self,
        models: Sequence[nn.Module],
        parameters: dict[str, nn.Parameter],
        sums: Leaves,
        statistics: Statistics,
        device: torch.device,
        known: set[int],
    ) -> Work:
        """The same work on copies of the models, with their parameters by name. Its gradients go to `sums`, what
        BatchNorm layers see to `statistics`; `known` are the ids of all parameters of copies."""
        names = {id(model): name for name, model in self.step._models.named(self.models)}
        named = [(names[id(model)], twin) for model, twin in zip(self.models, models, strict=True)]
        work = copy.copy(self)
        work.models, work.sums, work.statistics = models, sums, statistics
        work.device, work.known = device, known
        work.untouched = Untouched(parameters, lambda: buffers(named), modules(named))
        return work

    def read_all(self) -> None:
        """Read the whole share now: the data set may not be read from other threads."""
        self.step._read_to(len(self.step._share))

    def leaf(self, i: int) -> torch.Tensor | None:
        """The loss of micro-batch i with its graph, scaled as the backward pass is to begin. None where another
        process goes on with it."""
        step = self.step
        batch = step._batch(i, self.device)
        step._randomness.begin_micro_batch(step.number, self.call, i)
        with (
            torch.enable_grad(),
            traced(step.trace, self.call, i, self.loss_fn, batch) as tell,
            self.statistics.collect(i),
        ):
            returned = self.computed(batch, i, contents=self.first and not self.leaves)
            if returned is HANDED_OVER:
                return None
            found = leaf(returned, i)
            tell(found)
        total = found.total
        if self.first and not self.leaves:
            refuse_strangers(total, self.known.union(id(p) for _, p in step._models.parameters()))
        refuse_other_order(total)
        self.graph = self.graph or total.requires_grad
        self.leaves[i] = Leaf(total.detach(), found.value, found.weight, found.metrics)
        return step._precision.scaled(total, found.weight)

    def computed(self, batch: Any, i: int, *, contents: bool = False) -> Any:
        """What the loss function returns for `batch`, of micro-batch i, with nothing else changed."""
        loss_fn = self.loss_fn if self.second is None else self.second.loss_of(i)
        grid = self.step._layout.grid
        cut = "--stages" if grid.stages > 1 else "--shard" if grid.shards > 1 else ""
        self.sums.computing = True
        try:
            with (
                refusing_gradients(cut) if cut else nullcontext(),
                self.untouched.while_computing(batch, contents=contents),
                self.step._precision.computing(),
            ):
                return loss_fn(*self.models, batch)
        finally:
            self.sums.computing = False

    def _first_checks(self) -> None:
        """Once a run: is the loss additive over samples? The process that has the first micro-batch looks at it; those
        that hold a model together with it run along."""
        step, lockstep = self.step, self.step._layout.lockstep
        grid, micro_batches = step._layout.grid, step._plan.micro_batches
        if not any(step._first in grid.leaves(micro_batches, rank) for rank in lockstep.ranks):
            return
        look = _Look(self) if step._first in self.share else None
        with evaluating(self.models), uncompiled():
            while True:
                wanted = look.next() if look else []
                said = {"wanted": len(wanted), "failed": step._told(look.wrong) if look and look.wrong else None}
                answers = lockstep.agree(said, self.site)
                if look and look.wrong:
                    raise look.wrong
                refuse_failed(answers, step.number)
                most = max(answer["wanted"] for answer in answers)
                if not most:
                    return
                passes = lockstep.passes(self.models, "the checks of the first step", self.site)
                for k in range(most):
                    passes.run(wanted[k] if k < len(wanted) else None)
                if look:
                    look.found = passes.outcome(look.found)
                    look.failed = passes.failed

    # ---- what processes tell each other

    def _meet(self) -> float | None:
        """Exchanges losses and weights; returns what the gradients are divided by."""
        rows = [] if self.failed else [(i, (x.value, x.weight, x.metrics)) for i, x in self.leaves.items()]
        statistics = self.step._layout.statistics
        said = {
            "failed": self.failed,
            "trained": self.trained,
            "graph": self.graph,
            "statistics": statistics.collected,
            "rows": rows,
        }
        answers = self.step._exchange("step.backward", said, self.site)
        if self.failed is not None:
            return None
        refuse_failed(answers, self.step.number)
        if len({a["trained"] for a in answers}) > 1:
            raise UsageError(
                "the processes train different parameters: requires_grad is not the same everywhere",
                do="freeze and unfreeze the same parameters at the same step on every process",
            )
        if not any(a["graph"] for a in answers):
            raise LossError(
                "no loss of this step depends on a parameter: there is nothing to differentiate",
                do="return the loss as computed, without .detach(), torch.no_grad() or .item()",
            )
        by_leaf = {i: row for answer in answers for i, row in answer["rows"]}
        if self.second is None:
            self.result = _result([row for _, row in sorted(by_leaf.items())], self.step.number)
        else:
            self.result = Result(self.second.loss, None, self.second.metrics)
        if any(a["statistics"] for a in answers):
            signature = f"step {self.step.number}"
            self.changes = statistics.exchange(self.step._plan.micro_batches, signature=signature, site=self.site)
        return self.step._precision.divisor(self.result.weight)

    def _tell(self) -> EvenstepError:
        """After a failure in the last backward of some process: who, and why."""
        answers = self.step._exchange("step.backward, after a failure", {"failed": self.failed}, self.site)
        try:
            refuse_failed(answers, self.step.number)
        except EvenstepError as error:
            return error
        return PeerFailed("another process failed in the backward of this step")


class _OnlyInTraining(Exception):
    """A loss that needs training mode or gradients is not looked at: what is wrong there too, the step shows."""


class _Look:
    """Evaluates the first micro-batch and its halves, as `additive` wants them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.found: Evaluated = []  # since the last `next`
        self._asking: Generator[list[tuple[int, int]], Evaluated, None] | None = None
        self.failed: Exception | None = None  # of the evaluations
        self.wrong: Exception | None = None  # the loss is refused

    def next(self) -> list[Callable[[], None]]:
        """The evaluations that are to come, none at the end. `wrong` is set where there is something to say."""
        if isinstance(self.failed, (LossError, UsageError)):
            self.wrong = self.failed  # it changes what it must not
        if self.failed is not None:
            return []
        try:
            wanted = self._begin() if self._asking is None else self._asking.send(self.found)
        except StopIteration:
            return []
        except Exception as error:
            self.wrong = error
            return []
        self.found = []
        return [partial(self._evaluate, part, draw) for part, draw in wanted]

    def _begin(self) -> list[tuple[int, int]]:
        step = self._work.step
        batch = step._batch(step._first)
        first, stop = step._plan.micro(step._first)
        halves = split_batch(batch, stop - first)
        if halves is None or any(map(mixes_samples, step._models.modules(self._work.models).values())):
            return []
        self._parts = (batch, *halves)
        self._asking = additive(step._layout.exact, step._precision.rounding)
        return next(self._asking)

    def _evaluate(self, part: int, draw: int) -> None:
        step = self._work.step
        step._randomness.begin("additive", step.number, draw)
        try:
            returned = self._work.computed(self._parts[part], step._first)
            step._layout.lockstep.check(returned)
        except (LossError, UsageError):
            raise
        except Exception as error:
            raise _OnlyInTraining from error
        try:
            found = leaf(returned, step._first)
        except LossError as error:
            raise _OnlyInTraining from error
        self.found.append((found.value, found.weight))


def refuse_failed(answers: Sequence[Mapping[str, Any]], step: int) -> None:
    """PeerFailed, or UsageError for what concerns all, where a process has said that it failed in `step`."""
    for answer in answers:
        if isinstance(answer["failed"], dict):
            raise UsageError(answer["failed"]["message"], do=answer["failed"]["do"])
    said = [f"rank {rank}: {a['failed']}" for rank, a in enumerate(answers) if a["failed"] is not None]
    if said:
        raise PeerFailed(
            f"step {step} failed on another process; nothing of it was kept\n    " + "\n    ".join(said),
            do="see that process's log for its traceback",
        )


def _result(rows: Sequence[Sequence[Any]], step: int) -> Result:
    """Sums over the micro-batches in the fixed tree."""
    total = tree_sum(row[0] for row in rows)
    weights = [row[1] for row in rows]
    plain = [w is None for w in weights]
    if any(plain) and not all(plain):
        raise LossError("the loss function gave the weight None for some micro-batches and a number for others")
    weight = None if plain[0] else tree_sum(weights)
    if weight == 0.0:
        raise LossError(
            f"the total weight of step {step} is zero: there is nothing to divide the gradient by",
            do="leave out samples without any target, or give them a weight",
        )
    metrics = {}
    for name in dict.fromkeys(name for row in rows for name in row[2]):
        pairs = [row[2].get(name) for row in rows]
        below = tree_sum(p and p[1] for p in pairs)
        metrics[name] = tree_sum(p and p[0] for p in pairs) / below if below else float("nan")
    return Result(total if weight is None else total / weight, weight, metrics)


def _digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()
