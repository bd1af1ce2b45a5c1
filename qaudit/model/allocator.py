"""Two settings of the C library, so that an audit holds no more memory than it needs.

glibc gives each thread an arena of its own and keeps freed blocks for later. Both are meant for
many small objects; the batches of activations here are few and large, and one thread at a time
computes. Sharing one arena costs nothing. Returning large blocks at once halves what a pass
holds, but each is then faulted in anew, a tenth or more of the time: so that is set only
once memory is short, which is when hidden states begin to be spilled (benchmarks/README.md).
Other C libraries share already, or take no such setting: then nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_ARENA_MAX = -8  # of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_LARGE_NBYTES = 4 * 2**20


@cache
def share_one_arena() -> None:
    """Let all threads allocate in one place."""
    _set(_M_ARENA_MAX, 1)


@cache
def return_large_blocks() -> None:
    """Give large blocks back to the system the moment they are freed."""
    _set(_M_MMAP_THRESHOLD, _LARGE_NBYTES)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform == "linux" and mallopt is not None:
        mallopt(parameter, value)
