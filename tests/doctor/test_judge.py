"""What a survey's findings are. No host is needed for this."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evenstep.doctor.facts import Facts
from evenstep.doctor.judge import Finding, gigabits, judge, size
from evenstep.doctor.links import Measured, rounds
from evenstep.doctor.survey import Survey, Way

GOOD = Facts(
    host="a", processes=2, address="10.0.0.1",
    interfaces={"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}, why="", all_interfaces=("lo", "eth0"),
    same={"evenstep": "1", "torch": "2.13.0+cpu", "python": "3.11.7"},
    torch={"version": "2.13.0+cpu", "seconds": 1.0, "cuda": None, "gpus": [], "nccl": None, "cpu": "AVX512"},
    driver=None, gpus=0, cpu="Intel(R) Xeon(R)", cores=4, memory=1 << 36, memory_free=1 << 35,
    shared_memory_free=1 << 33, folder="/run", file_system="nfs", disk=1 << 40, disk_free=1 << 39, unwritable=None,
    checkpoint=0, shared=True, open_files=65536, locked_memory=-1, user_processes=-1, infiniband=False, problems=(),
)  # fmt: skip


def of(*hosts: Facts, clocks: tuple[float, ...] = (), **more: Any) -> list[Finding]:
    count = len(hosts)
    return judge(Survey(list(hosts), list(clocks or [0.0] * count), [0.001] * count, **more))


def test_good_hosts() -> None:
    assert of(GOOD, replace(GOOD, host="b")) == []
    assert of(replace(GOOD, interfaces={})) == []


@pytest.mark.parametrize(
    ("change", "fails", "said"),
    [
        ({"same": {**GOOD.same, "python": "3.12.1"}}, True, "python differs: 3.11.7 on a; 3.12.1 on b"),
        ({"same": {**GOOD.same, "the module x.py": "1"}}, True, "the module x.py differs: none on a; 1 on b"),
        ({"torch": {**GOOD.torch, "cpu": "AVX2"}}, True, "its instructions (torch) differs"),
        ({"torch": {"error": "ImportError: libc10.so"}}, True, "torch cannot be imported: ImportError: libc10.so"),
        ({"torch": {**GOOD.torch, "version": "2.9.1"}}, True, "has torch 2.9.1; evenstep stands on >=2.13,<2.15"),
        ({"driver": "550.1", "gpus": 2}, True, "sees none of its GPUs (driver 550.1)"),
        ({"unwritable": "No space left on device"}, True, "nothing can be written into /run: No space left"),
        ({"disk_free": 1 << 20, "checkpoint": 1 << 21}, True, "1.0 MiB free in /run, and a checkpoint takes 2.0 MiB"),
        ({"disk_free": 1 << 20}, False, "1.0 MiB free in /run"),
        ({"interfaces": {"GLOO_SOCKET_IFNAME": "ib0"}}, True, "GLOO_SOCKET_IFNAME is ib0, and it has lo, eth0"),
        ({"memory_free": 1 << 29}, False, "512 MiB of memory are free for 2 processes"),
        ({"shared_memory_free": 1 << 26}, False, "64 MiB of shared memory"),
        ({"open_files": 256}, False, "256 open files are allowed"),
        ({"open_files": 20000, "processes": 9000}, True, "20000 open files are allowed"),
        ({"infiniband": True, "locked_memory": 1 << 16}, False, "64 KiB of locked memory are allowed"),
        ({"shared": False}, False, "does not share the run directory (/run, nfs)"),
        ({"problems": ("there is no script x.py",)}, True, "there is no script x.py"),
    ],
)  # fmt: skip
def test_a_bad_host(change: dict[str, Any], fails: bool, said: str) -> None:
    found = of(GOOD, replace(GOOD, host="b", **change))
    match = [one for one in found if said in one.what]
    assert [one.fails for one in match] == [fails], found
    assert match[0].where == "b"


def test_nccl_needs_a_gpu_for_each_process() -> None:
    assert "2 processes over nccl, and torch sees 0 GPUs" in of(GOOD, backend="nccl")[0].what


def test_clocks_and_hosts_that_were_not_reached() -> None:
    assert "its clock is 300 s behind that of a" in of(GOOD, replace(GOOD, host="b"), clocks=(0.0, -300.0))[0].what
    (found,) = of(GOOD, unreached={"c": "timed out"})
    assert (found.fails, found.where, "timed out" in found.what) == (True, "c", True)


def test_slow_and_cut_links() -> None:
    hosts = [replace(GOOD, host=name) for name in "abc"]
    ways = [Way(a, b, Measured(None, 1e-4, 1e9)) for a in range(3) for b in range(3) if a != b]
    assert of(*hosts, ways=ways) == []
    (found,) = of(*hosts, ways=[replace(ways[0], measured=Measured(None, 1e-4, 4e8)), *ways[1:]])
    assert (found.fails, found.where) == (False, "a -> b")
    assert "a slow link: 3.2 Gbit/s, where 8.0 Gbit/s are usual" in found.what
    (found,) = of(*hosts, ways=[*ways[:-1], replace(ways[-1], measured=Measured("timed out"))])
    assert (found.fails, found.where, "cannot connect to 10.0.0.1: timed out" in found.what) == (True, "c -> b", True)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_rounds_have_every_pair_once_and_no_host_twice(count: int) -> None:
    turns = rounds(count)
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for turn in turns:
        hosts = [host for pair in turn for host in pair]
        assert len(hosts) == len(set(hosts))


def test_sizes_for_people() -> None:
    assert [size(5), size(2048), size(3 << 30)] == ["5 B", "2.0 KiB", "3.0 GiB"]
    assert [gigabits(1e9), gigabits(1e6)] == ["8.0 Gbit/s", "8 Mbit/s"]
