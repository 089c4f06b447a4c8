"""Import once, in the fork server, what every process would import for itself."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable

# What a first training step imports late, after `import torch`: every process would pay for it again.
_LATE = {"torch": ("torch.distributed", "torch.utils.data", "torch._dynamo", "torch.profiler")}


def preload(names: Iterable[str]) -> str | None:
    """Import `names`; those that fail are left for the script to fail on.

    Returns why this process must not be forked now, or None. A fork copies one thread only, so locks that another
    thread holds would stay locked for ever; and CUDA does not work in a fork of a process that initialised it.
    """
    for name in names:
        _import(name)
        for late in _LATE.get(name.partition(".")[0], ()):
            _import(late)
        reason = _unforkable()
        if reason is not None:
            return f"importing {name} {reason}"
    return None


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
