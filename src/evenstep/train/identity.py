"""The identity of a run directory: with what a run began that can change its bits, and must be so when it goes on."""

from __future__ import annotations

from collections.abc import Callable

from evenstep.errors import IdentityError, MachineError
from evenstep.record.identity import Scalar, differences, read_identity, write_identity
from evenstep.record.paths import RunPaths
from evenstep.train.world import Ground, check_same

_COMPILED = "compiled"  # is known when the loop begins; not there: nothing is

Values = dict[str, Scalar]


def check_identity(ground: Ground, paths: RunPaths, now: Values, allow: bool) -> None:
    """IdentityError on every process if the run directory was made under another identity than `now`."""

    def wanted(before: Values | None) -> Values:
        return {**now, **{name: value for name, value in (before or {}).items() if name == _COMPILED}}

    _check(ground, paths, wanted, allow)


def record_micro_batch(paths: RunPaths, size: int) -> None:
    """The micro-batch that was chosen: a resume takes it. For one process to call."""
    write_identity(paths.identity, {**(read_identity(paths.identity) or {}), "micro_batch": size})


def check_compiled(ground: Ground, paths: RunPaths, how: str | None, allow: bool) -> None:
    """The same for how the models are compiled (None: they are not). UsageError where processes differ in it."""
    check_same(ground, {_COMPILED: how})

    def wanted(before: Values | None) -> Values:
        rest = {name: value for name, value in (before or {}).items() if name != _COMPILED}
        return rest if how is None else {**rest, _COMPILED: how}

    _check(ground, paths, wanted, allow)


def _check(ground: Ground, paths: RunPaths, wanted: Callable[[Values | None], Values], allow: bool) -> None:
    failed: dict[str, str] = {}
    if ground.world.rank == 0:
        try:
            before = read_identity(paths.identity)
            now = wanted(before)
            changed = [] if before is None else differences(before, now)
            if changed and not allow:
                failed = {"lines": "\n    ".join(changed)}
            elif before is None or changed:
                write_identity(paths.identity, now)
        except (IdentityError, MachineError) as error:
            failed = {"broken": error.message}
    answer = ground.meeting.say("evenstep.start", failed, site="")[0]
    if "broken" in answer:
        raise MachineError(answer["broken"], do="start another run directory (--run DIR)")
    if answer:
        raise IdentityError(
            f"{paths.root} was made under another identity:\n    {answer['lines']}",
            do="go on with the same options, start another run directory (--run DIR), or say --allow-other-identity "
            "(the result will then be another than that of an undisturbed run)",
        )
