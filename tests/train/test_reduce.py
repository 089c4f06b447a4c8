"""The reducer alone: one sum on every number of processes, whatever parameters a micro-batch uses."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from evenstep.errors import EvenstepError, LossError, PeerFailed
from evenstep.plan.tree import Node, combine, share
from evenstep.train import buckets, exchange
from evenstep.train.reduce import Reducer, Reduction
from tests.ranks import run_ranks

SAMPLES = 4  # in a micro-batch
MICRO_BATCHES = [8, 8, 3, 5, 1, 8, 7, 2, 8, 6, 4, 8]  # of each step: more processes than some steps have


class Branches(nn.Module):
    """Parts that some micro-batches, or all, leave unused; one parameter with other strides; one complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.branches = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.never = nn.Linear(4, 4)
        self.turned = nn.Parameter(torch.randn(8, 64).t())
        self.wave = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.first(x)
        if branch < 3:
            x = F.relu(self.branches[branch](F.relu(x)))
        return x @ self.turned * self.wave.abs()


def tell() -> EvenstepError:
    return PeerFailed("somebody failed")


def fingerprint(tensors: list[torch.Tensor | None]) -> str:
    raw = b"".join(b"none" if t is None else t.detach().resolve_conj().contiguous().numpy().tobytes() for t in tensors)
    return hashlib.sha256(raw).hexdigest()[:12]


def group() -> tuple[int, int, dist.ProcessGroup | None]:
    import os

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
        return dist.get_rank(), world, dist.group.WORLD
    return 0, 1, None


def reduced(
    reducer: Reducer,
    model: nn.Module,
    micro_batches: int,
    loss: Callable[[int], torch.Tensor],
    weight: float | None,
    absent: frozenset[int] = frozenset(),
) -> None:
    """One step.backward: `loss(i)` for every micro-batch of this process's share but those that are absent."""
    named = list(model.named_parameters())
    reducer.watch(named)
    mine = [i for i in share(micro_batches, reducer.world_size, reducer.rank) if i not in absent]
    reduction: Reduction = reducer.start(named, micro_batches, mine)
    for i in mine:
        value = loss(i)
        if i == mine[-1]:
            reduction.open(lambda: weight)
        if value.requires_grad:
            value.backward()
        reduction.leaf_done()
    if not mine:
        reduction.open(lambda: weight)
    reduction.finish(tell)


def train(exact: bool = True, direct: bool = True) -> list[str]:
    """The fingerprint after every step of a training that does all that is awkward.

    Without `direct` through the collectives that are for other backends."""
    if not direct:
        exchange.is_direct = lambda device, group: False
    buckets.FIRST_BUCKET, buckets.BUCKET = 4000, 8000
    rank, world, where = group()
    torch.manual_seed(0)
    model = Branches()
    reducer = Reducer(rank, world, where, exact)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 32, generator=generator)
    y = torch.randint(0, 8, (512,), generator=generator)
    branch = torch.randint(0, 4, (200,), generator=generator).tolist()
    found = []
    for step, micro_batches in enumerate(MICRO_BATCHES):
        if step == 6:
            model.branches[1].requires_grad_(False)
        if step == 8:
            model.branches[1].requires_grad_(True)

        def loss(i: int, step: int = step, micro_batches: int = micro_batches) -> torch.Tensor:
            n = SAMPLES if i < micro_batches - 1 else SAMPLES - 1  # a ragged last micro-batch
            at = (step * 32 + i * SAMPLES) % 500
            which = branch[step * 8 + i] if step % 3 else step % 2  # in some steps whole branches stay unused
            value = F.cross_entropy(model(x[at : at + n], which), y[at : at + n], reduction="sum")
            if i % 3 == 0:  # two forwards in one micro-batch
                again = model(x[at : at + n] * 0.5, (which + 1) % 3)
                value = value + F.cross_entropy(again, y[at : at + n], reduction="sum")
            return value

        reduced(reducer, model, micro_batches, loss, 4.0 * micro_batches - 1)
        if step == 9:  # a second backward in the step adds to the first
            reduced(reducer, model, micro_batches, lambda i: model(x[i * 4 : i * 4 + 4], 0).square().sum(), None)
        found.append(fingerprint([p.grad for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
        found.append(fingerprint(list(model.parameters())))
    reducer.close()
    if world > 1:
        dist.destroy_process_group()
    return found


def with_absent_leaves() -> list[tuple[str, str]]:
    """What the reducer finds where micro-batches are missing, and what the tree over the others gives."""
    buckets.FIRST_BUCKET, buckets.BUCKET = 100, 200
    rank, world, where = group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    parameters = list(model.parameters())
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)) * 100
    generator, reducer, found = random.Random(7), Reducer(rank, world, where, True), []

    def loss(i: int) -> torch.Tensor:
        result: torch.Tensor = model(x[i]).square().sum()
        return result

    for leaves in [*range(3, 17), 16, 16, 16]:
        absent = frozenset(generator.sample(range(leaves), generator.randrange(leaves)))
        reduced(reducer, model, leaves, loss, 3.0, absent)
        grads = [p.grad for p in parameters]
        parts = {Node(0, i): torch.autograd.grad(loss(i), parameters) for i in range(leaves) if i not in absent}
        total = combine(parts, leaves, lambda a, b: tuple(map(torch.add, a, b)))
        assert total is not None
        found.append((fingerprint(grads), fingerprint([t / 3.0 + 0.0 for t in total])))
        for p in parameters:
            p.grad = None
    reducer.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_missing_leaf_adds_nothing_and_the_tree_stays_the_same(world_size: int) -> None:
    for found in run_ranks(with_absent_leaves, world_size):
        for mine, expected in found:
            assert mine == expected


def test_one_sum_on_every_number_of_processes() -> None:
    alone = train()
    for world in (2, 3, 5, 8):
        for rank, found in enumerate(run_ranks(train, world)):
            assert found == alone, f"rank {rank} of {world}"
    for found in run_ranks(train, 5, True, False):
        assert found == alone


def test_without_exactness_equal_to_rounding() -> None:
    def gradients() -> list[torch.Tensor]:
        rank, world, where = group()
        torch.manual_seed(0)
        model = Branches()
        reducer = Reducer(rank, world, where, exact=False)
        x = torch.randn(28, 32, generator=torch.Generator().manual_seed(2))
        reduced(reducer, model, 7, lambda i: model(x[4 * i : 4 * i + 4], i % 2).square().sum(), 28.0)
        reducer.close()
        if world > 1:
            dist.destroy_process_group()
        assert model.never.weight.grad is None
        return [p.grad for p in model.parameters() if p.grad is not None]

    alone = gradients()
    for world in (2, 3):
        for found in run_ranks(gradients, world):
            torch.testing.assert_close(found, alone)


def test_gradients_are_the_mean_of_one_big_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    x = torch.randn(23, 8, dtype=torch.float64)
    reducer = Reducer(0, 1, None, exact=True)
    reduced(reducer, model, 6, lambda i: model(x[4 * i : 4 * i + 4]).square().sum(), 23.0)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    (model(x).square().sum() / 23).backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-12, atol=1e-14)
    reducer.close()


