"""micro_batch="auto": the largest micro-batch that fits the memory of every process, found by trial.

A trial is a forward and a backward pass over the first samples of the step, of which nothing is left. What it needs at
its peak is measured by what torch allocates. Room is kept for what a trial does not show: the optimizer's state (two
numbers a trained parameter, as Adam has them, as long as there is none), the partial sums of gradients in the tree, two
more sets of gradients for the exchange between processes, and a tenth of the memory for whatever else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.plan.schedule import StepPlan
from evenstep.plan.sizes import largest_that_fits, micro_batch_sizes
from evenstep.train.meeting import Meeting, peer_failed
from evenstep.train.models import Models, buffers
from evenstep.train.options import Options, workers
from evenstep.train.statistics import needs_several

SPARE = 0.1  # of the memory
_OPTIMIZER_STATE = 2  # numbers a trained parameter
_EXCHANGED = 2  # sets of gradients


@dataclass(frozen=True)
class Need:
    """What a micro-batch of `size` samples needs on this process, in bytes."""

    size: int
    trial: int  # parameters, buffers and whatever else is there, and the peak of a trial beside
    room: int  # for what a trial does not show
    limit: int  # what there is, on the device on which it is scarcest

    @property
    def fits(self) -> bool:
        return self.fits_with(1.0)

    def fits_with(self, part: float) -> bool:
        """Whether it fits with a part of the room."""
        return self.trial + part * self.room <= self.limit * (1 - SPARE)


@dataclass(frozen=True)
class Choice:
    """What all processes have agreed on."""

    size: int
    need: Need  # on the process that has the least memory to spare
    largest: bool  # a larger one would leave some process without a micro-batch

    def line(self) -> str:
        """For the person who runs this."""
        why = "the largest that gives every process one" if self.largest else "the largest that fits"
        return (
            f"micro-batch {self.size}, {why}: a trial took {size_text(self.need.trial)}, optimizer state and sums of "
            f"gradients take {size_text(self.need.room)} more, of {size_text(self.need.limit)}"
        )


def refuse_auto(options: Options, device: torch.device) -> None:
    """UsageError where no micro-batch can be chosen."""
    together = {
        "--stages": options.stages > 1,
        "--shard": options.shard,
        "--batchnorm sync": options.batchnorm == "sync",
    }
    for name, wanted in together.items():
        if wanted:
            raise UsageError(
                f'micro_batch="auto" is not offered with {name}: a process that runs out of memory in a trial would '
                "leave those that hold the model together with it waiting",
                do="give a number (--micro-batch N); in a run directory that has one, auto takes it on any layout",
            )
    if device.type == "cpu" and options.memory is None:
        raise UsageError(
            'micro_batch="auto" on the CPU, and no limit for its memory was given',
            do='say how much a process may use: start(memory="2GiB"), or --memory 2GiB',
        )


class Search:
    """The trials of one process.

    `passes(size)` runs the forward and the backward pass over `size` samples; `parameters` and `buffers` are those of
    the models; `leaves(size)` says how many micro-batches of that size a step has.
    """

    def __init__(
        self,
        passes: Callable[[int], None],
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[Tensor],
        leaves: Callable[[int], int],
        options: Options,
        device: torch.device,
    ) -> None:
        self._passes, self._parameters, self._buffers, self._leaves = passes, parameters, buffers, leaves
        self._options, self._memory = options, None if options.memory is None else int(options.memory)
        self._needs: dict[int, Need] = {}
        held = {t.device for t in parameters if t.device.type == "cuda"}
        self._gpus = sorted(held, key=str) if device.type == "cuda" else []

    def choose(self, sizes: Sequence[int], meeting: Meeting, site: str) -> Choice:
        """The largest of `sizes` that fits on every process. UsageError on all of them where none does."""
        error: Exception | None = None
        found: int | None = None
        try:
            found = self._largest(sizes)
        except Exception as caught:
            error = caught
        need = None
        if error is None:
            scarcest = min(self._needs.values(), key=lambda need: (need.trial + need.room) / need.limit)
            need = self._needs[found] if found else scarcest
        said = {
            "failed": None if error is None else f"{type(error).__name__}: {error}",
            "size": found,
            "need": None if need is None else [need.size, need.trial, need.room, need.limit],
        }
        answers = meeting.say("the choice of the micro-batch", said, site=site)
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if answer["failed"] is not None:
                raise peer_failed(rank, f"failed while it tried micro-batches: {answer['failed']}")
        least = min(answers, key=lambda answer: answer["size"] or 0)
        if least["size"] is None:
            raise _too_little(answers.index(least), Need(*least["need"]))
        return Choice(least["size"], Need(*least["need"]), least["size"] == sizes[-1])

    def _largest(self, sizes: Sequence[int]) -> int | None:
        """Fewer micro-batches need fewer sums of gradients: a size may fit though a smaller one does not.

        So first the largest that fits with the sums of the fewest; then, among sizes with as many sums as each other,
        where that was too little, those with the least sums first."""
        sums, least = self._sums, self._sums(sizes[-1])
        above = largest_that_fits(sizes, lambda size: self._need(size).fits_with(least / sums(size)))
        if above is None:
            return None
        below = [size for size in sizes if size <= above]
        for _, level in groupby(reversed(below), key=sums):
            found = largest_that_fits(sorted(level), lambda size: self._need(size).fits)
            if found is not None:
                return found
        return None

    def _need(self, size: int) -> Need:
        if size not in self._needs:
            self._needs[size] = self._tried(size)
        return self._needs[size]

    def _tried(self, size: int) -> Need:
        with self._undone():
            if self._gpus:
                return self._on_gpus(size)
            here = sum(_bytes(t) for t in [*self._parameters, *self._buffers])
            assert self._memory is not None
            peak = _peak_of(lambda: self._passes(size)) * self._options.thread_replicas
            return Need(size, here + peak, self._room(size, self._parameters), self._memory)

    def _on_gpus(self, size: int) -> Need:
        """On the one with the least to spare."""
        limits = []
        for device in self._gpus:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            free, _ = torch.cuda.mem_get_info(device)
            there = free + torch.cuda.memory_reserved(device)
            limits.append(min(there, self._memory or there))
        try:
            self._passes(size)
            fitted = True
        except torch.OutOfMemoryError:
            fitted = False
        needs = []
        for device, limit in zip(self._gpus, limits, strict=True):
            room = self._room(size, [p for p in self._parameters if p.device == device])
            needs.append(Need(size, torch.cuda.max_memory_allocated(device), room, limit))
        torch.cuda.empty_cache()
        scarcest = max(needs, key=lambda need: (need.trial + need.room) / max(need.limit, 1))
        return scarcest if fitted else Need(size, max(scarcest.trial, scarcest.limit), scarcest.room, scarcest.limit)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Afterwards gradients are what they were. Running statistics do not change in a trial, and no other buffer
        may be written in a forward pass."""
        kept = [(p, p.grad) for p in self._parameters]
        for p, _ in kept:
            p.grad = None
        try:
            yield
        finally:
            for p, grad in kept:
                p.grad = grad

    def _room(self, size: int, parameters: Sequence[nn.Parameter]) -> int:
        return sum(_bytes(p) for p in parameters if p.requires_grad) * self._sums(size)

    def _sums(self, size: int) -> int:
        """How many times the trained parameters there is to be room for."""
        levels = math.ceil(math.log2(max(self._leaves(size), 1))) if self._options.exact else 0
        return _OPTIMIZER_STATE + levels + _EXCHANGED


