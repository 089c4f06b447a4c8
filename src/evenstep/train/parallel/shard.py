"""Sharded parameters (FSDP2): each process keeps a part of every parameter, gradient and optimizer state.

A module's parameters are gathered before it computes and freed afterwards. Gradients are the same sum as everywhere:
in place of FSDP's reduce-scatter, each process receives its part of the gradient of every micro-batch of the round,
and adds those in the fixed tree. With replicas of the shards, the parts of their subtrees are exchanged at the end.

A process that fails in a step runs along with the others until they meet, so the step can be done again. One that is
gone (kill -9, Ctrl-C) ends the run on the others with PeerFailed.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from evenstep.errors import EvenstepError, LossError, UsageError
from evenstep.plan.grid import Grid
from evenstep.plan.tree import Node, combine, subtrees, value_at
from evenstep.train.lockstep import Lockstep, Passes
from evenstep.train.meeting import Meeting, call_site, lost_contact
from evenstep.train.options import Asked
from evenstep.train.parallel.collective_order import CollectiveOrder, Event
from evenstep.train.parallel.cutting import check_shardable, cut
from evenstep.train.purity import refuse_writes
from evenstep.train.reduce import Leaves, Named
from evenstep.train.world import Ground

if TYPE_CHECKING:
    from evenstep.train.work import Work


_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD: larger blocks are mapped one by one


class Group:
    """Parameters that are gathered, and whose gradients are reduced, together. Number `index` of this process."""

    def __init__(self, index: int, name: str, fsdp: FSDPParamGroup) -> None:
        self.index, self.name, self.fsdp = index, name, fsdp

    @property
    def params(self) -> list[FSDPParam]:
        return self.fsdp.fsdp_params

    @property
    def trained(self) -> list[FSDPParam]:
        """Those whose gradients travel: FSDP sends zeros for what a micro-batch does not use."""
        return [p for p in self.params if p.sharded_param.requires_grad]

    @property
    def length(self) -> int:
        """Elements of one process's part of the gradients, padding included."""
        return sum(p.padded_sharded_param_size.numel() for p in self.trained)

    def views(self, part: Tensor) -> Iterator[tuple[FSDPParam, Tensor]]:
        """Each trained parameter with its piece of a part, in its shape here."""
        start = 0
        for p in self.trained:
            yield p, part.as_strided(p.sharded_size, p.contiguous_sharded_stride, part.storage_offset() + start)
            start += p.padded_sharded_param_size.numel()


