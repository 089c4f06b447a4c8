"""How hosts are named: `--hosts` and `--hostfile`; and files that go between hosts."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from evenstep.errors import UsageError
from evenstep.launch.hosts.copies import read_stream, write_stream
from evenstep.launch.hosts.hostfile import Host, parse_hosts, read_hostfile
from evenstep.launch.hosts.line import GREETING, Line


def test_hosts_and_files_of_hosts(tmp_path: Path) -> None:
    assert parse_hosts("a:4, root@b,") == [Host("a", 4), Host("root@b", None)]
    file = tmp_path / "hosts"
    file.write_text("\ufeffa:4\r\n# two\n\nb 2  # slots\nc slots=3 max_slots=8\nd\n")
    assert read_hostfile(file) == [Host("a", 4), Host("b", 2), Host("c", 3), Host("d", None)]


@pytest.mark.parametrize("text", ["", "a:0", "a:x", "-oProxyCommand=x", "a,a:2", "a b", "fe80::1"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


def test_a_file_of_hosts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the host file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="bad is no text"):
        read_hostfile(tmp_path / "bad")
    (tmp_path / "bad").write_text("a\na\n")
    with pytest.raises(UsageError, match="a stands twice"):
        read_hostfile(tmp_path / "bad")


def test_a_stream_of_files_replaces_and_adds(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "logs").mkdir(parents=True)
    (source / "checkpoints" / "step-0000000003").mkdir(parents=True)
    (source / "checkpoints" / "step-0000000003" / "x").write_text("whole")
    (source / "logs" / "rank-1.log").write_text("before and after")
    (source / "state").write_text("new")
    (target / "logs").mkdir(parents=True)
    (target / "logs" / "rank-1.log").write_text("of another host, ")
    (target / "state").write_text("old")
    stream = io.BytesIO()
    names = {"logs/rank-1.log": len("before and "), "state": None, "none": None, "checkpoints/step-0000000003": None}
    write_stream(stream, source, names)
    for cut in range(0, 4608, 512):  # nothing of one that is cut short is kept
        with pytest.raises((OSError, EOFError, tarfile.TarError)):
            read_stream(io.BytesIO(stream.getvalue()[:cut]), target)
        assert (target / "state").read_text() == "old"
        assert sorted(path.name for path in target.iterdir()) == ["logs", "state"]
    read_stream(io.BytesIO(stream.getvalue()), target)
    assert (target / "logs" / "rank-1.log").read_text() == "of another host, after"
    assert (target / "state").read_text() == "new"
    assert (target / "checkpoints" / "step-0000000003" / "x").read_text() == "whole"
    assert sorted(path.name for path in target.iterdir()) == ["checkpoints", "logs", "state"]


def test_a_stream_cannot_write_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("x")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as made:
        made.add(tmp_path / "evil", "../../evil2")
    with pytest.raises(OSError, match="is no file of a run directory"):
        read_stream(io.BytesIO(stream.getvalue()), tmp_path / "b")
    assert not list(tmp_path.rglob("evil2"))


def test_what_comes_before_the_greeting_is_passed_over() -> None:
    reading, writing = os.pipe()
    line = Line(reading, os.dup(writing), lambda: os.close(reading), GREETING)
    os.write(writing, b"hello\nthere" + GREETING[:5])
    assert line.receive() == []
    os.write(writing, GREETING[5:] + b'{"a": 1}\n')
    assert line.receive() == [{"a": 1}]
    os.close(writing)
    os.close(line._out)
    line.close()
