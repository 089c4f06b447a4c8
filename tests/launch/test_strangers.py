"""Who is not invited: every port of a run is tried from a third host, from its start to its end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from evenstep.record.events import read_events
from tests.hosts import Hosts, hosts, needs_hosts
from tests.launch.launching import command, evenstep, eventually, training, write_script

TOKEN = "correct horse battery staple"

SCRIPT = training(
    first='assert "EVENSTEP_TOKEN" not in os.environ',
    start="",
    epochs="4",
    stepped="""
    while step.number == 9 and not Path("go").exists():
        time.sleep(0.01)
    """,
)

# Reads "address port" from standard input, a line each, and tries each at once. Says what was tried.
STRANGER = """
    import os, socket, sys, threading
    from evenstep.launch.hosts.proof import StrangerError, call

    held = []

    def connect(address, port):
        made = socket.create_connection((address, port), timeout=2)
        made.settimeout(0.5)
        return made

    def scan(address, port):
        connect(address, port).close()

    def say_nothing(address, port):
        held.append(connect(address, port))

    def say_a_little(address, port):
        held.append(connect(address, port))
        held[-1].sendall(os.urandom(9))

    def say_a_lot(address, port):
        made = connect(address, port)
        for _ in range(160):
            made.sendall(os.urandom(1 << 16))

    def guess(address, port):
        call(address, port, "a guess", 2.0)

    def crowd(address, port):
        held.extend(connect(address, port) for _ in range(100))

    def all_ways(address, port):
        for way in (say_nothing, say_a_little, scan, guess, say_a_lot, crowd):
            try:
                way(address, port)
                said = "done"
            except (OSError, StrangerError) as error:
                said = f"{type(error).__name__}: {error}"
            print(address, port, way.__name__, said, flush=True)

    threads = []
    for line in sys.stdin:
        address, port = line.split()
        threads.append(threading.Thread(target=all_ways, args=(address, int(port))))
        threads[-1].start()
    for thread in threads:
        thread.join()
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    needs_hosts()
    with hosts(3) as made:
        yield made


def listening(made: Hosts, host: int) -> set[tuple[str, int]]:
    """Addresses, as the kernel writes them, and ports on which something of the host listens."""
    found = set()
    for pid in made.pids(host)[:1]:
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == "0A":
                        address, port = words[1].split(":")
                        found.add((address, int(port, 16)))
    return found


@pytest.mark.slow
def test_strangers_disturb_nothing(three: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    stranger = write_script(tmp_path, STRANGER, "stranger.py")
    (tmp_path / "go").touch()
    whole = evenstep(tmp_path, "run", "--run", "whole", "script.py")
    (tmp_path / "go").unlink()

    attack = three.start(3, sys.executable, stranger, folder=tmp_path, stdin=True)
    nodes = []
    tried: set[tuple[int, str, int]] = set()
    over = threading.Event()

    def feed() -> None:
        assert attack.popen.stdin is not None
        while not over.wait(0.002):
            new = {(host, *place) for host in (1, 2) for place in listening(three, host)} - tried
            for host, _, port in new:
                attack.popen.stdin.write(f"{three.address(host)} {port}\n")
                attack.popen.stdin.flush()
            tried.update(new)

    feeding = threading.Thread(target=feed)
    feeding.start()
    try:
        for node in (0, 1):
            place = ("--nodes", 2, "--node-rank", node, "--master-addr", three.address(1), "--master-port", 1234)
            words = (*place, "--processes", 2 - node, "--run", f"run{node}", "script.py")
            nodes.append(three.start(node + 1, *command("run"), *words, folder=tmp_path, env={"EVENSTEP_TOKEN": TOKEN}))
            assert eventually(lambda: (1, "0B004D0A", 1234) in tried)  # node 0 waits for node 1 under attack
        events = tmp_path / "run0" / "events" / "rank-0.jsonl"
        assert eventually(lambda: events.exists() and sum(e["kind"] == "step" for e in read_events(events)) >= 9)
        pids = [pid for host in (1, 2) for pid in three.pids(host)]
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
        training = [pid for host in (1, 2) for pid in three.find(host, "python script.py")]
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in training]
    finally:
        over.set()
        feeding.join()
    said = attack.wait().out
    (tmp_path / "go").touch()
    first, second = (one.wait() for one in nodes)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.out.splitlines()[-1] == whole.out.splitlines()[-1]

    # Node 0's gate, rank 0's store, one of each launcher for the others to try the way, and two of gloo's for each
    # process; all on the address that is needed.
    assert len(tried) == 1 + 1 + 2 + 3 * 2, tried
    assert {address for host, address, _ in tried} == {"0B004D0A", "0C004D0A"}, tried
    assert said.count(" crowd done") == len(tried), said
    assert said.count(" guess S") == len(tried), said
    assert "1234 guess StrangerError: it refused the token" in said
    assert f"turned away a connection from {three.address(3)}" in first.err
    assert len(training) == 3
    assert not any(TOKEN.encode() in text for text in (*lines, *environments))
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "script.py"]
    assert not any(TOKEN.encode() in path.read_bytes() for path in kept)
    assert TOKEN not in first.err + first.out + second.err + second.out
