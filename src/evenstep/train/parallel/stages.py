"""Pipeline stages: each process holds some of a model's units, in order, and runs the user's loss function with them.

The order of work in a step is that of one forward, one backward (1F1B; Narayanan et al. 2021, PipeDream-Flush in
Efficient Large-Scale Language Model Training on GPU Clusters). Where a stage fails, it and its neighbours go on to
exchange messages, which say so and carry nothing: nobody waits for one that does not come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.plan.grid import Grid, Place
from evenstep.train.lockstep import Lockstep, Passes
from evenstep.train.meeting import Meeting, call_site
from evenstep.train.norm import Folds
from evenstep.train.options import Asked
from evenstep.train.parallel import cut as cutting
from evenstep.train.parallel.flight import Flight
from evenstep.train.parallel.pipe import ACROSS, DOWN, UP, Message, Pipe
from evenstep.train.parallel.units import Units
from evenstep.train.purity import refuse_strangers
from evenstep.train.reduce import Named, Reducer
from evenstep.train.world import Ground

if TYPE_CHECKING:
    from evenstep.train.work import Work


class Stages(Lockstep):
    """This process's stage of the pipeline, and the processes beside it."""

    def __init__(self, grid: Grid, ground: Ground, exact: bool) -> None:
        """Every process of the run makes it at the same time. `reducer` sums over the replicas of this stage, `alike`
        is where they meet; `plan` is what to tell a person, once a model was placed."""
        self.grid, self.device = grid, ground.device
        mine = grid.place(ground.world.rank)
        self.stage, self.last = mine.stage, grid.stages - 1
        self.ranks = grid.ranks(replica=mine.replica)
        self.pipe = _pipe(grid, mine, ground)
        data, words = _replicas(grid, mine, ground)
        self.reducer = Reducer(mine.replica, grid.replicas, data, exact)
        self.alike = Meeting(mine.replica, grid.replicas, words)
        self.plan: list[str] = []
        self._units: Units | None = None

    # ---- the model

    def place(self, model: nn.Module, asked: Asked) -> None:
        """Cuts the model and keeps this stage's part of it. UsageError where it cannot be cut."""
        if asked.devices is not None:
            raise UsageError("devices= together with --stages is not offered", do="choose one of them")
        if self._units is not None:
            raise UsageError(
                "a second model was prepared, and the stages of a pipeline are cut from one model",
                do="start without --stages where there are several (a GAN, a moving average)",
            )
        cut = cutting.cut(model, self.grid.stages, asked)
        elsewhere = cutting.place(model, cut, self.stage, self.device)
        self._units = Units(model, cut, self.stage, elsewhere, self.device)
        self.plan += cut.lines()

    def own(self, named: Named) -> Named:
        """Of these parameters, those whose gradients are summed here."""
        holders = self.units.cut.holders
        for name, p in named:
            if id(p) not in holders:
                raise UsageError(
                    f"{name} came into the model after it was cut into stages", do="change the model before run.prepare"
                )
        return [(name, p) for name, p in named if holders[id(p)][0] == self.stage]

    @property
    def units(self) -> Units:
        """This stage's part of the model."""
        if self._units is None:
            raise UsageError("no model was prepared", do="model = run.prepare(Net()) before the loop")
        return self._units

    # ---- a step

    def compute(self, work: Work) -> None:
        """This stage's part of the micro-batches of the share."""
        passage = _Passage(self, work)
        share = list(work.share)
        if self.stage > 0:
            self.pipe.expect(self.stage - 1, DOWN, len(share), self.device)
        if self.stage < self.last:
            self.pipe.expect(self.stage + 1, UP, len(share), self.device)
        # One more than 1F1B's: with as many as there are stages to come, each waits for the slower of its neighbours at
        # every micro-batch, and all hiccups add up.
        ahead = min(self.last - self.stage + (self.stage < self.last), len(share))
        for i in share[:ahead]:
            passage.forward(i)
        for i in share[ahead:]:
            passage.forward(i)
            passage.backward()
        while passage.flying:
            passage.backward()
        self.pipe.settle()
        if passage.error is not None:
            raise passage.error
        if passage.failed or not share:
            work.open()

    def deliver(self) -> None:
        """After a step: where a parameter lies on several stages, all get the gradient that its owner has."""
        cut = self.units.cut
        for p in cut.shared(self.stage):
            owner, *others = cut.holders[id(p)]
            if owner == self.stage:
                for stage in others:
                    self.pipe.send(stage, ACROSS, Message(tensors=[p.grad]))
            else:
                p.grad = self.pipe.receive(owner, ACROSS, self.device).tensors[0]
        self.pipe.settle()

    # ---- what the stages do together beside steps

    def folds(self, mine: Folds) -> Folds:
        """The squared norms of the gradients on all stages, by name."""
        said = {name: value.item() for name, value in mine.items()}
        answers = self.agree(said, call_site())
        return {name: torch.tensor(v, dtype=torch.float64) for answer in answers for name, v in answer.items()}

    def passes(self, models: Sequence[nn.Module], what: str, site: str) -> Passes:
        return _ForwardPasses(self, site)

    def check(self, returned: Any) -> None:
        self.units.refuse_ghosts(returned)

    def agree(self, said: object, site: str) -> list[Any]:
        return self.pipe.meeting.say("stages", said, site=site)


