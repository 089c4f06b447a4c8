"""Thread replicas: copies of the models in one process, one thread each, on devices of their own or on the CPU.

On the CPU they share the parameters' memory; on GPUs the parameters are copied before each step. The process's
micro-batches are shared out in neighbouring runs, each thread adds its leaves in the fixed tree, and the threads' sums
are put together in the process's reduction: what one thread would have got.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from evenstep.plan.tree import Node, share
from evenstep.train.casts import no_cache
from evenstep.train.generators import Own, installed, shared_left_alone
from evenstep.train.loss import evaluating
from evenstep.train.meeting import Meeting
from evenstep.train.models import modules
from evenstep.train.parallel.copies import Copies
from evenstep.train.parallel.shared import Shared, refuse_shared_writes
from evenstep.train.parallel.split import Splits
from evenstep.train.reduce import Leaves, Reduction
from evenstep.train.statistics import Statistics

if TYPE_CHECKING:
    from evenstep.train.work import Work


class ThreadReplicas:
    """The replicas of a run. `devices`: for each replica its devices; the first replica's are the models' own."""

    def __init__(
        self, devices: Sequence[Sequence[torch.device]], exact: bool, meeting: Meeting, splits: Splits
    ) -> None:
        self._devices, self._exact, self._splits = devices, exact, splits
        self._statistics = [Statistics(meeting) for _ in devices]  # what each copy's BatchNorm layers see
        self._own = [Own(mine) for mine in devices]
        self._copies: list[Copies] = []
        self._hooked: list[set[int]] = []  # ids of parameters of each replica
        self._leaves: dict[int, Leaves] = {}  # of each replica, in the step.backward that runs
        self._looked_at: set[object] = set()  # code of losses
        self._installed = contextlib.ExitStack()
        self._is_installed = False

    def compute(self, work: Work) -> None:
        """The leaves of this process, side by side."""
        if not self._is_installed:
            self._installed.enter_context(installed())
            self._is_installed = True
        self._make_copies(work)
        work.read_all()
        parts = [_Part(self, work, k, *part) for k, part in enumerate(_parts(work, len(self._devices)))]
        self._leaves = {part.number: part.leaves for part in parts}
        reduction = work.reduction
        assert isinstance(reduction, Reduction)
        code = getattr(work.loss_fn, "__code__", type(work.loss_fn))
        if len(parts) > 1 and code not in self._looked_at:
            parts[0].alone(parts[1:])
        reduction.replicated = True  # the models themselves get no gradient now
        try:
            with shared_left_alone():
                _side_by_side(parts)
        finally:
            reduction.replicated = False
        self._looked_at.add(code)
        for part in parts:
            part.hand_over()
            work.statistics.add(part.work.statistics.take())
            work.graph = work.graph or part.work.graph
        self._leaves.clear()
        work.open()

    def close(self) -> None:
        """Torch's random operations are as they were."""
        self._installed.close()
        self._is_installed = False
        for statistics in self._statistics:
            statistics.close()
        self._copies.clear()

    def _make_copies(self, work: Work) -> None:
        models = work.step._models.all
        if not self._copies or not self._copies[0].follows(models):
            for statistics in self._statistics:
                statistics.close()
            self._hooked = [set() for _ in self._devices]
            here = self._devices[0]
            self._copies = [Copies(models, dict(zip(here, there, strict=True))) for there in self._devices]
            for k, copies in enumerate(self._copies):
                for model, copy in zip(models, copies.models, strict=True):
                    self._splits.hook(model, copy, k)
            for statistics, copies in zip(self._statistics, self._copies, strict=True):
                named = zip(work.step._models.names(), copies.models, strict=True)
                statistics.watch(modules(named).items())
        for k, copies in enumerate(self._copies):
            copies.refresh()
            for p in copies.parameters.values():
                if p.requires_grad and id(p) not in self._hooked[k]:
                    self._hooked[k].add(id(p))
                    p.register_post_accumulate_grad_hook(partial(self._ready, k))

    def _ready(self, k: int, p: Tensor) -> None:
        self._leaves[k].ready(p)


