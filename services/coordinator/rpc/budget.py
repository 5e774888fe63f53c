"""Bytes of requests in memory: a bound on all and on those of each holder, asked before a message is read.

    room  waits for room of the holder's own, and of everybody's; unblocked by whoever gives back, in order of arrival

How long a message is, nobody knows before it is here, so room for the longest is taken and the rest given back after.
Guarantees: a holder that takes all of its own waits for itself alone; the learner and the operator have room of their
own, which others' bytes never take. A wait that is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from heterorl.coordinator.rpc.holders import Holder

OF_SITE, OF_PRIVILEGED = 4, 16
"""Messages of the largest size that one holder may have in memory. A learner has streams that are seldom written to."""


@dataclass(slots=True, eq=False)
class Room:
    """What is taken for one message, bytes."""

    budget: Budget
    holder: Holder
    num_bytes: int

    def shrink(self, num_bytes: int) -> None:
        """Keep only so many bytes, where that is less."""
        self.budget.give_back(self, max(0, self.num_bytes - num_bytes))

    def close(self) -> None:
        """Give all back; once more is harmless."""
        self.budget.give_back(self, self.num_bytes)


class Budget:
    """The bytes of one server; `total_bytes` is raised to what one site may have. Belongs to the event loop."""

    def __init__(self, *, total_bytes: int, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._free = max(total_bytes, OF_SITE * message_bytes)
        self._used: Counter[Holder] = Counter()
        self._waiting: dict[asyncio.Future[None], Holder] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken now."""
        return sum(self._used.values())

    async def room(self, holder: Holder) -> Room:
        """Wait for room for one message."""
        if self._waiting or not self._fits(holder):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[turn] = holder
            self._wake()
            try:
                await turn
            except BaseException:
                if self._waiting.pop(turn, None) is None and turn.done() and not turn.cancelled():
                    # Its turn came with the cancellation.
                    self.give_back(Room(self, holder, self._message_bytes), self._message_bytes)
                raise
        else:
            self._take(holder)
        return Room(self, holder, self._message_bytes)

    def give_back(self, room: Room, num_bytes: int) -> None:
        """Take bytes off a room and let those go on who wait for them."""
        if not num_bytes:
            return
        room.num_bytes -= num_bytes
        self._used[room.holder] -= num_bytes
        if not self._used[room.holder]:
            del self._used[room.holder]
        if not room.holder.is_privileged:
            self._free += num_bytes
        self._wake()

    def _fits(self, holder: Holder) -> bool:
        limit = (OF_PRIVILEGED if holder.is_privileged else OF_SITE) * self._message_bytes
        is_own = self._used[holder] + self._message_bytes <= limit
        return is_own and (holder.is_privileged or self._free >= self._message_bytes)

    def _take(self, holder: Holder) -> None:
        self._used[holder] += self._message_bytes
        if not holder.is_privileged:
            self._free -= self._message_bytes

    def _wake(self) -> None:
        for turn, holder in list(self._waiting.items()):
            if turn.done():
                self._waiting.pop(turn, None)
            elif self._fits(holder):
                del self._waiting[turn]
                self._take(holder)
                turn.set_result(None)
