"""Import once, in the fork server, what every process would import for itself."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# What a first training step imports late, after `import torch`: every process would pay for it again.
_LATE = {"torch": ("torch.distributed", "torch.utils.data", "torch._dynamo", "torch.profiler")}

_NEVER = 2**31 - 1  # as the collector's threshold; 0 is what a package would set that wants no collections


def preload(names: Iterable[str]) -> str | None:
    """Import `names`; those that fail are left for the script to fail on.

    Returns why this process must not be forked now, or None. A fork copies one thread only, so locks that another
    thread holds would stay locked for ever; and CUDA does not work in a fork of a process that initialised it.
    """
    with _no_collections():
        for name in names:
            _import(name)
            for late in _LATE.get(name.partition(".")[0], ()):
                _import(late)
            reason = _unforkable()
            if reason is not None:
                return f"importing {name} {reason}"
    return None


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collections inside: modules are no garbage, and looking for some takes a fifth of torch's import.

    What was made is frozen at the end, else the next collection would look at all of it. A threshold that an import
    has set is kept.
    """
    before = gc.get_threshold()
    gc.set_threshold(_NEVER, *before[1:])
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == _NEVER:
            gc.set_threshold(before[0], *gc.get_threshold()[1:])


def _import(name: str) -> None:
    try:
        module = importlib.import_module(name)
        if name == "evenstep":
            for public in module.__all__:  # they load lazily
                getattr(module, public)
    except BaseException:
        # The last part may be a name inside a module (from a.b import c); the module itself is imported by then.
        # Anything else is the script's own error, and it will show there.
        return


def _unforkable() -> str | None:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"started {threads - 1} thread{'s' if threads > 2 else ''}"
    if _cuda_in_use():
        return "initialised CUDA"
    return None


def _cuda_in_use() -> bool:
    """An open /dev/nvidia-uvm is a CUDA context's; merely counting devices through NVML does not open it."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm"):
                return True
        except OSError:
            continue
    return False
