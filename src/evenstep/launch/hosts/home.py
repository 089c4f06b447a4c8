"""Keeps one run directory whole, that of the launcher which started the hosts, while some hosts have only a copy."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.launch.hosts.copies import Carrier, Copy, Reach, results, state
from evenstep.launch.output import Say
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths

_AT_ONCE = 8  # hosts


class Home:
    """The launcher's run directory. `prepared`, `begins`, `has` and `lost` are called in the hub's thread."""

    def __init__(self, paths: RunPaths, name: str, reach: Reach, hosts: Sequence[str], say: Say) -> None:
        self._paths, self._name, self._hosts, self._say = paths, name, hosts, say
        self._checkpoints = Checkpoints(paths)
        self._carrier = Carrier(paths, reach)
        self._outside: set[int] = set()  # nodes that do not share it
        self._written: dict[int, Mapping[str, int]] = {}
        self._preparing: threading.Thread | None = None
        self._problem: EvenstepError | None = None
        self._steps: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._following: threading.Thread | None = None

    def prepared(self, copies: Mapping[int, Copy]) -> bool:
        """Whether every host has what it needs to go on; begins to bring it. UsageError, MachineError: it cannot be."""
        if self._preparing is None:
            self._outside = {node for node, copy in copies.items() if not copy.shared}
            if not self._outside:
                return True
            outside = {node: copies[node] for node in self._outside}
            self._preparing = threading.Thread(target=self._prepare, args=(outside,), daemon=True)
            self._preparing.start()
        if self._preparing.is_alive():
            return False
        if self._problem is not None:
            raise self._problem
        return True

    def _prepare(self, outside: Mapping[int, Copy]) -> None:
        try:
            self._even_out(outside)
        except EvenstepError as error:
            self._problem = error

    def _even_out(self, outside: Mapping[int, Copy]) -> None:
        """The newest checkpoint comes here, if it is not, and goes to all."""
        for node, copy in outside.items():
            if copy.step is not None and copy.run_id != self._name:
                raise UsageError(
                    f"{self._hosts[node]} does not share the run directory {self._paths.root}, and has one of another "
                    f"run there, with a checkpoint of step {copy.step}",
                    do="give another --run, or move that one away",
                )
        own, _ = self._checkpoints.newest_whole()
        step, newest = max((copy.step or 0, node) for node, copy in outside.items())
        if step > (own or 0):  # the launcher was killed before it had it
            self._say(f"the checkpoint of step {step} comes from {self._hosts[newest]}")
            self._carrier.fetch(newest, state(self._paths), above=self._newest())
            own = step
        behind = [node for node, copy in outside.items() if copy.step != own or self._paths.finished.exists()]
        if own is None or not behind:
            return
        names = ", ".join(self._hosts[node] for node in behind)
        self._say(f"the checkpoint of step {own} goes to {names}: the run directory is not shared")
        for some in (behind[:1], behind[1:]):  # the first one's may be that of the others too
            self._all(some, lambda node: self._carrier.give(node, own))

    def _all(self, nodes: Sequence[int], act: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for node, done in [(node, pool.submit(act, node)) for node in nodes]:
                try:
                    done.result()
                except MachineError as error:
                    raise MachineError(f"{self._hosts[node]}: {error.message}", do=error.do) from error

    # ---- while it runs

    def begins(self, node: int, written: Mapping[str, int]) -> None:
        """A node that does not share it says what it adds to."""
        self._written[node] = written

    def has(self, steps: list[int]) -> None:
        """Node 0, which does not share it, has these checkpoints."""
        if self._following is None:
            self._following = threading.Thread(target=self._follow, daemon=True)
            self._following.start()
        self._steps.put(steps)

    def lost(self, node: int) -> None:
        """Nothing comes from this node any more."""
        self._outside.discard(node)
        self._carrier.stop([node])

    def _follow(self) -> None:
        while (steps := self._steps.get()) is not None:
            if not self._steps.empty():
                continue  # there is news
            try:
                self._carrier.fetch(0, state(self._paths), above=self._newest())
                self._checkpoints.prune(max(1, len(steps)))
            except MachineError as error:
                if 0 in self._outside:  # else it is lost, and that is told
                    self._say(f"{self._hosts[0]}: {error.message}")

    def _newest(self) -> int:
        return max(self._checkpoints.steps(), default=-1)

    def finish(self) -> MachineError | None:
        """Bring home what the run has left on other hosts; why not all of it came."""
        if self._following is not None:
            self._steps.put(None)
            self._following.join()
        nodes = sorted(self._outside & self._written.keys())
        if not nodes:
            return None
        rest = {**state(self._paths), **results(self._paths)}
        try:
            self._all(
                nodes,
                lambda node: self._carrier.fetch(node, {**self._written[node], **({} if node else rest)}),
            )
        except MachineError as error:
            return MachineError(error.message, do=f"fetch what is missing from {self._paths.root} there")
        return None

    def stop(self) -> None:
        """End what is under way."""
        self._carrier.stop(range(len(self._hosts)))
