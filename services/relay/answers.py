"""Answers of the coordinator, kept in memory: asked once for all who ask the same, and again when they are old.

Guarantees: at most one question of a key under way; a refusal is never kept; while the coordinator does not answer, an
old answer is given. Bounded in bytes, the longest unused go first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from heterorl.common.errors import Unreachable
from heterorl.common.process.clock import Clock

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry(Generic[ValueT]):
    value: ValueT
    num_bytes: int
    until: float


class Answers(Generic[ValueT]):
    """Answers of one kind.

    Args:
        clock: tells their age.
        keep_s: how long one is given without asking again, seconds.
        max_bytes: of all of them.
        size: bytes of one.
    """

    def __init__(self, *, clock: Clock, keep_s: float, max_bytes: int, size: Callable[[ValueT], int]) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._size = size
        self._num_bytes = 0
        self._num_expired = 0
        self._num_cleared = 0
        self._entries: OrderedDict[Hashable, _Entry[ValueT]] = OrderedDict()
        self._asking: dict[Hashable, asyncio.Future[ValueT]] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[ValueT]]) -> ValueT:
        """The answer of a key; `ask` asks the coordinator.

        Raises:
            RemoteError: what it answered; Unreachable where it did not and nothing is kept.
        """
        entry = self._entries.get(key)
        if entry is not None and self._clock.monotonic() < entry.until:
            self._entries.move_to_end(key)
            return entry.value
        asking = self._asking.get(key)
        if asking is None:
            # A task of its own: whoever asked first may leave first.
            asking = asyncio.ensure_future(self._ask(key, ask))
            self._asking[key] = asking
            asking.add_done_callback(lambda done: self._asked(key, done))
        try:
            return await asyncio.shield(asking)
        except Unreachable:
            entry = self._entries.get(key)
            if entry is None:
                raise
            return entry.value

    def expire(self) -> None:
        """Ask again from now on; while nobody answers, what is kept is given."""
        self._num_expired += 1
        self._asking.clear()
        now = self._clock.monotonic()
        for key, entry in self._entries.items():
            self._entries[key] = _Entry(value=entry.value, num_bytes=entry.num_bytes, until=min(entry.until, now))

    def clear(self) -> None:
        """Forget everything, what is under way too."""
        self._num_cleared += 1
        self.expire()
        self._entries.clear()
        self._num_bytes = 0

    async def _ask(self, key: Hashable, ask: Callable[[], Awaitable[ValueT]]) -> ValueT:
        expired, cleared = self._num_expired, self._num_cleared
        value = await ask()
        if cleared == self._num_cleared:
            # Asked before the others became old, it is as old as they are.
            self._put(key, value, keep_s=self._keep_s if expired == self._num_expired else 0.0)
        return value

    def _put(self, key: Hashable, value: ValueT, *, keep_s: float) -> None:
        old = self._entries.pop(key, None)
        self._num_bytes -= 0 if old is None else old.num_bytes
        entry = _Entry(value=value, num_bytes=self._size(value), until=self._clock.monotonic() + keep_s)
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _asked(self, key: Hashable, done: asyncio.Future[ValueT]) -> None:
        if self._asking.get(key) is done:
            del self._asking[key]
        if not done.cancelled():
            done.exception()
