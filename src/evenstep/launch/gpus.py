"""How many GPUs a training here would see, found out without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path


def visible_gpus(environ: Mapping[str, str]) -> int:
    """The number of GPUs that torch would see: 0 if this torch was built without CUDA."""
    return _named(environ, installed_gpus()) if torch_has_cuda() else 0


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build; its version file says so."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\s*(:.*)?=\s*['\"]", text, re.MULTILINE) is not None


def installed_gpus() -> int:
    """GPUs that the NVIDIA driver shows to this process. NVML makes no CUDA context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return 0
        count = ctypes.c_uint(0)
        result = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return 0
    return count.value if result == 0 else 0


def _named(environ: Mapping[str, str], installed: int) -> int:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: the list ends at the first entry that names no device."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return installed
    count = 0
    for entry in (part.strip() for part in text.split(",")):
        if not entry.startswith(("GPU-", "MIG-")) and not (entry.isdigit() and int(entry) < installed):
            break
        count += 1
    return count if installed else 0
