"""Which rank holds which part of the model, and computes which micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.errors import UsageError
from evenstep.plan.tree import share


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: in which replica of the model, and which stage or shard of it it holds."""

    replica: int
    stage: int
    shard: int


@dataclass(frozen=True, slots=True)
class Grid:
    """`processes` = replicas x stages x shards. Ranks count shards fastest, then stages, then replicas, so that the
    processes of one replica are neighbours."""

    processes: int
    stages: int = 1
    shards: int = 1

    @property
    def replicas(self) -> int:
        """How many copies of the model there are."""
        return self.processes // (self.stages * self.shards)

    @property
    def some_wait(self) -> bool:
        """Whether in a pass of the model some processes wait for each other without all being there: a stage for the
        next one, the shards of one replica. So all must have come to it before."""
        return self.stages > 1 or (self.shards > 1 and self.replicas > 1)

    def place(self, rank: int) -> Place:
        """Where `rank` stands."""
        rest, shard = divmod(rank, self.shards)
        replica, stage = divmod(rest, self.stages)
        return Place(replica, stage, shard)

    def rank(self, place: Place) -> int:
        """The rank that stands at `place`."""
        return (place.replica * self.stages + place.stage) * self.shards + place.shard

    def ranks(self, *, replica: int | None = None, stage: int | None = None, shard: int | None = None) -> list[int]:
        """The ranks with these places, in order; None: any."""

        def fits(place: Place) -> bool:
            return replica in (None, place.replica) and stage in (None, place.stage) and shard in (None, place.shard)

        return [rank for rank in range(self.processes) if fits(self.place(rank))]

    def share(self, micro_batches: int, replica: int) -> range:
        """The neighbouring micro-batches of a step that a replica computes."""
        return share(micro_batches, self.replicas, replica)

    def leaves(self, micro_batches: int, rank: int) -> range:
        """The micro-batches of a step that `rank` computes, in order.

        All stages of a replica compute its whole share; its shards take turns.
        """
        place = self.place(rank)
        whole = self.share(micro_batches, place.replica)
        return range(min(whole.start + place.shard, whole.stop), whole.stop, self.shards)

    def rounds(self, micro_batches: int, rank: int) -> int:
        """How many forward and backward passes `rank` does in a step, or runs along in: as many as all shards of its
        replica."""
        return -(-len(self.share(micro_batches, self.place(rank).replica)) // self.shards)


def grid(processes: int, *, stages: int = 1, shard: bool = False, replicas: int | None = None) -> Grid:
    """The grid for a launcher's options. UsageError where they do not fit together."""
    if stages > 1 and shard:
        raise UsageError("--stages and --shard together are not offered", do="choose one of them")
    if replicas is not None and not shard:
        raise UsageError(
            f"--replicas {replicas} goes with --shard: it says how many sharded copies of the model there are",
            do="leave it out (with --stages the processes that are left make replicas), or add --shard",
        )
    if processes % stages:
        raise UsageError(
            f"{processes} processes do not make pipelines of {stages} stages",
            do=f"start a multiple of {stages} processes (--processes)",
        )
    copies = replicas or 1
    if processes % copies:
        raise UsageError(
            f"{processes} processes do not make {copies} replicas of equal size",
            do=f"start a multiple of {copies} processes (--processes), or give other --replicas",
        )
    return Grid(processes, stages, processes // copies if shard else 1)
