"""Groups between the stream and the training loop: bounded by credits, nothing lost, nothing twice.

    side     waits for                      unblocked by
    take     `count` whole groups           put, close
    credits  room for another group         take, skip, close, the next `open_stream`

One condition, predicates are checked again after every wake-up. `put` never waits: the peer sends no more than the
credits it was given, and those were taken out of the room; what it sends beyond that is not kept. `close` wakes all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from heterorl.common.types.rollout import GroupId, QueuedGroup


class Inbox:
    """A bounded queue of whole groups that also knows which groups this learner holds.

    A group is held from its arrival until `settle`: while it waits, while it is trained on, and until the version that
    contains it is acknowledged.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Groups that may wait, and be on their way here."""
        self._condition = asyncio.Condition()
        self._waiting: deque[QueuedGroup] = deque()
        self._held: dict[GroupId, float] = {}
        self._granted = 0
        self._stream = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def num_waiting(self) -> int:
        """Groups that can be taken."""
        return len(self._waiting)

    @property
    def held(self) -> tuple[GroupId, ...]:
        """Ids of the groups that this learner holds."""
        return tuple(self._held)

    def held_s(self, group_id: GroupId) -> float:
        """How long this learner has held a group, seconds of the event loop's clock."""
        now = asyncio.get_running_loop().time()
        return now - self._held.get(group_id, now)

    def open_stream(self) -> tuple[tuple[GroupId, ...], AsyncIterator[int]]:
        """Begin a stream: the ids it must not send again, and its credits; ends the credits of an earlier stream."""
        self._stream += 1
        self._granted = 0
        return self.held, self._credits(self._stream)

    async def _credits(self, stream: int) -> AsyncIterator[int]:
        while True:
            async with self._condition:
                await self._condition.wait_for(lambda: self._is_over(stream) or self._room() > 0)
                if self._is_over(stream):
                    return
                credit = self._room()
                self._granted += credit
            yield credit

    def _is_over(self, stream: int) -> bool:
        return self._is_closed or stream != self._stream

    def _room(self) -> int:
        return self.capacity - len(self._waiting) - self._granted

    async def put(self, queued: QueuedGroup) -> None:
        """Take a streamed group in; one that is held already is ignored, and so is one that no credit was given for."""
        async with self._condition:
            self._granted = max(0, self._granted - 1)
            if queued.group.id not in self._held and len(self._waiting) < self.capacity:
                self._held[queued.group.id] = asyncio.get_running_loop().time()
                self._waiting.append(queued)
            self._condition.notify_all()

    async def skip(self) -> None:
        """Note that a streamed group was not taken in, so that its credit is given again."""
        async with self._condition:
            self._granted = max(0, self._granted - 1)
            self._condition.notify_all()

    async def take(self, count: int) -> list[QueuedGroup]:
        """Wait for `count` groups and remove them, oldest first; empty after `close`."""
        assert 0 < count <= self.capacity, "more groups than ever fit are never there"
        async with self._condition:
            await self._condition.wait_for(lambda: self._is_closed or len(self._waiting) >= count)
            if self._is_closed:
                return []
            taken = [self._waiting.popleft() for _ in range(count)]
            self._condition.notify_all()
            return taken

    def settle(self, ids: Iterable[GroupId]) -> None:
        """Forget groups whose fate the coordinator has recorded."""
        for group_id in ids:
            self._held.pop(group_id, None)

    async def close(self) -> None:
        """End every wait, now and later."""
        async with self._condition:
            self._is_closed = True
            self._condition.notify_all()
