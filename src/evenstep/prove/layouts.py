"""The layouts that a script is tried on. The first one is what the others are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from evenstep.environment import Settings


@dataclass(frozen=True)
class Layout:
    """How to start a script: so many processes, with these settings."""

    name: str  # on the command line
    title: str  # in the table
    processes: int = 1
    settings: Settings = field(default_factory=Settings)
    again: bool = False  # with another order of hashes, as a second start by hand would have
    resumed: bool = False  # stopped in the middle, and started again from the checkpoint


ONE = Layout("1", "1 process")

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        ONE,
        Layout("2", "2 processes", 2),
        Layout("3", "3 processes", 3),
        Layout("threads", "2 thread replicas", settings=Settings(thread_replicas=2)),
        Layout("shard", "2 shards", 2, Settings(shard=True)),
        Layout("stages", "2 stages", 2, Settings(stages=2)),
        Layout("split", "split in 2", settings=Settings(split=2)),
        Layout("loaders", "2 loader processes", settings=Settings(loaders=2)),
        Layout("again", "1 process, again", again=True),
        Layout("resumed", "1 process, resumed", resumed=True),
    )
}


def settings_of(layout: Layout, *, stop_after: int, trace_step: int | None = None) -> Settings:
    """What its processes are told: every step has a fingerprint, the script ends after `stop_after` steps."""
    return replace(layout.settings, fingerprints=True, stop_after=stop_after, trace_step=trace_step)
