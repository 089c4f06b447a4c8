"""Autocast without its cache of cast weights, inside step.backward.

The cache is one for all threads, and is emptied whenever one of them leaves autocast. While it lasts, a weight that is
used twice is cast once, and the gradients of both uses are added in 16 bits; without it each is cast back first. So
what comes out would depend on what other threads, or stages, do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_set = torch.set_autocast_cache_enabled


@contextmanager
def no_cast_cache() -> Iterator[None]:
    """Whatever the script's autocast says of its cache, there is none. A thread that begins inside says `no_cache`."""
    before = torch.is_autocast_cache_enabled()
    vars(torch)["set_autocast_cache_enabled"] = _off
    _set(False)
    try:
        yield
    finally:
        vars(torch)["set_autocast_cache_enabled"] = _set
        _set(before)


def no_cache() -> None:
    """In a thread, inside `no_cast_cache`."""
    _set(False)


def _off(enabled: bool) -> None:
    """In place of torch's own: an autocast that begins, in whatever thread (autograd has its own for GPUs), turns the
    cache on unless it was told not to."""
    _set(False)