class _Part:
    """What one replica does of a step.backward."""

    def __init__(self, replicas: ThreadReplicas, work: Work, k: int, whole: range, mine: Sequence[int]) -> None:
        """`mine`: the micro-batches among `whole` that there are."""
        models = work.step._models
        copies = replicas._copies[k]
        self._own, self._device = replicas._own[k], replicas._devices[k][0]
        self.number, self.share = k, mine
        self._reduction = work.reduction

        def twins(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
            return [(name, copies.parameters[id(p)]) for name, p in named]

        known = {id(p): name for name, p in twins(models.parameters())}
        trained = twins(zip(work.reduction.names, work.reduction.params, strict=True))
        self.leaves = Leaves(trained, whole, replicas._exact, known, mine)
        chosen = [copies.models[models.all.index(model)] for model in work.models]
        parameters = dict(twins(models.parameters(work.models)))
        self._statistics = replicas._statistics[k]
        self.work = work.on(chosen, parameters, self.leaves, self._statistics, self._device, set(known))
        self._inherited = _Inherited()
        self._context = contextvars.copy_context()
        self.stop = False
        self.may_start = threading.Event()
        self.may_start.set()
        self._others: Sequence[_Part] = ()
        self._shared: Shared | None = None
        self.error: BaseException | None = None
        self.at = 0  # the micro-batch that is computed

    def alone(self, others: Sequence[_Part]) -> None:
        """Its first micro-batch is computed before the others start: does the loss write what they share?"""
        work = self.work
        self._others, self._shared = others, Shared(work.loss_fn, work.step._models.all)
        for part in others:
            part.may_start.clear()

    def let_others_start(self) -> None:
        for part in self._others:
            part.may_start.set()

    def _refuse_shared_writes(self, i: int) -> None:
        """UsageError if the loss of micro-batch i has written something that the replicas share, and does so again.

        What it keeps once and for all (a cache) is let through."""
        assert self._shared is not None
        changed = self._shared.changed()
        if changed:
            work, before = self.work, Shared(self.work.loss_fn, self.work.step._models.all)
            with evaluating(work.models), contextlib.suppress(Exception):
                work.computed(work.step._batch(i, work.device), i)
                again = set(before.changed())
                changed = [name for name in changed if name in again]
        if changed:
            refuse_shared_writes(changed)
        self._shared = None

    def run(self) -> None:
        """In the replica's thread: its micro-batches, one after the other."""
        self.may_start.wait()
        self._context.run(self._run)

    def _run(self) -> None:
        work = self.work
        keyed = work.step._randomness.keyed_replica(self._own)
        with self._inherited.entered(self._device), keyed, self._statistics.active():
            self.leaves.pass_over()
            for i in self.share:
                if self.stop:
                    return
                self.at = i
                loss = work.leaf(i)
                assert loss is not None
                if loss.requires_grad:
                    with work.step.undrawn():
                        loss.backward()
                del loss
                if self._shared is not None:
                    self._refuse_shared_writes(i)
                    self.let_others_start()
                self.leaves.leaf_done()
            work.untouched.check_buffers()
            if not self.leaves.exact:
                self.leaves.push(Node(0, self.share[0]), self.leaves.take())

    def hand_over(self) -> None:
        """In the main thread: the sums go into the process's reduction."""
        params = self._reduction.params
        for node, grads in self.leaves.stack:
            here = [g if g is None else g.to(p.device) for g, p in zip(grads, params, strict=True)]
            self._reduction.push(node, here)
        self.leaves.stack.clear()


class _Inherited:
    """What torch keeps for each thread by itself, as it is in the thread that makes this."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._default_device = torch.get_default_device()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """As in that thread; on `device` where it is a GPU."""
        torch.set_num_threads(self._threads)
        no_cache()
        with contextlib.ExitStack() as stack:
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            if self._default_device.type != "cpu":
                stack.enter_context(device if device.type == self._default_device.type else self._default_device)
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            yield


def _parts(work: Work, replicas: int) -> list[tuple[range, Sequence[int]]]:
    """Neighbouring micro-batches for each replica, and those among them that there are; no replica for none."""
    there = [share(len(work.share), replicas, k) for k in range(replicas)]
    mine = [work.share[s.start : s.stop] for s in there if s]
    bounds = [work.reduction.position, *(m[0] for m in mine[1:]), work.reduction.share.stop]
    return [(range(*bound), m) for bound, m in zip(pairwise(bounds), mine, strict=False)]


def _side_by_side(parts: Sequence[_Part]) -> None:
    """Runs the parts in threads of their own. Where one fails, the others stop after the micro-batch that they are at,
    and the first micro-batch's error is raised."""

    def body(part: _Part) -> None:
        try:
            part.run()
        except BaseException as error:
            part.error = error
            for other in parts:
                other.stop = True
        finally:
            part.let_others_start()

    threads = [threading.Thread(target=body, args=(part,), name="evenstep-replica", daemon=True) for part in parts]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: once more, and nobody waits for the threads
        for part in parts:
            part.stop = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    failed = [part for part in parts if part.error is not None]
    if failed:
        first = min(failed, key=lambda part: part.at)
        assert first.error is not None
        raise first.error
