"""Memory for frames: the C library keeps what it got, so that a frame costs no page faults.

glibc gives blocks of this size back to the kernel when they are freed and asks for them again at the next frame: some
500 page faults for each MiB, more time than the copying, the checksums and the digest together.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
MMAP_BYTES = 8 << 20
"""Blocks up to this size come from a heap; larger ones are still given back at once."""
TRIM_BYTES = 32 << 20
"""Free memory that a heap keeps at its end, and never more than it once needed."""
MAX_HEAPS = 2
"""Heaps of a process; with one for each thread, each would keep what its thread once needed."""


def keep_freed_frames() -> bool:
    """Tell the C library of this process; returns whether it listens: glibc on Linux does."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((_M_MMAP_THRESHOLD, MMAP_BYTES), (_M_TRIM_THRESHOLD, TRIM_BYTES), (_M_ARENA_MAX, MAX_HEAPS))
    answers = [mallopt(option, value) for option, value in options]
    return all(answer == 1 for answer in answers)
