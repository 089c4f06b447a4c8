"""Exact distributed PyTorch training: one script, one global batch, any number of processes, one result.

The public names load lazily, so that the command line does not pay for importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from evenstep.errors import (
    CheckpointError,
    DataError,
    EvenstepError,
    IdentityError,
    LossError,
    MachineError,
    MismatchError,
    PeerFailed,
    UsageError,
)

if TYPE_CHECKING:
    from evenstep.train.data.stream import Stream, stream
    from evenstep.train.run import Run
    from evenstep.train.start import start
    from evenstep.train.step import Step
    from evenstep.train.steps import Steps


__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DataError",
    "EvenstepError",
    "IdentityError",
    "LossError",
    "MachineError",
    "MismatchError",
    "PeerFailed",
    "Run",
    "Step",
    "Steps",
    "Stream",
    "UsageError",
    "__version__",
    "start",
    "stream",
]

# Name -> the module that has it; these import torch.
_LAZY = {
    "Run": "evenstep.train.run",
    "Step": "evenstep.train.step",
    "Steps": "evenstep.train.steps",
    "Stream": "evenstep.train.data.stream",
    "start": "evenstep.train.start",
    "stream": "evenstep.train.data.stream",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
