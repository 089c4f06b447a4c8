"""What holds for every test: one thread for torch, a fresh working directory, nothing left behind."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

from tests.leaks import empty_cwd, nothing_left_behind

__all__ = ["empty_cwd", "nothing_left_behind"]

# Before anything runs in parallel: a process that once used OpenMP threads cannot be forked safely.
torch.set_num_threads(1)

# A shell's background job ignores these, and so would every process that a test starts and signals.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

# The same examples on every machine and in every run; the deadline is pytest-timeout's.
settings.register_profile("evenstep", deadline=None, derandomize=True, database=None)
settings.load_profile("evenstep")
