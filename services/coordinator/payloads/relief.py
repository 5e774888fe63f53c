"""Makes room when the disk is full: merged deltas first, which are a cache, then payloads that nobody needs.

    loop    waits for                              unblocked by
    run     a refusal by the disk, then a pause    the disk; time

What is under a lease, or kept for any other reason, stays: a full disk changes nothing about what may go.
"""

from __future__ import annotations

from collections.abc import Callable

from heterorl.common.process.clock import Clock
from heterorl.common.types.common import Digest
from heterorl.coordinator.payloads.keeper import Keeper
from heterorl.coordinator.payloads.merging.cache import Merges
from heterorl.coordinator.store.database import ENDED
from heterorl.coordinator.store.room import Room
from heterorl.coordinator.store.steady import Steady

PAUSE_S = 30.0
"""Between two attempts: each rebuilds the head when something may go."""


class Relief:
    """The one who makes room. Belongs to the event loop."""

    def __init__(
        self,
        *,
        room: Room,
        keeper: Keeper,
        merges: Merges,
        leased: Callable[[], frozenset[Digest]],
        clock: Clock,
    ) -> None:
        self._room = room
        self._keeper = keeper
        self._merges = merges
        self._leased = leased
        self._clock = clock

    async def run(self) -> None:
        """Make room whenever there is none, until cancelled; returns when the store ends."""
        steady = Steady("relief", self._clock)
        try:
            while True:
                await self._room.refusal.wait()
                self._room.refusal.clear()
                await steady.attempt(self.make_room)
                await self._clock.sleep(PAUSE_S)
                if self._room.is_full:
                    self._room.refusal.set()
        except ENDED:
            return

    async def make_room(self) -> None:
        """Delete what may go."""
        async with self._room.freed():
            await self._merges.evict(head=0, window=0, budget_bytes=0, leased=self._leased)
            await self._keeper.collect(missing_bytes=1)
