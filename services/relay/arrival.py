"""A payload on its way here: fetched once, read by everybody who waits for it while its bytes come in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from heterorl.common.errors import InvalidRequest
from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.process.threads import in_thread
from heterorl.common.types.policy import PayloadRef
from heterorl.common.weights.container import FRAME_BYTES

LOOK_S = 0.2
"""A frame that was received is in the file a moment later; a look costs one system call."""


class Arrival:
    """One payload that is being fetched into `path`.

    Args:
        ref: the payload.
        path: the file that grows.
        fetching: ends when the payload is whole and has moved into the cache, or with what went wrong.
        bell: rings when bytes arrive.
        clock: for looks between rings.
    """

    def __init__(
        self, ref: PayloadRef, path: Path, *, fetching: asyncio.Future[None], bell: Bell, clock: Clock
    ) -> None:
        self.ref = ref
        self.fetching = fetching
        self._path = path
        self._bell = bell
        self._clock = clock

    async def read(self, *, offset: int, stop: int | None) -> AsyncIterator[bytes]:
        """Yield [offset, stop) as it arrives; ends early where the payload became whole before its file was opened.

        The bytes have the checksums of their frames; their digest is known when the last of them is here.

        Raises:
            InvalidRequest: the range is not within the payload.
            HeterorlError, OSError: why it does not arrive.
        """
        end = self.ref.num_bytes if stop is None else stop
        if not 0 <= offset <= end <= self.ref.num_bytes:
            raise InvalidRequest(f"bytes {offset} to {end} are not within the payload's {self.ref.num_bytes}")
        descriptor = -1
        try:
            while offset < end:
                ticket, is_over = self._bell.ticket(), self.fetching.done()
                if descriptor < 0:
                    descriptor = self._open()
                size = os.fstat(descriptor).st_size if descriptor >= 0 else 0
                if offset < min(size, end):
                    num_bytes = min(FRAME_BYTES, size - offset, end - offset)
                    frame = await in_thread(os.pread, descriptor, num_bytes, offset)
                    offset += len(frame)
                    yield frame
                elif is_over:
                    self.fetching.result()
                    return
                else:
                    await ring_or_time(ticket, clock=self._clock, seconds=LOOK_S)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
