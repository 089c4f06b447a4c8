"""Two launchers in one process, each with its thread."""

from __future__ import annotations

import socket
import threading
from collections import Counter

import pytest

from evenstep.launch.hosts.hub import Hub
from evenstep.launch.hosts.line import Line, socket_line
from evenstep.launch.hosts.messages import BEAT, About
from evenstep.launch.hosts.spoke import Spoke
from evenstep.launch.restarts import Verdict


def test_beats_come_by_the_clock_and_do_not_answer_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[Line] = Counter()
    send = Line.send

    def counted(line: Line, **message: object) -> bool:
        sent[line] += "beat" in message
        return send(line, **message)

    monkeypatch.setattr(Line, "send", counted)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        called = socket.create_connection(listener.getsockname())
        ends = [socket_line(listener.accept()[0]), socket_line(called)]
    hub = Hub(2, About("a", 1, {}, 0, 2), "a", print, "run", 10.0, lambda fault: Verdict(False))
    hub.welcome(ends[0])
    spoke = Spoke(About("b", 1, {}, 1, 2), "a", print, lambda: ends[1])
    threading.Thread(target=hub.join, args=(lambda: False,)).start()
    assert spoke.join(lambda: False) is not None
    for line in ends:
        sent[line] = 0
    assert not hub.wait(4 * BEAT)  # for so long nothing happens
    assert all(2 <= sent[line] <= 5 for line in ends), sent
    for link in (hub, spoke):
        link.done(None)
    assert hub.wait(10)
    assert spoke.wait(10)
    for link in (spoke, hub):
        link.close()
    assert hub.fault is None
