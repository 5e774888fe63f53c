"""The coordinator's database without its thread: an operation commits inside the call that submits it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from heterorl.common.errors import Draining
from heterorl.coordinator.store.database import Connection, Database

ResultT = TypeVar("ResultT")


class InlineDatabase(Database):
    """Same store, same transactions, same answers; nothing beside the event loop, so that runs repeat exactly."""

    def _start(self) -> None:
        return

    def submit(self, operation: Callable[[Connection], ResultT], *, is_alone: bool = False) -> asyncio.Future[ResultT]:
        """Run one operation now; the future resolves on the loop's next turn."""
        if self._is_closed:
            raise Draining("the coordinator is stopping", retry_after_s=1.0)
        future: asyncio.Future[ResultT] = self._loop.create_future()
        self._commit([(operation, future, is_alone)])
        return future

    async def close(self) -> None:
        """Fold the log into the file, close."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.close()
