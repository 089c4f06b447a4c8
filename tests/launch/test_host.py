"""What this host offers: a port, GPUs, and which processes belong to a launch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.errors import MachineError
from evenstep.launch import gpus
from evenstep.launch.hosts.ways import check_way, open_to_others
from evenstep.launch.kinship import family
from evenstep.launch.port import reserve_port
from tests.launch.launching import eventually


def test_reserved_port_is_rank_0s_to_listen_on() -> None:
    """By both of torch's stores, and again: a script may leave its process group and make another."""
    code = """if True:
        import sys
        from datetime import timedelta
        from torch.distributed import TCPStore
        for use_libuv in (True, False) * 2:
            place = ("127.0.0.1", int(sys.argv[1]), None)
            server = TCPStore(*place, True, timedelta(seconds=10), use_libuv=use_libuv)
            client = TCPStore(*place, False, timedelta(seconds=10), use_libuv=use_libuv)
            client.set("a", "b")
            print(server.get("a").decode())
            del server, client
    """
    port, keeper = reserve_port()
    with keeper:
        done = subprocess.run([sys.executable, "-c", code, str(port)], capture_output=True, text=True, timeout=150)
    assert done.stdout.split() == ["b"] * 4, done.stderr


def test_reserved_port_is_nobody_elses() -> None:
    port, keeper = reserve_port()
    with keeper, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    ports = [reserve_port() for _ in range(50)]
    assert len({port for port, _ in ports}) == 50
    for _, keeper in ports:
        keeper.close()


@pytest.mark.parametrize(
    ("address", "where"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("host1", ""), ("192.0.2.1", ""), ("no.such.name", "")],
)
def test_where_a_launcher_listens_for_the_others_to_try_the_way(
    monkeypatch: pytest.MonkeyPatch, address: str, where: str
) -> None:
    """`where` "": on all addresses, since that one is not to be listened at or no other host's way here."""
    known = {"localhost": "127.0.0.1", "host1": "127.0.1.1"}
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *a, **k: find(known.get(name, name), *a, **k))
    with open_to_others(address) as listener:
        port = listener.getsockname()[1]
        assert listener.getsockname()[0] in ((where,) if where else ("::", "0.0.0.0"))
        check_way("127.0.0.1", port)
    with pytest.raises(MachineError, match=f"cannot connect to 127.0.0.1:{port}, .*: Connection refused"):
        check_way("127.0.0.1", port)


@pytest.mark.parametrize(
    ("visible", "installed", "count"),
    [(None, 4, 4), (None, 0, 0), ("", 4, 0), ("-1", 4, 0), ("0", 4, 1), ("2,0", 4, 2), ("0,9,1", 4, 1), ("0, 1", 4, 2),
     ("GPU-1234,GPU-5678", 4, 2), ("0,1", 0, 0)],
)  # fmt: skip
def test_visible_gpus_as_cuda_counts_them(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, installed: int, count: int
) -> None:
    monkeypatch.setattr(gpus, "installed_gpus", lambda: installed)
    monkeypatch.setattr(gpus, "torch_has_cuda", lambda: True)
    assert gpus.visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count
    monkeypatch.setattr(gpus, "torch_has_cuda", lambda: False)
    assert gpus.visible_gpus({}) == 0


def test_cuda_build_is_told_from_its_version_file() -> None:
    import torch

    assert gpus.torch_has_cuda() is (torch.version.cuda is not None)


def test_family_is_descendants_and_the_tagged() -> None:
    """One descendant without the tag, one tagged process that is no descendant: both belong."""
    tag = f"test-{os.getpid()}"
    child = subprocess.Popen(["sleep", "600"], env={})
    # The shell ends at once, so that its child is adopted by somebody else than this process.
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "EVENSTEP_LAUNCH": tag}, stdout=subprocess.PIPE, check=True
    )
    orphan = int(done.stdout)
    try:
        assert eventually(lambda: Path(f"/proc/{orphan}/cmdline").read_bytes().startswith(b"sleep"))
        assert family(tag)[child.pid] == family(tag)[orphan] == "sleep 600"
        assert os.getpid() not in family(tag)
        assert orphan not in family("another")
    finally:
        os.kill(orphan, signal.SIGKILL)
        child.kill()
        child.wait()
    assert child.pid not in family(tag)
