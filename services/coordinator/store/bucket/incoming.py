"""What learners put into the bucket themselves: addresses for it, and its bytes until the coordinator has taken them.

Guarantees: an object here is no payload: no plan names it, and its bytes get a payload's name only from the copy that
the coordinator verified. Addresses that are open at once are bounded, and what nobody took is deleted when its address
is over.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from heterorl.common.errors import Busy, DigestMismatch, PayloadMissing
from heterorl.common.process.clock import Clock
from heterorl.common.types.common import Digest
from heterorl.coordinator.store.bucket.objects import Objects
from heterorl.coordinator.store.database import ENDED
from heterorl.coordinator.store.home import Incoming
from heterorl.coordinator.store.steady import Steady

_LOG = logging.getLogger(__name__)
MAX_OPEN = 16
"""Payloads for which there are addresses at once; a learner brings one after another."""
SWEEP_S = 300.0


class BucketIncoming(Incoming):
    """Objects below `incoming` in one bucket. Belongs to the event loop."""

    def __init__(self, objects: Objects, *, clock: Clock, put_bytes: int, lifetime_s: float) -> None:
        """Put it together; `sweep` comes first.

        Args:
            objects: of the prefix.
            clock: for the ends of addresses.
            put_bytes: the largest payload that has an address.
            lifetime_s: how long an address lasts.
        """
        self._objects = objects
        self._clock = clock
        self._put_bytes = put_bytes
        self._lifetime_s = lifetime_s
        self._open: dict[Digest, float] = {}
        """The monotonic instant at which each address is over."""

    async def url(self, digest: Digest, num_bytes: int) -> str:
        """An address at which a payload may be put for a while; empty where it is too large, or too many are open."""
        now = self._clock.monotonic()
        self._open = {name: until for name, until in self._open.items() if until > now}
        if not 0 < num_bytes <= self._put_bytes:
            return ""
        if digest not in self._open and len(self._open) >= MAX_OPEN:
            _LOG.warning("payload %s comes through the coordinator: %d others are being put", digest[:12], MAX_OPEN)
            return ""
        self._open[digest] = now + self._lifetime_s
        return await self._objects.put_url(digest)

    async def frames(self, digest: Digest, num_bytes: int) -> AsyncIterator[bytes]:
        """Yield what was put as a payload."""
        try:
            size = await self._objects.incoming_size(digest)
            if size != num_bytes:
                # Before a byte is read: whoever has the address may put anything there.
                await self.drop(digest)
                raise DigestMismatch(f"what was put as payload {digest[:12]} has {size} bytes, not {num_bytes}")
            async for block in self._objects.incoming(digest):
                yield block
        except FileNotFoundError:
            problem = f"payload {digest[:12]} was not put into the bucket, or is no longer there"
            raise PayloadMissing(problem) from None

    async def drop(self, digest: Digest) -> None:
        """Delete what was put as a payload; the next sweep does what the bucket refuses."""
        self._open.pop(digest, None)
        try:
            await self._objects.delete_incoming(digest)
        except Busy as error:
            _LOG.info("what was put as payload %s is deleted later: %s", digest[:12], error)

    async def sweep(self) -> None:
        """Delete what lies there for longer than an address lasts; the rest counts as open.

        Raises:
            Busy: the bucket does not answer, or refuses.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        for digest, put_at in (await self._objects.list_incoming()).items():
            left_s = put_at + self._lifetime_s - wall
            if left_s > 0:
                self._open.setdefault(digest, now + left_s)
            else:
                _LOG.info("what was put as payload %s, and not taken, is deleted", digest[:12])
                await self._objects.delete_incoming(digest)

    async def run(self) -> None:
        """Sweep now and then until cancelled; returns when the store ends."""
        steady = Steady("incoming", self._clock)
        try:
            while True:
                await self._clock.sleep(SWEEP_S)
                await steady.attempt(self.sweep)
        except ENDED:
            return
