"""The exact sum of gradients over micro-batches and processes.

Each micro-batch's gradients are a leaf of the fixed tree of `plan.tree`. A process adds the leaves of its share into
whole subtrees; across processes the subtree sums of a bucket are exchanged (all-to-all of parts, the tree over them,
all-gather: the bytes of a ring all-reduce), so who computed a leaf changes no bit. Buckets leave while the backward of
the share's last micro-batch still runs: from a communication thread on the CPU, on a side stream on a GPU.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.errors import EvenstepError, LossError
from evenstep.plan.tree import Node, combine, share, subtrees
from evenstep.train import exchange
from evenstep.train.buckets import Bucket, fill_buckets
from evenstep.train.meeting import lost_contact

Named = Sequence[tuple[str, torch.nn.Parameter]]


class Lane:
    """One thread that runs pieces of work in the order in which they were given."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="evenstep-communication", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self, wait: bool) -> None:
        """Ends the thread after what it was given. It may never get there when another process is gone: do not wait."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # it holds gradients


class Reducer:
    """Hooks and memory that last over steps. One for a run; `start` begins the reduction of one backward.

    `rank` of `world_size` counts replicas of the model (or of this process's stage of it), `group` connects them.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None, exact: bool) -> None:
        self.rank, self.world_size, self.group, self.exact = rank, world_size, group, exact
        self.lane = Lane() if world_size > 1 else None
        self.streams: dict[torch.device, torch.cuda.Stream] = {}  # a side stream for each GPU that holds parameters
        self.active: Reduction | None = None
        self.names: dict[int, str] = {}  # id of a parameter -> name
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._buckets: dict[tuple[tuple[int, torch.dtype, torch.device], ...], list[Bucket]] = {}
        self._scratch: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def watch(self, named: Named) -> None:
        """Hooks for the parameters that require a gradient now (freezing and unfreezing need no word of the user)."""
        for name, p in named:
            if p.requires_grad and id(p) not in self._hooks:
                self._hooks[id(p)] = p.register_post_accumulate_grad_hook(self._ready)
                self.names[id(p)] = name

    def start(self, named: Named, leaves: int, present: Sequence[int] | None = None) -> Reduction:
        """Begins to reduce the gradients of `named` over micro-batches 0..leaves-1, shared out among the replicas.

        `present`: those of this process's share that there are (all)."""
        trained = [(name, p) for name, p in reversed(named) if p.requires_grad]  # about as backward reaches them
        shares = [share(leaves, self.world_size, rank) for rank in range(self.world_size)]
        self.active = Reduction(self, trained, leaves, shares, present)
        return self.active

    def buckets(self, params: list[torch.nn.Parameter]) -> list[Bucket]:
        key = tuple((id(p), p.dtype, p.device) for p in params)
        if key not in self._buckets:
            ids = set(map(id, params))
            old = [k for k in self._buckets if not ids.isdisjoint(part[0] for part in k)]
            for k in old:  # frozen or unfrozen since: the old buckets' memory goes
                del self._buckets[k]
            self._buckets[key] = fill_buckets(params)
        return self._buckets[key]

    def scratch(self, name: str, length: int, like: Bucket) -> Tensor:
        """Memory that is used within one bucket's turn only."""
        key = (name, like.dtype, like.device)
        have = self._scratch.get(key)
        if have is None or have.numel() < length:
            have = self._scratch[key] = torch.zeros(length, dtype=like.dtype, device=like.device)
        return have[:length]

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream on which gradients of `device` are summed; None on the CPU."""
        if device.type != "cuda":
            return None
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def close(self, wait: bool = True) -> None:
        """Removes what hangs on the parameters and ends the communication thread."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if self.lane is not None:
            self.lane.close(wait)
            self.lane = None

    def _ready(self, p: Tensor) -> None:
        if self.active is not None:
            self.active.ready(p)


class Leaves:
    """The gradients of the leaves of a share, added into whole subtrees as they come: after the backward of each one
    that there is call `leaf_done`, and `pass_over` before the first. `named` are the parameters, `stack` the subtrees'
    sums in the order of `params`.
    """

    def __init__(
        self,
        named: Named,
        share: range,
        exact: bool,
        known: Mapping[int, str],
        present: Sequence[int] | None = None,
    ) -> None:
        """`known`: names of all parameters that could get a gradient, by id. `present`: the leaves of `share` that
        there are, in order (all); the others add nothing to the sums."""
        self.params = [p for _, p in named]
        self.index = {id(p): k for k, p in enumerate(self.params)}
        self.names = [name for name, _ in named]
        self.share, self.exact, self.known = share, exact, known
        self.position = share.start
        self.absent = frozenset() if present is None else frozenset(share).difference(present)
        self.stack: list[tuple[Node, list[Tensor | None]]] = []
        self.fired: set[int] = set()
        self.computing = False  # a loss is being computed: no gradient may come now

    def ready(self, p: Tensor) -> int:
        """A parameter's gradient of this micro-batch is whole. Called by autograd. Returns its place in `params`."""
        k = self.index.get(id(p))
        if k is None:
            name = self.known.get(id(p), "a parameter")
            raise LossError(
                f"the loss gave a gradient to {name}, whose model was not given to step.backward",
                do="give every model that the loss trains: step.backward(loss_fn, first, second); "
                "use .detach() or requires_grad_(False) for one that it only passes through",
            )
        if self.computing:
            raise LossError(
                "the loss function calls backward() itself",
                do="leave backward to step.backward; for gradients inside a loss use torch.autograd.grad",
            )
        if k in self.fired:
            raise LossError(
                f"{self.names[k]} got its gradient in two parts in one backward (reentrant activation checkpointing)",
                do="use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
        self.fired.add(k)
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise LossError(
                f"{self.names[k]} has a sparse gradient, which cannot be summed in the fixed tree",
                do="use nn.Embedding(..., sparse=False)",
            )
        return k

    def leaf_done(self) -> None:
        """After the backward of each micro-batch of the share that there is."""
        self.fired.clear()
        self._next()
        self.pass_over()

    def pass_over(self) -> None:
        """What is missing before the next leaf: it completes subtrees like any other, and adds nothing to them."""
        while self.position in self.absent:
            self._next()

    def _next(self) -> None:
        i = self.position
        self.position += 1
        if not self.exact:
            return  # autograd adds them all up in .grad
        if i % 2 == 0 and i + 1 < self.share.stop:
            return  # a left child: autograd adds its sibling to it, in place
        paired = i % 2 == 1 and i > self.share.start
        self.push(Node(1, i >> 1) if paired else Node(0, i), self.take())

    def take(self) -> list[Tensor | None]:
        """What `.grad` holds, which is empty then."""
        grads = [None if p.grad is None else p.grad.resolve_conj().resolve_neg() for p in self.params]
        for p in self.params:
            p.grad = None
        return grads

    def push(self, node: Node, grads: list[Tensor | None]) -> None:
        """The sum of a subtree, next to those that are there."""
        while self.stack and node.index % 2 == 1 and self.stack[-1][0] == Node(node.level, node.index - 1):
            _, left = self.stack.pop()
            grads = _added(left, grads)
            node = Node(node.level + 1, node.index >> 1)
        self.stack.append((node, grads))


class Reduction(Leaves):
    """The gradients of one `step.backward`: from the first micro-batch's backward to the mean in every `.grad`.

    Calls, in this order: for each micro-batch of the share that there is, `leaf_done` after its backward; `open` once,
    before the last backward (or at once where there is none); then `finish`, or `fail` from wherever an error came up.
    Nothing but these changes `.grad`, and `.grad` from before is put back by a failure.
    """

    def __init__(
        self, owner: Reducer, named: Named, leaves: int, shares: Sequence[range], present: Sequence[int] | None
    ) -> None:
        super().__init__(named, shares[owner.rank], owner.exact, owner.names, present)
        self.owner = owner
        self.kept = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        self.pass_over()
        self.leaves = leaves
        self.nodes = [subtrees(s) for s in shares]
        self.buckets = list(owner.buckets(self.params)) if owner.world_size > 1 else []
        self.left = [len(b.params) for b in self.buckets]
        self.bucket_of = [k for k, b in enumerate(self.buckets) for _ in b.params]
        self.launched = 0
        self.replicated = False  # copies of the parameters get the gradients
        self.last = False  # the last micro-batch of the share is under way: full buckets leave
        self.opened = False
        self.failed = False
        self.divisor: float | None = None
        self.error: BaseException | None = None  # from the communication thread
        self.met = threading.Event()
        self.launching = threading.Lock()

    # ---- in order of a step

    def ready(self, p: Tensor) -> int:
        if self.replicated:
            name = self.owner.names.get(id(p), "a parameter")
            raise LossError(
                f"the loss gave a gradient to {name} of the model itself, while each thread replica has a copy of it",
                do="use the model that the loss function is given, not one from outside (a global name, a closure, "
                "self.model)",
            )
        k = super().ready(p)
        if self.last and self.buckets:
            with self.launching:  # autograd has a thread for each GPU
                self.left[self.bucket_of[k]] -= 1
                # The last bucket waits for the end of the backward, so that a failure until then can travel with it.
                while self.launched < len(self.buckets) - 1 and self.left[self.launched] == 0:
                    self._launch()
        return k

    def open(self, meet: Callable[[], float | None]) -> None:
        """Before the last backward of the share: `meet` exchanges losses and weights with the other processes and
        returns what the gradients are to be divided by (None: nothing). Where it raises, no bucket travels."""
        self.opened = self.last = True
        if self.owner.lane is None:
            self.divisor = meet()
            return

        def work() -> None:
            try:
                self.divisor = meet()
            except BaseException as error:
                self.error = error
            self.met.set()

        self.owner.lane.submit(work)

    def leaf_done(self) -> None:
        if self.last:
            self.position += 1
            self.fired.clear()  # the last leaf stays in .grad
        else:
            super().leaf_done()

    def finish(self, tell: Callable[[], EvenstepError]) -> None:
        """Waits for the other processes and puts the mean gradient into every `.grad` (None where unused).

        Where another process failed in its last backward, `tell` finds out which and why."""
        grads: list[Tensor | None] | None
        if self.owner.lane is None:
            grads = self._alone()
        else:
            while self.launched < len(self.buckets):
                self._launch()
            self._wait()
            if self.error is not None:
                self.put_back()
                raise self.error
            grads = self._collect()
            if grads is None:
                self.put_back()
                raise tell()
        self.owner.active = None
        for p, kept, grad in zip(self.params, self.kept, grads, strict=True):
            p.grad = grad if kept is None else kept if grad is None else kept.add_(grad)

    def fail(self, meet: Callable[[], object], tell: Callable[[], object]) -> None:
        """An error came up in this process: go through the motions, so that no other process waits for it for ever.

        `meet` tells the others where `open` has not been called yet; else the failed flag of the buckets does, and
        `tell` says why."""
        self.failed = True
        try:
            if not self.opened:
                meet()
            elif self.owner.lane is not None:
                self.stack.clear()
                while self.launched < len(self.buckets):
                    self._launch()
                self._wait()
                if self.error is None:
                    tell()
        except EvenstepError:
            pass  # the others are gone or know already; this process's own error is what counts
        self.put_back()

    def _alone(self) -> list[Tensor | None]:
        total = self.take()
        for _, left in reversed(self.stack):
            total = _added(left, total)
        self.stack.clear()
        # As in the buckets: the parts of a complex number are divided each by itself.
        there = [torch.view_as_real(g) if g.is_complex() else g for g in total if g is not None]
        if there and self.divisor is not None:
            torch._foreach_div_(there, self.divisor)
        if there and self.owner.exact:
            torch._foreach_add_(there, 0.0)
        return total

    # ---- buckets

    def _launch(self) -> None:
        k = self.launched
        self.launched += 1
        bucket = self.buckets[k]
        inside = slice(bucket.first, bucket.first + len(bucket.params))
        rows = self._rows(inside)
        stream = self.owner.stream(bucket.device)
        if stream is None:
            assert self.owner.lane is not None
            self.owner.lane.submit(lambda: self._guarded(bucket, rows))
        else:
            self._on_stream(stream, bucket, rows)

    def _rows(self, inside: slice) -> list[list[list[Tensor]]]:
        """For each whole subtree of the share, for each parameter of a bucket: what is to be added, rightmost first."""
        params = self.params[inside]
        grads = [p.grad for p in params]
        for p in params:
            p.grad = None
        nodes = self.nodes[self.owner.rank]
        if not self.owner.exact:
            nodes = nodes[-1:]  # one sum
        if not nodes:
            return []
        current = self._current(nodes)
        rows: list[list[list[Tensor]]] = [[[] for _ in params] for _ in nodes]
        if self.failed:
            return rows
        for k, grad in enumerate(grads):
            if grad is not None:
                rows[current][k].append(grad)
        whole = {node: r for r, node in enumerate(nodes) if r != current}
        for node, entry in reversed(self.stack):
            row = rows[whole.get(node, current)]
            for k, grad in enumerate(entry[inside]):
                if grad is not None:
                    row[k].append(grad)
            entry[inside] = [None] * len(params)
        return rows

    def _current(self, nodes: Sequence[Node]) -> int:
        """Which of the share's subtrees the last leaf belongs to, whose gradients are in `.grad`."""
        present = [i for i in self.share if i not in self.absent]
        if not present or not self.exact:
            return len(nodes) - 1
        return next(r for r, node in enumerate(nodes) if present[-1] >> node.level == node.index)

    def _guarded(self, bucket: Bucket, rows: list[list[list[Tensor]]]) -> None:
        if self.error is None:
            try:
                self._reduce(bucket, rows)
            except RuntimeError as error:
                self.error = lost_contact(self.owner.rank, error, "while gradients were summed")
            except BaseException as error:
                self.error = error

    def _on_stream(self, stream: torch.cuda.Stream, bucket: Bucket, rows: list[list[list[Tensor]]]) -> None:
        self.met.wait()
        stream.wait_stream(torch.cuda.current_stream(bucket.device))
        for row in rows:
            for parts in row:
                for part in parts:
                    part.record_stream(stream)
        with torch.cuda.stream(stream):
            self._guarded(bucket, rows)

    def _reduce(self, bucket: Bucket, rows: list[list[list[Tensor]]]) -> None:
        if self.owner.exact:
            self._reduce_exact(bucket, rows)
        else:
            out = bucket.memory(bucket.length)
            self._fold(bucket, out, rows[0] if rows else [[] for _ in bucket.params])
            dist.all_reduce(out, group=self.owner.group)
            if self.divisor is not None:
                out[: bucket.elements].div_(self.divisor)

    def _reduce_exact(self, bucket: Bucket, rows: list[list[list[Tensor]]]) -> None:
        rank, world = self.owner.rank, self.owner.world_size
        chunk = -(-bucket.length // world)
        out = bucket.memory(world * chunk)
        own = out[rank * chunk : (rank + 1) * chunk]
        direct = exchange.is_direct(bucket.device, self.owner.group)
        blocks = (self._swapped if direct else self._all_to_all)(bucket, rows, out, chunk)
        parts: dict[Node, Tensor] = {}
        for nodes, pieces in zip(self.nodes, blocks, strict=True):
            parts.update(zip(nodes, pieces, strict=True))
        total = combine(parts, self.leaves, Tensor.add_)
        assert total is not None  # a step has at least one micro-batch
        divided = max(0, min(chunk, bucket.elements - rank * chunk))  # flags are not
        if self.divisor is not None:
            torch.div(total[:divided], self.divisor, out=own[:divided])
        elif own.data_ptr() != total.data_ptr():
            own[:divided].copy_(total[:divided])
        own[:divided].add_(0.0)  # -0.0 becomes 0.0: a leaf that is skipped and one that is zero leave different zeros
        if divided < chunk and own.data_ptr() != total.data_ptr():
            own[divided:].copy_(total[divided:])
        if direct:
            exchange.swap([[own]] * world, [[place] for place in out.split(chunk)], rank, self.owner.group)
        else:
            dist.all_gather_single(out, own, group=self.owner.group)

    def _swapped(
        self, bucket: Bucket, rows: list[list[list[Tensor]]], out: Tensor, chunk: int
    ) -> list[Sequence[Tensor]]:
        """This process's part of every process's rows."""
        rank, world = self.owner.rank, self.owner.world_size
        if len(rows) == 1:  # the usual case needs no memory: the gradients come back into the same
            flats: Sequence[Tensor] = (out,)
        else:
            stage = self.owner.scratch("stage", len(rows) * world * chunk, bucket)
            flats = stage.view(len(rows), world * chunk).unbind()
        for flat, row in zip(flats, rows, strict=True):
            self._fold(bucket, flat, row)
        own = [flat.split(chunk) for flat in flats]
        counts = [0 if r == rank else len(nodes) for r, nodes in enumerate(self.nodes)]
        received = iter(self.owner.scratch("received", sum(counts) * chunk, bucket).split(chunk))
        blocks: list[Sequence[Tensor]] = [[next(received) for _ in range(count)] for count in counts]
        exchange.swap([[pieces[r] for pieces in own] for r in range(world)], blocks, rank, self.owner.group)
        blocks[rank] = [pieces[rank] for pieces in own]
        return blocks

    def _all_to_all(
        self, bucket: Bucket, rows: list[list[list[Tensor]]], out: Tensor, chunk: int
    ) -> list[Sequence[Tensor]]:
        """The same by a collective."""
        rank, world = self.owner.rank, self.owner.world_size
        send, kept = self._to_send(bucket, rows, out, chunk)
        sizes_in = [len(nodes) * chunk for nodes in self.nodes]
        sizes_out = [len(rows) * chunk] * world
        if kept is not None:  # this process's own part does not travel
            sizes_in[rank] = sizes_out[rank] = 0
        received = self.owner.scratch("received", sum(sizes_in), bucket)
        dist.all_to_all_single(received, send, sizes_in, sizes_out, group=self.owner.group)
        blocks: list[Sequence[Tensor]] = []
        for r, (nodes, block) in enumerate(zip(self.nodes, received.split(sizes_in), strict=True)):
            blocks.append(kept if kept is not None and r == rank else block.split(chunk) if nodes else ())
        return blocks

    def _to_send(
        self, bucket: Bucket, rows: list[list[list[Tensor]]], out: Tensor, chunk: int
    ) -> tuple[Tensor, Sequence[Tensor] | None]:
        """What leaves for the other processes, rank by rank, and this process's own part of each row.

        None for the latter: it is in between the others' parts, and is sent to this process by itself."""
        rank, world = self.owner.rank, self.owner.world_size
        if not rows:
            return out[:0], []
        if len(rows) == 1:  # the usual case needs no copy: the gradients come back into the same memory
            self._fold(bucket, out, rows[0])
            if 0 < rank < world - 1:
                return out, None
            own = out[rank * chunk : (rank + 1) * chunk]
            return (out[chunk:] if rank == 0 else out[:-chunk]), [own]
        stage = self.owner.scratch("stage", len(rows) * world * chunk, bucket).view(len(rows), world, chunk)
        for flat, row in zip(stage, rows, strict=True):
            self._fold(bucket, flat.view(-1), row)
        send = self.owner.scratch("send", len(rows) * (world - 1) * chunk, bucket)
        others = [r for r in range(world) if r != rank]
        for block, r in zip(send.view(world - 1, len(rows), chunk), others, strict=True):
            block.copy_(stage[:, r])
        return send, list(stage[:, rank])

    def _fold(self, bucket: Bucket, flat: Tensor, row: list[list[Tensor]]) -> None:
        """Adds up each parameter's parts, from the right as in the tree, into its place; frees them on the way."""
        flags = []
        for view, parts in zip(bucket.views(flat), row, strict=True):
            flags.append(float(bool(parts)))
            if not parts:
                view.zero_()
            elif len(parts) == 1:
                view.copy_(parts[0])
            else:
                torch.add(parts[1], parts[0], out=view)
                for part in parts[2:]:
                    view.add_(part)
            parts.clear()
        flags.append(float(self.failed))
        said = torch.tensor(flags, pin_memory=flat.is_cuda)  # pinned: the host does not wait for the stream
        flat[bucket.elements : bucket.length].copy_(said, non_blocking=True)

    def _wait(self) -> None:
        done = threading.Event()
        assert self.owner.lane is not None
        self.owner.lane.submit(done.set)
        done.wait()
        for device, stream in self.owner.streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        for bucket in self.buckets:  # allocated on the side stream, read on this one
            if bucket.out is not None and bucket.device.type == "cuda":
                bucket.out.record_stream(torch.cuda.current_stream(bucket.device))

    def _collect(self) -> list[Tensor | None] | None:
        """The gradients out of the buckets; None if some process failed."""
        grads: list[Tensor | None] = []
        for bucket in self.buckets:
            assert bucket.out is not None
            *used, failed = bucket.out[bucket.elements : bucket.length].tolist()
            if bucket is self.buckets[-1] and failed:
                return None
            grads.extend(view if use else None for view, use in zip(bucket.views(bucket.out), used, strict=True))
        return grads

    def put_back(self) -> None:
        self.owner.active = None
        self.stack.clear()
        for p, kept in zip(self.params, self.kept, strict=True):
            p.grad = kept


def _added(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """left + right, in left's memory; a missing side passes the other through."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