def test_gradients_that_somebody_keeps_are_not_overwritten() -> None:
    def kept() -> bool:
        rank, world, where = group()
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        reducer = Reducer(rank, world, where, exact=True)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        addresses = set()
        for step in range(12):
            x = torch.full((4, 8), float(step + 1))
            reduced(reducer, model, 2, lambda i, x=x: model(x).sum() * (i + 1), 8.0)  # type: ignore[misc]
            assert model.weight.grad is not None
            addresses.add(model.weight.grad.data_ptr())
            if step < 2:
                seen.append((model.weight.grad, model.weight.grad.clone()))
            model.zero_grad()
        reducer.close()
        dist.destroy_process_group()
        # gloo may hold the memory of a step for a moment after it has ended, so not every step can use the last one's
        assert len(addresses) < 8, "memory that nobody holds any more is used again"
        return all(torch.equal(a, b) for a, b in seen)

    assert run_ranks(kept, 2) == [True, True]


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_failure_puts_everything_back_and_the_step_can_be_done_again(when: str) -> None:
    def work() -> tuple[str, str, str]:
        rank, world, where = group()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        reducer = Reducer(rank, world, where, exact=True)
        named = list(model.named_parameters())
        reducer.watch(named)
        weight = next(model.parameters())
        old = weight.grad = torch.ones_like(weight)
        failed = torch.zeros(1)

        def meet() -> float:
            dist.all_reduce(failed)
            if failed.item() and rank != 1:
                raise PeerFailed("rank 1 failed")
            return 4.0

        reduction = reducer.start(named, 2)
        outcome = ""
        try:
            if rank == 1 and when == "before":
                failed += 1
                raise ValueError("no")
            reduction.open(meet)
            if rank == 1:
                raise ValueError("no")
            model(torch.ones(2, 4)).sum().backward()
            reduction.leaf_done()
            reduction.finish(tell)
        except ValueError as error:
            reduction.fail(meet, lambda: None)
            outcome = type(error).__name__
        except PeerFailed as error:
            outcome = type(error).__name__
        assert weight.grad is old
        assert bool((old == 1).all())
        assert model[1].weight.grad is None
        again = fingerprint([p.grad for p in model.parameters()])
        reduced(reducer, model, 2, lambda i: model(torch.full((2, 4), i + 1.0)).sum(), 4.0)
        redone = fingerprint([p.grad for p in model.parameters()])
        reducer.close()
        dist.destroy_process_group()
        return outcome, again, redone

    first, second = run_ranks(work, 2)
    assert first[0] == "PeerFailed"
    assert second[0] == "ValueError"
    assert first[1:] == second[1:]


def test_refusals_name_the_parameter() -> None:
    reducer = Reducer(0, 1, None, exact=True)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    reducer.watch([(f"other.{name}", p) for name, p in other.named_parameters()])
    with pytest.raises(LossError, match=r"other\.(weight|bias)"):
        reduced(reducer, model, 1, lambda i: (model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum(), 1.0)
    reducer.active = None
    table = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(LossError, match=r"weight has a sparse gradient"):
        reduced(reducer, table, 1, lambda i: table(torch.tensor([1])).sum(), 1.0)
    reducer.active = None
    block = nn.Linear(2, 2)

    def reentrant(i: int) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = torch.ones(1, 2, requires_grad=True)
        a = checkpoint(block, x, use_reentrant=True)
        b = checkpoint(block, x, use_reentrant=True)
        return (a + b).sum()  # type: ignore[no-any-return]

    with pytest.raises(LossError, match="use_reentrant=False"):
        reduced(reducer, block, 1, reentrant, 1.0)
    reducer.close()
