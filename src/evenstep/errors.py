"""One family of errors: what was got, what was expected, and what to do next."""

from __future__ import annotations


class EvenstepError(Exception):
    """Base of every error that evenstep raises on purpose.

    `message` says what was got and what was expected; `do` says what to do next. `exit_code` is what the
    command line ends with when nobody catches the error (see docs/design.md, section 6).
    """

    exit_code = 1

    def __init__(self, message: str, *, do: str | None = None) -> None:
        self.message = message
        self.do = do
        super().__init__(message if do is None else f"{message}\n  what to do: {do}")


class UsageError(EvenstepError):
    """An option, an argument or an input that cannot work. Raised before any training step."""

    exit_code = 2


class IdentityError(UsageError):
    """A run directory that was made under another identity (global batch, seed, torch version, ...)."""


class LossError(UsageError):
    """A loss function that does not return (sum, weight), or whose sums do not add up over samples."""


class DataError(EvenstepError):
    """A data set that raised, or changed, while it was read."""


class MismatchError(EvenstepError):
    """Processes that met at different calls, or at one call with different shapes, dtypes or operations."""


class PeerFailed(EvenstepError, RuntimeError):
    """Another process failed in a step that all processes share; nothing of that step was kept.

    A RuntimeError too, so that a script that catches out-of-memory errors catches it on every process.
    """


class CheckpointError(EvenstepError):
    """A checkpoint that is damaged, or that belongs to another model."""


class Stopped(SystemExit):
    """A signal asked the run to stop: the step was finished and a checkpoint written. No failure, so no Exception."""


class MachineError(EvenstepError):
    """Hosts, network or disk failed."""

    exit_code = 4
