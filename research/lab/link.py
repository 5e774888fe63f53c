"""A network between a caller and the coordinator that exists only in virtual time: latency, and calls that get lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, cast

from heterorl.common.api import CoordinatorApi
from heterorl.common.errors import Unreachable

_STREAMS = frozenset({"watch_head", "read_payload", "stream_groups"})


class Link:
    """Delays every call by a round trip and loses some of them, before or after they took effect."""

    def __init__(self, inner: CoordinatorApi, *, one_way_s: float, loss: float, rng: random.Random) -> None:
        self._inner = inner
        self._one_way_s = one_way_s
        self._loss = loss
        self._rng = rng

    def api(self) -> CoordinatorApi:
        """The coordinator at the far end."""
        return cast("CoordinatorApi", self)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in _STREAMS:

            async def stream(**kwargs: Any) -> AsyncIterator[Any]:
                await self._cross(name)
                async for item in method(**kwargs):
                    await self._cross(name)
                    yield item

            return stream

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._cross(name)
            answer = await method(*args, **kwargs)
            await self._cross(name)
            return answer

        return call

    async def _cross(self, name: str) -> None:
        if self._one_way_s > 0.0:
            await asyncio.sleep(self._one_way_s)
        if self._loss > 0.0 and self._rng.random() < self._loss:
            raise Unreachable(f"{name} was lost on the simulated link", retry_after_s=self._one_way_s)
