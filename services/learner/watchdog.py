"""A timer of the kernel that ends this process by SIGKILL unless it is postponed in time.

Guarantees: a process that stands still, stopped by SIGSTOP or inside something that lets no thread of it run, is gone
when the time is over; it does not have to do anything for that. On Linux with glibc; elsewhere nothing watches.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import threading
from typing import Any

_CLOCK_MONOTONIC = 1
_SIGEV_SIGNAL = 0
_LOG = logging.getLogger(__name__)


class _Event(ctypes.Structure):
    """`struct sigevent`: 64 bytes on every 64-bit Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`: again after, and first after; seconds and nanoseconds."""

    _fields_ = (
        ("again_s", ctypes.c_long),
        ("again_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    )


class Watchdog:
    """Ends this process `timeout_s` after the last call of `postpone`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._timer = ctypes.c_void_p()
        self._library = _library()
        event = _Event(signal=int(signal.SIGKILL), notify=_SIGEV_SIGNAL)
        if self._library is not None and self._library.timer_create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        ):
            _LOG.warning("the kernel gives no timer: a stopped process of the learner does not end")
            self._library = None
        self.postpone()

    def postpone(self) -> None:
        """Begin the time anew; nothing after `close`."""
        with self._lock:
            self._set(self._timeout_s)

    def close(self) -> None:
        """Watch no more."""
        with self._lock:
            self._set(0.0)
            self._library = None

    def _set(self, seconds: float) -> None:
        if self._library is not None:
            whole = int(seconds)
            times = _Times(first_s=whole, first_ns=int((seconds - whole) * 1e9))
            self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)


def _library() -> Any:
    # A package of its own before glibc 2.34.
    for name in (None, "librt.so.1") if sys.platform == "linux" else ():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "timer_create"):
            return library
    return None