class Shards:
    """The sharded models of this process. It is the reducer of its layout, too."""

    def __init__(self, ground: Ground, grid: Grid, exact: bool) -> None:
        rank = ground.world.rank
        self.ground, self.grid, self.exact = ground, grid, exact
        self.place_here = grid.place(rank)
        self.group: dist.ProcessGroup  # the shards of one replica
        self.across: dist.ProcessGroup | None = None  # the same shard of all replicas
        meeting = ground.meeting
        for replica in range(grid.replicas):
            ranks = grid.ranks(replica=replica)
            control = meeting.group if grid.replicas == 1 else dist.new_group(ranks, backend="gloo")
            data = dist.new_group(ranks, backend=ground.backend)
            if rank in ranks:
                self.group = data
                if grid.replicas > 1:
                    meeting = Meeting(ranks.index(rank), len(ranks), control, ranks)
        for shard in range(grid.shards if grid.replicas > 1 else 0):
            ranks = grid.ranks(shard=shard)
            data = dist.new_group(ranks, backend=ground.backend)
            if rank in ranks:
                self.across = data
        if ground.device.type == "cpu":
            _return_freed_memory()
        self.mesh = DeviceMesh.from_group(self.group, ground.device.type, mesh_dim_names=("shard",))
        self.ranks = grid.ranks(replica=self.place_here.replica)
        self.groups: list[Group] = []
        self.plan: list[str] = []  # for the person who runs this
        self.order = CollectiveOrder(meeting, self._perform, lambda index: self.groups[index].name)
        self.active: ShardedSum | None = None
        self.calls: Counter[int] = Counter()  # of each group's module, in this forward pass
        self.names: dict[int, str] = {}  # of each parameter, cut and gathered, by id
        self._hooks: dict[int, Any] = {}
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    # ---- models

    def place(self, model: nn.Module, asked: Asked) -> None:
        """Cuts a prepared model's parameters."""
        if asked.devices is not None:
            raise UsageError("devices= together with --shard is not offered", do="choose one of them")
        check_shardable(model)
        model.to(self.ground.device)
        chosen = cut(model, asked.shard)
        for _, module in reversed(chosen):
            fully_shard(module, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        inner = {id(p): name for name, p in model.named_parameters()}
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
            for fsdp in state_of(module)._fsdp_param_groups:
                _refuse_mixed(fsdp.fsdp_params, inner)
        state_of(model)._lazy_init()  # else a module that is called first would be taken for the whole model
        names = {id(module): name for name, module in chosen}
        with self.order.trusted():
            for module in modules:
                self._adopt(module, names.get(id(module), "the rest of the model"))
        model.register_forward_hook(self._reshard, always_call=True)
        self.plan.append(
            _plan_line(type(model).__name__.removeprefix("FSDP"), [name for name, _ in chosen], self.ranks)
        )

    def _adopt(self, module: nn.Module, name: str) -> None:
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)
        for fsdp in state_of(module)._fsdp_param_groups:
            group = Group(len(self.groups), name, fsdp)
            self.groups.append(group)
            fsdp._all_gather_comm = _Gather(self, group)
            fsdp._reduce_scatter_comm = _Reduce(self, group)
            fsdp.unshard()  # once: FSDP reduces nothing of a group that it has never gathered
            fsdp.wait_for_unshard()
            fsdp._to_sharded()
            nn.Module.register_forward_pre_hook(module, partial(self._called, group.index))

    def _called(self, index: int, *_: object) -> None:
        if torch._C._current_graph_task_id() == -1:  # else it is computed again in a backward pass
            self.calls[index] += 1

    def _reshard(self, model: nn.Module, *_: object) -> None:
        """A call outside of a pass leaves the parameters cut, as optimizers and checkpoints expect them."""
        if not self.order.within:
            assert isinstance(model, FSDPModule)
            model.reshard()

    def groups_of(self, models: Sequence[nn.Module]) -> list[Group]:
        fsdp = {id(f) for m in models for state in state_of(m)._state_ctx.all_states for f in state._fsdp_param_groups}
        return [group for group in self.groups if id(group.fsdp) in fsdp]

    def gather(self, models: Sequence[nn.Module]) -> None:
        """What no module gathers by itself is there from now on, whatever method of the model is called."""
        for model in models:
            for fsdp in state_of(model)._fsdp_param_groups:
                fsdp.unshard()
                fsdp.wait_for_unshard()

    def free(self, models: Sequence[nn.Module]) -> None:
        """Every parameter is cut again, whatever has happened."""
        for model in models:
            assert isinstance(model, FSDPModule)
            model.reset_iter_state()
        for group in self.groups_of(models):
            for p in group.params:
                p.unsharded_param.grad = None

    @contextmanager
    def unchanged(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """UsageError if gathered parameters are written to inside: that would be lost when they are freed."""
        params = [p.unsharded_param for group in self.groups_of(models) for p in group.params]
        written = [p._version for p in params]
        yield
        changed = [p for p, before in zip(params, written, strict=True) if p._version != before]
        if changed:
            refuse_writes([self.names.get(id(p), "a parameter") for p in changed])

    # ---- collectives

    def _perform(self, event: Event) -> None:
        """The collective of an event, for a process that does not compute."""
        kind, index = event
        group = self.groups[index]
        if kind == "gather":
            pieces = [p._sharded_param_data for p in group.params]
            if len({piece.dtype for piece in pieces}) > 1:
                pieces = [piece.view(torch.uint8) for piece in pieces]
            mine = torch.cat(pieces)
            with self.contact():
                dist.all_gather_single(mine.new_empty(mine.numel() * self.grid.shards), mine, group=self.group)
        else:
            like = group.trained[0].sharded_param
            zeros = self.scratch("nothing", self.grid.shards * group.length, like.dtype).zero_()
            self.exchange(group, zeros)

    def exchange(self, group: Group, gradients: Tensor) -> None:
        """Sends each process its part of the gradients of this one's micro-batch, and takes the parts for this one."""
        active = self.active
        if active is None or not active.takes(group):
            raise LossError(
                f"the loss gave a gradient to {group.name} of a model that was not given to step.backward",
                do="give every model that the loss trains: step.backward(loss_fn, first, second)",
            )
        shards = self.grid.shards
        with self.contact():
            if self.exact:
                received = self.scratch("received", gradients.numel(), gradients.dtype)
                dist.all_to_all_single(received, gradients, group=self.group)
                parts = received.view(shards, -1)
            else:
                parts = gradients.new_empty(1, gradients.numel() // shards)
                dist.reduce_scatter_single(parts.view(-1), gradients, group=self.group)
        active.receive(group, parts)

    @contextmanager
    def contact(self) -> Iterator[None]:
        """PeerFailed where torch.distributed fails inside."""
        try:
            yield
        except RuntimeError as error:
            raise lost_contact(self.ground.world.rank, error, "while parameters or gradients were exchanged") from error

    def scratch(self, name: str, length: int, dtype: torch.dtype) -> Tensor:
        """Memory that is used within one exchange."""
        have = self._scratch.get((name, dtype))
        if have is None or have.numel() < length:
            have = self._scratch[name, dtype] = torch.empty(length, dtype=dtype, device=self.ground.device)
        return have[:length]

    # ---- the reducer of this layout

    def watch(self, named: Named) -> None:
        """Hooks for the parameters that require a gradient now."""
        names = {id(p): name for name, p in named}
        for group in self.groups:
            for p in group.params:
                whole = p.unsharded_param
                self.names[id(whole)] = self.names[id(p.sharded_param)] = names.get(id(p.sharded_param), group.name)
                if p.sharded_param.requires_grad and id(whole) not in self._hooks:
                    whole.requires_grad_(True)  # FSDP tells it only when it gathers
                    self._hooks[id(whole)] = whole.register_post_accumulate_grad_hook(self._ready)

    def start(self, named: Named, leaves: int, present: Sequence[int] | None = None) -> ShardedSum:
        """Begins to sum the gradients of `named` over micro-batches 0..leaves-1. `present` is for other layouts: here
        a micro-batch that is missing is a round in which this process runs along."""
        self.active = ShardedSum(self, named, leaves)
        return self.active

    def close(self, wait: bool = True) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _ready(self, p: Tensor) -> None:
        if self.active is not None:
            self.active.ready(p)

    # ---- one step.backward

    def compute(self, work: Work) -> None:
        """The rounds of a step: in each one, every shard of a replica computes one micro-batch, or runs along.

        A round without any micro-batch is left out."""
        models, reduction = work.models, work.reduction
        assert isinstance(reduction, ShardedSum)
        work.known = set(self.names)
        passes = ShardPasses(self, models, f"step.backward {work.call} {_origin(work.loss_fn)}", work.site)
        rounds = self._rounds(work)
        last = max((number for number, there in enumerate(rounds) if there), default=None)
        for number, there in enumerate(rounds):
            if not there:
                reduction.leaf_done()
                continue
            losses: list[Tensor] = []
            mine = next((i for i in there if i in work.share), None)
            passes.run(None if mine is None else partial(_leaf, work, mine, losses), "loss")
            if number == last:
                passes.check()
                try:
                    work.open()
                except BaseException:
                    self.free(models)  # there is no backward pass
                    raise
            graph = bool(losses) and losses[0].requires_grad
            part = f"backward {work.trained}"
            reduction.computes = graph
            passes.run(partial(self._backward, work, losses.pop()) if graph else None, part)
            losses.clear()
            reduction.leaf_done()
        if last is None:
            work.open()
        passes.check()

    def _rounds(self, work: Work) -> list[Sequence[int]]:
        """For each round, the micro-batches that the shards of this replica compute."""
        plan, grid = work.step._plan, self.grid
        whole = grid.share(plan.micro_batches, self.place_here.replica)
        return [plan.among(whole[k : k + grid.shards]) for k in range(0, len(whole), grid.shards)]

    def _backward(self, work: Work, loss: Tensor) -> None:
        models = work.models
        with work.step.undrawn():
            loss.backward()
        for model in models:
            params = [p for group in self.groups_of([model]) for p in group.params]
            if any(p.unsharded_param.grad is not None for p in params):
                # FSDP waits for the backward of a module; only other methods of the model were called.
                state_of(model)._root_post_backward_final_callback()
        left = [p for group in self.groups_of(models) for p in group.params if p.unsharded_param.grad is not None]
        if left:
            name = self.names[id(left[0].unsharded_param)]
            raise LossError(
                f"{name} got a gradient after the backward pass of its module was over",
                do="use a module's parameters in its own forward only, or leave the module out of "
                "prepare(..., shard=[...])",
            )


def _refuse_copy(module: nn.Module, _: object) -> NoReturn:
    raise UsageError(
        f"the {type(module).__name__.removeprefix('FSDP')} is copied (copy.deepcopy, AveragedModel) after run.prepare: "
        "with --shard this process has only a part of it",
        do="make the copy before run.prepare, and prepare both",
    )


class ShardedSum(Leaves):
    """The gradients of one step.backward: this process's part of the mean, in every `.grad`.

    After each round (computed here or not) `leaf_done`; `open` once, before the last backward pass; then `finish`, or
    `fail` from wherever an error came up. Nothing but these changes `.grad`; a failure puts it back.
    """

    def __init__(self, owner: Shards, named: Named, leaves: int) -> None:
        cut = {id(p.sharded_param): p for group in owner.groups for p in group.params}
        trained = [(name, p) for name, p in named if p.requires_grad]
        share = owner.grid.share(leaves, owner.place_here.replica)
        self.cut = [cut[id(p)] for _, p in trained]
        whole = [(name, p.unsharded_param) for (name, _), p in zip(trained, self.cut, strict=True)]
        super().__init__(whole, share, owner.exact, owner.names)
        self.owner, self.leaves = owner, leaves
        here = set(map(id, self.cut))
        self.groups = [group for group in owner.groups if any(id(p) in here for p in group.params)]
        for group in self.groups:
            _refuse_mixed(group.params, owner.names)
        self.kept = [p.sharded_param.grad for p in self.cut]
        self._forget()
        self.sums: dict[int, list[tuple[Node, Tensor]]] = {group.index: [] for group in self.groups}
        self.held: dict[int, Tensor] = {}  # parts of this round that more are to be added to
        self.seen: Counter[int] = Counter()  # reductions of each group in this round
        self.used: set[int] = set()
        self.computes = False  # the backward pass under way is this process's own
        self.opened = self.met = self.failed = False
        self.divisor: float | None = None

    # ---- in order of a step

    def ready(self, p: Tensor) -> int:
        k = super().ready(p)
        self.used.add(k)
        return k

    def takes(self, group: Group) -> bool:
        """Whether the step trains it."""
        return group.index in self.sums

    def receive(self, group: Group, parts: Tensor) -> None:
        """This process's part of every shard's gradient ([shards, length]; the memory is the caller's).

        Where a module is called more than once, FSDP reduces more than once; a parameter's whole gradient is in one of
        these, and zeros are in the others."""
        index = group.index
        self.seen[index] += 1
        expected = self.owner.order.planned(("reduce", index))
        if expected is None:
            expected = self.owner.calls[index] if self.computes else 0
        if expected and self.seen[index] > expected:
            raise LossError(
                f"{group.name} got its gradients in more parts than it was called",
                do="leave it out of prepare(..., shard=[...])",
            )
        if expected == 1:
            self._fold(index, parts)
            return
        held = self.held.get(index)
        self.held[index] = parts.clone() if held is None else held.add_(parts)
        if self.seen[index] == expected:
            self._fold(index, self.held.pop(index))

    def leaf_done(self) -> None:
        """After a round."""
        for index in list(self.held):
            self._fold(index, self.held.pop(index))
        self.position += self.owner.grid.shards
        self.fired.clear()
        self.seen.clear()
        self._forget()

    def open(self, meet: Callable[[], float | None]) -> None:
        """Before the last backward pass: `meet` exchanges losses and weights, and returns what to divide by."""
        self.opened = True
        self.divisor = meet()
        self.met = True

    def finish(self, tell: Callable[[], EvenstepError]) -> None:
        """Puts this process's part of the mean gradient into every `.grad` (None where no micro-batch used it).

        Where another process failed in its last backward pass, `tell` finds out which and why."""
        used = self._vote()
        if used is None:
            self.put_back()
            raise tell()
        self.owner.active = None
        try:
            pieces = {id(p): view for group in self.groups for p, view in group.views(self._total(group))}
        except BaseException:
            self.put_back()
            raise
        for k, (p, kept) in enumerate(zip(self.cut, self.kept, strict=True)):
            grad = p.to_sharded_dtensor(pieces[id(p)]) if used >> k & 1 else None
            p.sharded_param.grad = grad if kept is None else kept if grad is None else kept.add_(grad)

    def fail(self, meet: Callable[[], object], tell: Callable[[], object]) -> None:
        """An error came up in this process: tell the others, wherever they are going to meet."""
        self.failed = True
        with suppress(EvenstepError):  # they are gone or know already; this process's own error is what counts
            if not self.opened:
                meet()
            elif self.met:  # else the meeting itself has failed, on every process
                self._vote()
                tell()
        self.put_back()

    def put_back(self) -> None:
        self.owner.active = None
        self.sums.clear()
        self.held.clear()
        for p, kept in zip(self.cut, self.kept, strict=True):
            p.sharded_param.grad = kept

    # ---- the tree

    def _forget(self) -> None:
        """FSDP puts something into `.grad` after every backward pass."""
        for p in self.cut:
            p.sharded_param.grad = None

    def _fold(self, index: int, parts: Tensor) -> None:
        """Adds the parts of a round to the sums of subtrees that there are."""
        stack = self.sums[index]
        if not self.exact:
            if stack:
                stack[0][1].add_(parts[0])
            else:
                stack.append((Node(0, self.share.start), parts[0].clone()))
            return
        for number, part in enumerate(parts[: self.share.stop - self.position], self.position):
            node, total = Node(0, number), part
            while stack and node.index % 2 == 1 and stack[-1][0] == Node(node.level, node.index - 1):
                total = stack.pop()[1].add_(total)
                node = Node(node.level + 1, node.index >> 1)
            stack.append((node, total))
        foreign = parts.untyped_storage().data_ptr()
        for place in range(len(stack) - 1, -1, -1):
            node, total = stack[place]
            if total.untyped_storage().data_ptr() != foreign:
                break
            stack[place] = node, total.clone()

    def _total(self, group: Group) -> Tensor:
        """This process's part of the mean gradient of a group."""
        parts = dict(self.sums.pop(group.index))
        if self.owner.across is not None:
            total = self._across(group, parts)
        else:
            found = combine(parts, self.leaves, Tensor.add_)
            total = self._zeros(group) if found is None else found
        if self.divisor is not None:
            total.div_(self.divisor)
        if self.exact:
            total.add_(0.0)  # -0.0 becomes 0.0: a leaf that is skipped and one that is zero leave different zeros
        if total.is_cuda:
            total.record_stream(torch.cuda.current_stream())
        return total

    def _across(self, group: Group, parts: dict[Node, Tensor]) -> Tensor:
        """The sum over the replicas, whose subtrees' sums are exchanged and added in the tree."""
        owner, grid = self.owner, self.owner.grid
        replicas, length = grid.replicas, group.length
        if not self.exact:
            total = next(iter(parts.values()), None)
            total = self._zeros(group) if total is None else total
            with owner.contact():
                dist.all_reduce(total, group=owner.across)
            return total
        chunk = -(-length // replicas)
        nodes = [subtrees(grid.share(self.leaves, replica)) for replica in range(replicas)]
        mine = nodes[owner.place_here.replica]
        send = self._zeros(group, replicas * len(mine) * chunk).view(replicas, len(mine), chunk)
        for place, node in enumerate(mine):
            total = value_at(node, parts, self.leaves, Tensor.add_)
            if total is not None:
                padded = torch.nn.functional.pad(total, (0, replicas * chunk - length))
                send[:, place].copy_(padded.view(replicas, chunk))
        sizes = [len(theirs) * chunk for theirs in nodes]
        received = self._zeros(group, sum(sizes))
        with owner.contact():
            dist.all_to_all_single(received, send.view(-1), sizes, [len(mine) * chunk] * replicas, group=owner.across)
        pieces = {
            node: piece
            for theirs, block in zip(nodes, received.split(sizes), strict=True)
            for node, piece in zip(theirs, block.split(chunk) if theirs else (), strict=True)
        }
        summed = combine(pieces, self.leaves, Tensor.add_)
        assert summed is not None  # a step has at least one micro-batch
        out = self._zeros(group, replicas * chunk)
        with owner.contact():
            dist.all_gather_single(out, summed.contiguous(), group=owner.across)
        return out[:length]

    def _zeros(self, group: Group, length: int | None = None) -> Tensor:
        like = group.trained[0].sharded_param
        return torch.zeros(
            group.length if length is None else length, dtype=like.dtype, device=self.owner.ground.device
        )

    def _vote(self) -> int | None:
        """Which parameters any process used, a bit each; None if one failed."""
        mine = sum(1 << k for k in self.used)
        size = len(self.cut) // 8 + 1
        payload = bytes([self.failed]) + mine.to_bytes(size, "little")
        answers = self.owner.ground.meeting.exchange("step.backward, its end", payload, site=call_site())
        if any(answer[0] for answer in answers):
            return None
        used = 0
        for answer in answers:
            used |= int.from_bytes(answer[1:], "little")
        return used


class ShardPasses(Passes):
    """Passes that the shards of a replica do at the same time."""

    def __init__(self, shards: Shards, models: Sequence[nn.Module], what: str, site: str) -> None:
        super().__init__()
        self._shards, self._models, self._over = shards, models, False
        modes = "".join("t" if model.training else "e" for model in models)
        places = [shards.groups_of([model])[0].index for model in models]
        self._key = f"{what} {modes} {places} {site}"
        shards.order.meeting.exchange(f"{what.split()[0]}, its beginning", signature=self._key, site=site)

    def _run(self, work: Callable[[], None] | None, part: str) -> None:
        if self._over:
            return
        shards, models = self._shards, self._models
        backward = part.startswith("backward")

        def forward() -> None:
            assert work is not None
            shards.calls.clear()
            shards.free(models)  # whatever the script has done with them since
            shards.gather(models)
            with shards.unchanged(models), _naming_mixtures():
                work()

        if work is not None and not backward:
            work_inside: Callable[[], None] | None = forward
        else:
            work_inside = work
        done = False
        try:
            self.failed, self._over = shards.order.run(f"{part} of {self._key}", work_inside, self.failed)
            done = True
        finally:
            if part != "loss" or not done or self.failed is not None:
                shards.free(models)


class ShardLockstep(Lockstep):
    """The shards of this replica."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self.ranks = shards, shards.ranks

    def passes(self, models: Sequence[nn.Module], what: str, site: str) -> Passes:
        return ShardPasses(self._shards, models, what, site)

    def agree(self, said: object, site: str) -> list[Any]:
        return self._shards.order.meeting.say("the checks of the first step", said, site=site)


class _Gather(AllGather):
    """In place of FSDP's own: compared with the order before it starts."""

    def __init__(self, shards: Shards, group: Group) -> None:
        self._shards, self._group = shards, group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._shards.order.before("gather", self._group.index)
        with self._shards.contact():
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _Reduce(ReduceScatter):
    """In place of FSDP's own: the parts stay apart, for the tree. What FSDP then puts into `.grad` is not read."""

    def __init__(self, shards: Shards, group: Group) -> None:
        self._shards, self._group = shards, group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        if not self._shards.order.within:
            for other in self._shards.groups:
                other.fsdp._to_sharded()
        self._shards.order.before("reduce", self._group.index)
        self._shards.exchange(self._group, input_tensor)


def _return_freed_memory() -> None:
    """Has glibc give the memory of freed tensors back: it would keep several times what the shards take, since gathered
    parameters and gradients come and go all the time. Nothing where there is another allocator."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        set_option(_MMAP_THRESHOLD, 1 << 20)


def state_of(module: nn.Module) -> Any:
    """What FSDP keeps of a module."""
    return fully_shard.state(module)  # type: ignore[attr-defined]


def _plan_line(model: str, names: Sequence[str], ranks: Sequence[int]) -> str:
    alone = f"; {names[0]} to {names[-1]} ({len(names)} modules) are gathered one at a time" if names else ""
    return f"{model}: sharded over {len(ranks)} processes{alone}"


def _leaf(work: Work, index: int, to: list[Tensor]) -> None:
    loss = work.leaf(index)
    assert loss is not None  # this process has the whole model
    to.append(loss)


def _refuse_mixed(params: Sequence[FSDPParam], names: Mapping[int, str]) -> None:
    """UsageError where gradients of several dtypes would have to travel together."""
    by_dtype: dict[torch.dtype, str] = {}
    for p in params:
        if p.sharded_param.requires_grad:
            by_dtype.setdefault(p.sharded_param.dtype, names[id(p.sharded_param)])
    if len(by_dtype) > 1:
        raise UsageError(
            "parameters of different dtypes cannot be sharded together: "
            + ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in by_dtype.items()),
            do="give them one dtype, or freeze those of all but one",
        )


@contextmanager
def _naming_mixtures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        raise UsageError(
            f"a sharded parameter is used outside of its module's forward ({error})",
            do="compute with a module by calling it; leave the module out of prepare(..., shard=[...]) if another one "
            "uses its parameters",
        ) from error


def _origin(fn: object) -> str:
    """Which function it is, the same on every process."""
    code = getattr(fn, "__code__", None)
    where = f" {os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(fn, '__qualname__', type(fn).__qualname__)}{where}"
