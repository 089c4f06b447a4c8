"""Processes that srun started on several hosts find rank 0 by their job's name."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from evenstep.environment import World
from evenstep.errors import MachineError, UsageError
from evenstep.interfaces import interfaces
from evenstep.train import rendezvous
from tests.ranks import run_ranks


def world(rank: int, job: str | None = "job 7") -> World:
    return World(rank, 2, 0, 1, "slurm", "localhost", None, job)


def test_ports_that_others_have_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])

    def work() -> Any:
        monkeypatch.setattr(rendezvous, "_PORTS", ports)
        monkeypatch.setattr(rendezvous, "_TRIES", len(ports))
        # There is no second host here to say by which address it reached the first.
        monkeypatch.setattr(rendezvous, "_on_interface", lambda store, way: store)
        rank = int(os.environ["RANK"])
        kept = []
        if rank == 0:
            other = TCPStore("127.0.0.1", ports[0], 2, is_master=True, wait_for_workers=False)
            other.set("evenstep/job", "job 6")
            mute = socket.socket()
            mute.bind(("127.0.0.1", ports[1]))
            kept = [other, mute]
        store = rendezvous.meet(world(rank))
        assert isinstance(store, TCPStore)
        store.set(f"port/{rank}", str(store.port))
        return [int(store.get(f"port/{one}")) for one in (0, 1)], len(kept)

    both = run_ranks(work, 2)
    assert [said for said, _ in both] == [[ports[2]] * 2] * 2


def test_rank_0_listens_where_the_others_look(monkeypatch: pytest.MonkeyPatch) -> None:
    own = next((address for address in interfaces().values() if not address.startswith("127.")), None)
    if own is None:
        pytest.skip("this host has the loopback interface alone")

    def work() -> list[bool]:
        monkeypatch.setattr(rendezvous, "_on_interface", lambda store, way: store)
        store = rendezvous.meet(World(0, 2, 0, 1, "slurm", own, None, f"job of {os.getpid()}"))
        assert isinstance(store, TCPStore)
        answers = []
        for address in (own, "127.0.0.1"):
            with socket.socket() as asking:
                answers.append(asking.connect_ex((address, store.port)) == 0)
        return answers

    assert run_ranks(work, 1) == [[True, False]]


def test_no_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rendezvous, "_SECONDS", 0.2)
    with pytest.raises(MachineError, match=r"rank 1 found no rank 0 .* localhost: "):
        rendezvous.meet(world(1))
    with pytest.raises(MachineError, match="found no rank 0 on this host"):
        rendezvous.meet(World(1, 2, 1, 2, "mpi", None, None, "nobody"))
    with pytest.raises(UsageError, match="nor a job to meet in"):
        rendezvous.meet(world(1, job=None))
