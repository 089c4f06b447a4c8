"""How the C library keeps freed memory: gradients and activations of a micro-batch get the last one's pages back."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT = 512 << 20  # bytes at the heap's end that are not given back to the system
_MAPPED = 32 << 20  # bytes of a block from which on it is mapped by itself; the largest that glibc takes


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed. Left alone it gives the pages back and has them cleared anew: thousands of page
    faults a step. A user's own MALLOC_* settings win; where there is no glibc nothing is done."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, _MAPPED)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
