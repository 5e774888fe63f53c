"""A lock for each name that somebody holds or waits for; what nobody wants takes no memory. Of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager


class Locks:
    """Locks by name."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._num_users: dict[str, int] = {}

    def __len__(self) -> int:
        """Locks in memory."""
        return len(self._locks)

    def __getitem__(self, name: str) -> AbstractAsyncContextManager[None]:
        """A context that holds the lock of a name."""
        return self._held(name)

    def is_held(self, name: str) -> bool:
        """Whether somebody holds the lock of a name."""
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    @asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._num_users[name] = self._num_users.get(name, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._num_users[name], self._locks[name]