def choose_micro_batch(
    plan: StepPlan,
    samples_per_epoch: int,
    passes: Callable[[int], None],
    models: Models,
    trained: Sequence[nn.Module],
    options: Options,
    device: torch.device,
    meeting: Meeting,
    site: str,
) -> Choice:
    """For all steps like `plan`, by `passes(size)` over its first samples. `trained` are those of `models` that they
    train."""
    parameters = [p for _, p in models.parameters(trained)]
    held = list(buffers(models.named(trained)).values())
    search = Search(passes, parameters, held, lambda size: -(-plan.samples // size), options, device)
    sizes = micro_batch_sizes(
        plan.samples,
        workers(options, meeting.world_size),
        several=any(map(needs_several, models.modules(trained).values())),
        last=samples_per_epoch % options.global_batch,
    )
    return search.choose(sizes, meeting, site)


def size_text(number: float) -> str:
    """A number of bytes, in the largest unit of which there is one: 1.5 GiB."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        del units[0]
    return f"{number:.0f} {units[0]}" if units[0] == "bytes" else f"{number:.3g} {units[0]}"


def _too_little(rank: int, need: Need) -> UsageError:
    return UsageError(
        f"a micro-batch of {need.size} does not fit on rank {rank}: a trial took {size_text(need.trial)}, optimizer "
        f"state and sums of gradients take {size_text(need.room)} more, and "
        f"there are {size_text(need.limit)}, of which a tenth is kept free",
        do="give more memory (--memory on the CPU), or need less: --precision bf16, activation checkpointing, --split, "
        "--stages or --shard (with a number for --micro-batch), a smaller model",
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _peak_of(work: Callable[[], None]) -> int:
    """The most that `work` had allocated on the CPU at any time, in bytes, by what torch's allocator tells."""
    if torch._C._autograd._profiler_enabled():
        raise UsageError(
            'micro_batch="auto" measures memory with torch\'s profiler, which is in use',
            do="start the profiler after the first step, or give a number (--micro-batch N)",
        )
    with _quiet_profiler(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        work()
    assert profiler.kineto_results is not None
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]" and _on_cpu(e)]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def _on_cpu(event: object) -> bool:
    return bool(event.device_type() == torch.autograd.DeviceType.CPU)  # type: ignore[attr-defined]


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Kineto says on standard error that it starts and stops."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