class _Passage:
    """The micro-batches of one step.backward on their way through this stage. `error` came up here; `failed`: here or
    on another stage."""

    def __init__(self, stages: Stages, work: Work) -> None:
        self.stages, self.work = stages, work
        self.pipe, self.units = stages.pipe, stages.units
        self.flying: deque[Flight] = deque()
        self.failed = False
        self.error: BaseException | None = None
        cut, stage = self.units.cut, stages.stage
        self.shared = [(p, cut.holders[id(p)], id(p) in cut.loose) for p in cut.shared(stage)]
        self.done = 0
        loss_fn = work.loss_fn
        work.loss_fn = lambda *given: self.units.run(loss_fn, *given)

    def forward(self, i: int) -> None:
        """The next micro-batch goes down."""
        flight = Flight()
        if self.stages.stage > 0:
            flight.received = self.pipe.receive(self.stages.stage - 1, DOWN, self.stages.device)
            self.failed = self.failed or flight.received.failed
        self._unless_failed(lambda: self._forward(flight, i))
        if self.stages.stage < self.stages.last:
            self.pipe.send(self.stages.stage + 1, DOWN, self._or_failed(flight.handed))
            flight.handed = None
        self.flying.append(flight)

    def _forward(self, flight: Flight, i: int) -> None:
        with self.units.flying(flight):
            total = self.work.leaf(i)
        if total is not None:
            flight.outputs = [total]
        if self.work.first and not self.done and not self.flying:
            known = {id(p) for _, p in self.units.cut.parameters}
            for output in flight.outputs:
                refuse_strangers(output, known)

    def backward(self) -> None:
        """The oldest micro-batch comes back up."""
        flight = self.flying.popleft()
        stage = self.stages.stage
        gradients: list[Tensor | None] = [None]  # of the loss
        if stage < self.stages.last:
            came = self.pipe.receive(stage + 1, UP, self.stages.device)
            self.failed = self.failed or came.failed
            gradients = came.tensors
        seeds = self._receive_shared()
        totals: list[Tensor | None] = []
        self._unless_failed(lambda: totals.extend(self._backward(flight, gradients, seeds)))
        if stage > 0:
            going = [slot.gradient for slot in flight.slots if slot is not None]
            self.pipe.send(stage - 1, UP, self._or_failed(None if self.failed else Message(tensors=going)))
        self._send_shared(totals)
        self.done += 1
        if self.failed:
            return
        if not self.flying and self.done == len(self.work.share):
            self.work.open()
        self.work.reduction.leaf_done()

    def _backward(
        self, flight: Flight, gradients: Sequence[Tensor | None], seeds: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of the parameters that lie on several stages, as far as they are not summed here."""
        wanted = [t for t in flight.outputs if t.requires_grad]
        last = self.stages.stage == self.stages.last
        roots = [(t, g) for t, g in zip(wanted, gradients, strict=not last) if last or g is not None]
        kept = [p.grad for p, _, _ in self.shared]
        mine = [holders[0] == self.stages.stage for _, holders, _ in self.shared]
        for (p, _, loose), own, seed in zip(self.shared, mine, seeds, strict=True):
            if not own:
                p.grad = None
            if seed is not None and not loose:
                # The later stage's part comes first in autograd's sum, as it does in one process.
                roots.append((p, seed))
        before = [(p.grad, None if p.grad is None else p.grad._version) for p, _, _ in self.shared]
        totals: list[Tensor | None] = []
        try:
            with self.units.recomputed(flight), self.work.step.undrawn():
                if roots:
                    torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            for (p, _, loose), seed, was in zip(self.shared, seeds, before, strict=True):
                if loose and seed is not None:
                    self._add_loose(p, seed, was)
            totals = [p.grad for p, _, _ in self.shared]
        finally:
            for (p, _, _), own, grad in zip(self.shared, mine, kept, strict=True):
                if not own:
                    p.grad = grad
        return totals

    def _add_loose(self, p: nn.Parameter, seed: Tensor, was: tuple[Tensor | None, int | None]) -> None:
        if p.grad is not was[0] or (p.grad is not None and p.grad._version != was[1]):
            name = next(name for name, known in self.units.cut.parameters if known is p)
            raise UsageError(
                f"{name}, which belongs to no unit of the model, gets gradients on several stages: their order in the "
                "sum would be another than in one process",
                do="use it in one place, or put it into a module of its own that is called once",
            )
        p.grad = seed if p.grad is None else p.grad.add_(seed)

    # ---- parameters that lie on several stages: gradients go from each holder to the one before it

    def _receive_shared(self) -> list[Tensor | None]:
        """For each shared parameter, what the later stages have of its gradient."""
        senders = [self._neighbour(holders, 1) for _, holders, _ in self.shared]
        found: dict[int, list[Tensor | None]] = {}
        for sender in sorted({s for s in senders if s is not None}):
            came = self.pipe.receive(sender, ACROSS, self.stages.device)
            self.failed = self.failed or came.failed
            found[sender] = list(came.tensors) if not came.failed else [None] * len(self.shared)
        return [None if s is None else found[s].pop(0) for s in senders]

    def _send_shared(self, totals: Sequence[Tensor | None]) -> None:
        receivers = [self._neighbour(holders, -1) for _, holders, _ in self.shared]
        going: dict[int, Message] = {}

        def pack() -> None:  # there are tensors that cannot be sent
            for to in {r for r in receivers if r is not None}:
                going[to] = Message(tensors=[t for t, r in zip(totals, receivers, strict=True) if r == to])

        self._unless_failed(pack)
        for receiver in sorted({r for r in receivers if r is not None}):
            self.pipe.send(receiver, ACROSS, self._or_failed(going.get(receiver)))

    def _neighbour(self, holders: Sequence[int], step: int) -> int | None:
        at = holders.index(self.stages.stage) + step
        return holders[at] if 0 <= at < len(holders) else None

    # ---- failures

    def _unless_failed(self, do: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            do()
        except (Exception, SystemExit) as error:
            self.error, self.failed = error, True

    def _or_failed(self, message: Message | None) -> Message:
        return Message(failed=True) if message is None or self.failed else message


class _ForwardPasses(Passes):
    """Forward passes through all stages. The last one finds what the function returns."""

    def __init__(self, stages: Stages, site: str) -> None:
        super().__init__()
        self._stages, self._site = stages, site
        self._broken = False  # a pass has failed, here or before

    def _run(self, work: Callable[[], None] | None, part: str) -> None:
        stages, flight = self._stages, Flight()
        if stages.stage > 0:
            flight.received = stages.pipe.receive(stages.stage - 1, DOWN, stages.device)
            self._broken = self._broken or flight.received.failed
        if work is not None and not self._broken:
            try:
                with stages.units.flying(flight):
                    stages.units.run(work)
            except Exception as error:
                self.failed, self._broken = error, True
        if stages.stage < stages.last:
            message = None if self._broken else flight.handed
            stages.pipe.send(stages.stage + 1, DOWN, message or Message(failed=True))

    def outcome(self, found: Any) -> Any:
        said = {"failed": self._broken, "found": found}
        answers = self._stages.agree(said, self._site)
        if self.failed is None and any(answer["failed"] for answer in answers):
            self.failed = RuntimeError("another stage failed")
        return answers[-1]["found"]


def _pipe(grid: Grid, mine: Place, ground: Ground) -> Pipe:
    made = {}
    for replica in range(grid.replicas):  # every process makes every group
        ranks = grid.ranks(replica=replica)
        words = dist.new_group(ranks, backend="gloo")
        lanes = None
        if ground.backend != "gloo":
            lanes = [dist.new_group(ranks, backend=ground.backend) for _ in (DOWN, UP, ACROSS)]
        made[replica] = Pipe(mine.stage, ranks, words, lanes)
    return made[mine.replica]


def _replicas(grid: Grid, mine: Place, ground: Ground) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group of this stage's replicas for gradients, and the one for words; none where there is one replica."""
    if grid.replicas == 1:
        return None, None
    made = {}
    for stage in range(grid.stages):
        ranks = grid.ranks(stage=stage)
        words = dist.new_group(ranks, backend="gloo")
        data = words if ground.backend == "gloo" else dist.new_group(ranks, backend=ground.backend)
        made[stage] = data, words
    return made[mine.stage]
