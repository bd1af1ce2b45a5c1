"""Ask the C library to give memory back, so that an audit holds what it needs and no more.

glibc gives each thread an arena of its own and keeps freed blocks for later. Both are meant for
many small objects; the batches of activations here are few and large, and one thread at a time
computes. Left alone, a pass holds more than twice what it uses (benchmarks/memory.py).
Other C libraries share already, or cannot be told: then nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_ARENA_MAX = -8  # of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_LARGE_NBYTES = 4 * 2**20


@cache
def hand_memory_back() -> None:
    """Let all threads allocate in one place, and return large blocks the moment they are freed."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform == "linux" and tell is not None:
        tell(_M_ARENA_MAX, 1)
        tell(_M_MMAP_THRESHOLD, _LARGE_NBYTES)
