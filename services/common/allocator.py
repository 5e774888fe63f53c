"""Memory for frames: the C library keeps what it got, so that a frame costs no page faults.

glibc gives blocks of this size back to the kernel when they are freed and asks for them again at the next frame: some 500
page faults for each MiB, more time than the copying, the checksums and the digest together.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MMAP_BYTES = 8 << 20
"""Blocks up to this size come from the heap; larger ones are still given back at once."""
TRIM_BYTES = 32 << 20
"""Free memory that each heap keeps at its end, and no more than it once needed."""


def keep_freed_frames() -> bool:
    """Tell the C library of this process; returns whether it listens (glibc on Linux does)."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)) and bool(library.mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))
