"""Heartbeats between ranks, over their rendezvous or files next to it.

    each rank     counts up its own beat, several times in `rank_timeout_s`
    rank 0        reads the beats of all others
    the others    read the beat of rank 0

Guarantees: 1.25 x `rank_timeout_s` after a rank was killed, stopped or cut off, all ranks have ended. Rank 0 exits with
code 1 and writes the reason into the store; the others end by that or by its silence. The process ends even inside an
uninterruptible operation.

A dead process closes its sockets, which ends the waits of the others at once. A stopped process (SIGSTOP, or a call
that holds all its threads) cannot end itself: a kernel timer does, unless it is postponed. On Linux with glibc only.
"""

import ctypes
import logging
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from heterorl.common.errors import OperatorError
from heterorl.learner.backends.ranks.rank_env import RankEnv

_LOG = logging.getLogger(__name__)
_CLOCK_MONOTONIC = 1
_SIGEV_SIGNAL = 0
EXIT_CODE = 1
_ENDED = "ended"
_MOST_S = 2.0
"""Longest time between two beats."""


class Watchdog:
    """A kernel timer that ends this process `timeout_s` after the last `postpone`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._timer = ctypes.c_void_p()
        self._library = _library()
        # `struct sigevent`: 64 bytes on every 64-bit Linux: value, signal, kind of notice.
        event = ctypes.create_string_buffer(struct.pack("@Pii48x", 0, int(signal.SIGKILL), _SIGEV_SIGNAL))
        if self._library is not None and self._library.timer_create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        ):
            _LOG.warning("the watchdog got no timer from the kernel: end a stopped process of the learner by hand")
            self._library = None
        self.postpone()

    def postpone(self) -> None:
        """Restart the timer; ignored after `close`."""
        with self._lock:
            self._set(self._timeout_s)

    def close(self) -> None:
        with self._lock:
            self._set(0.0)
            self._library = None

    def _set(self, seconds: float) -> None:
        if self._library is not None:
            whole = int(seconds)
            # `struct itimerspec`: interval and first expiry, in seconds and nanoseconds.
            times = (ctypes.c_long * 4)(0, 0, whole, int((seconds - whole) * 1e9))
            self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)


def _library() -> Any:
    # A library of its own before glibc 2.34.
    for name in (None, "librt.so.1") if sys.platform == "linux" else ():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "timer_create"):
            return library
    return None


class RankSilent(OperatorError):
    """A rank is lost; the others cannot go on without it."""

    action = "the launcher or the service manager starts the learner again: it resumes from the newest checkpoint"


def end_process(error: OperatorError) -> None:
    """Log the error and exit at once, without waiting for other threads."""
    _LOG.error("%s", error)
    logging.shutdown()
    os._exit(EXIT_CODE)


class BeatFiles:
    """A store for heartbeats: a `FileStore` would keep every beat.
    A written file is overwritten in place, so a disk that fills up stops no beat."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set(self, key: str, value: str) -> None:
        descriptor = os.open(self._path(key), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, value.encode().ljust(20))
        finally:
            os.close(descriptor)

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes().rstrip()

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "-")


@dataclass(eq=False, repr=False)
class Heartbeats:
    """Two threads: one writes and reads beats, the other judges their age."""

    store: Store | BeatFiles
    rank_env: RankEnv
    _: KW_ONLY
    timeout_s: float
    on_silence: Callable[[OperatorError], None] = end_process
    watchdog: Watchdog | None = None
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        """Start both threads.

        `store` is a connection of its own. `on_silence` is called once, in a thread. A process that runs other things
        too has no watchdog.
        """
        self._others = range(1, self.rank_env.world_size) if self.rank_env.rank == 0 else range(1)
        self._closing = threading.Event()
        self._once = threading.Lock()
        self._beats: dict[int, bytes] = {}
        self._heard = dict.fromkeys(self._others, self.monotonic())
        self._period_s = min(_MOST_S, self.timeout_s / 8)
        for target in (self._speak, self._judge):
            threading.Thread(target=target, daemon=True, name=f"rank-watch-{target.__name__}").start()

    def close(self) -> None:
        """Stop: from here on other ranks may end."""
        self._closing.set()
        if self.watchdog is not None:
            self.watchdog.close()

    def silent(self) -> list[int]:
        """Ranks without a beat for longer than the timeout."""
        now = self.monotonic()
        return [rank for rank in self._others if now - self._heard[rank] > self.timeout_s]

    def listen(self, number: int) -> None:
        """Write this rank's beat, and read the others'.

        Raises:
            RankSilent: rank 0 has lost a rank.
            RuntimeError: the store is gone.
        """
        store = self.store
        store.set(f"beat/{self.rank_env.rank}", str(number))
        if store.check([_ENDED]):
            raise RankSilent(bytes(store.get(_ENDED)).decode())
        for rank in self._others:
            key = f"beat/{rank}"
            # `get` would wait for a rank without a beat.
            beat = bytes(store.get(key)) if store.check([key]) else b""
            if beat != self._beats.get(rank, b""):
                self._beats[rank] = beat
                self._heard[rank] = self.monotonic()

    def _speak(self) -> None:
        number = 0
        while not self._closing.wait(self._period_s):
            number += 1
            try:
                self.listen(number)
            except RankSilent as error:
                self._end(error)
                return
            except (RuntimeError, OSError) as error:
                # At an orderly end the store may be gone first.
                if not self._closing.wait(1.0):
                    self._end(RankSilent(f"the store of the ranks is gone: {str(error).splitlines()[0]}"))
                return

    def _judge(self) -> None:
        while not self._closing.wait(self._period_s):
            # Not in `_speak`: the store may block it.
            if self.watchdog is not None:
                self.watchdog.postpone()
            silent = self.silent()
            if silent:
                names = ", ".join(map(str, silent))
                error = RankSilent(f"no sign of life from rank {names} for {self.timeout_s:g} s; all ranks end")
                if self.rank_env.rank == 0:
                    threading.Thread(target=self._tell, args=(str(error),), daemon=True).start()
                    self._closing.wait(min(1.0, self._period_s))
                self._end(error)
                return

    def _tell(self, reason: str) -> None:
        # In a thread of its own: the store may not answer.
        try:
            self.store.set(_ENDED, reason)
        except (RuntimeError, OSError):
            _LOG.debug("rank 0 cannot tell the other ranks its end: their store is gone")

    def _end(self, error: OperatorError) -> None:
        if self._once.acquire(blocking=False) and not self._closing.is_set():
            self._closing.set()
            self.on_silence(error)
