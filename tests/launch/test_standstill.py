"""When it is said that some processes wait for others."""

from __future__ import annotations

from evenstep.launch.standstill import Standstill
from evenstep.record.activity import COMPUTING, MEETING, SCRIPT, Doing

WAITS, OWN_CODE = Doing(12, MEETING), Doing(11, SCRIPT)


def told(*looks: tuple[float, dict[int, Doing]]) -> list[bool]:
    still = Standstill()
    return [still.look(doings, now) for now, doings in looks]


def test_it_is_told_once_and_again_only_after_something_has_moved() -> None:
    stuck = {0: OWN_CODE, 1: WAITS}
    moved = {0: Doing(12, COMPUTING), 1: WAITS}
    assert told((0, stuck), (59, stuck), (61, stuck), (200, stuck)) == [False, False, True, False]
    again = told((0, stuck), (61, stuck), (62, moved), (63, stuck), (122, stuck), (124, stuck))
    assert again == [False, True, False, False, False, True]


def test_slow_processes_and_those_that_all_wait_are_no_standstill() -> None:
    for doings in ({0: OWN_CODE, 1: OWN_CODE}, {0: WAITS, 1: WAITS}, {0: OWN_CODE}, {}):
        assert told((0, doings), (1000, doings)) == [False, False]
