"""This host's part, where another launcher has started this one and speaks to it over its pipes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from evenstep.errors import EvenstepError
from evenstep.launch.hosts.beginning import LAST_WORDS, MakePaths, join, told
from evenstep.launch.hosts.copies import look, written
from evenstep.launch.hosts.line import Line
from evenstep.launch.hosts.messages import About
from evenstep.launch.hosts.sameness import same_on_all
from evenstep.launch.hosts.spoke import Spoke
from evenstep.launch.local import Work, run_part
from evenstep.launch.outcome import Outcome
from evenstep.launch.port import reserve_port
from evenstep.launch.prepare import locked
from evenstep.launch.undo import take_back
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from evenstep.record.publish import write_whole


@dataclass(frozen=True)
class Post:
    """Where this host stands, as the launcher that started this one knows it."""

    node: int
    nodes: int
    address: str  # its own, as the others reach it
    shared: bool  # that launcher sees this host's run directory
    run_id: str


def run_for_hub(
    line: Line,
    outputs: tuple[int, int],
    work: Work,
    post: Post,
    make_paths: MakePaths,
    tell: Callable[[Outcome, RunPaths], None],
) -> Outcome:
    """Run this host's part for the launcher at the other end of `line`, which started this one.

    What comes out of `outputs`, the other ends of this process's own output and error streams, is sent there. `tell`
    says what a failed process said, before that.
    """
    with ExitStack() as stack:
        port, keeper = reserve_port()
        stack.enter_context(keeper)
        host, same = socket.gethostname(), same_on_all(work.script)
        about = About(host, work.processes, same, post.node, post.nodes, post.address, port)
        found: tuple[RunPaths, tuple[Path, ...]] | None = None
        held: tuple[int, ...] = ()
        unable: EvenstepError | None = None
        try:
            found = make_paths(None)
            if post.node == 0:  # the other hosts may see the same directory
                held = (stack.enter_context(locked(found[0])),)
            about = replace(about, copy=asdict(look(found[0], shared=post.shared)))
        except EvenstepError as error:
            unable = error
        link = Spoke(about, "the host that started it", work.say, lambda: line)
        stack.callback(link.close)
        for to, descriptor in enumerate(outputs, 1):
            link.carry(descriptor, to)
        if unable is not None:
            link.give_up(unable)
        try:
            start = join(link)
        except EvenstepError:
            if found is not None and not post.shared:
                take_back(*found)
            raise
        assert found is not None  # else the line above has raised
        paths, made = found
        link.interface = (start.part.address if post.node == 0 else post.address) if post.nodes > 1 else ""
        watch = None if post.shared or post.node else _Checkpoints(paths, link)
        with told(link, start):
            if not post.shared:
                write_whole(paths.run_id, post.run_id.encode())
                link.tell_hub(written=written(paths, start.part.ranks, post.node), node=post.node)
            outcome = run_part(work, paths, start.part, link, held=held, made=made, tick=watch)
        if watch is not None:
            watch()
        tell(outcome, paths)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.close(descriptor)  # what is still in the pipes has an end
        link.carried.wait(LAST_WORDS)
    return outcome


class _Checkpoints:
    """Tells the hub, which does not see them, of the checkpoints that rank 0 writes."""

    def __init__(self, paths: RunPaths, link: Spoke) -> None:
        self._checkpoints, self._link = Checkpoints(paths), link
        self._told = self._checkpoints.steps()

    def __call__(self) -> None:
        steps = self._checkpoints.steps()
        if steps != self._told:
            self._told = steps
            self._link.tell_hub(checkpoints=steps)
