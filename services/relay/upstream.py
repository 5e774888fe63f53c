"""The coordinator as the relay itself asks it: for weights, under its own name."""

from __future__ import annotations

from collections.abc import AsyncIterator

from heterorl.common.process.metrics import RELAY_BYTES
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.retry import RetryPolicy
from heterorl.common.types.common import Digest

BRIEF = RetryPolicy(budget_s=5.0)
"""Samplers ask again themselves; what is kept is to be given before their calls reach their deadlines."""


class Upstream(CoordinatorClient):
    """A client that counts what comes over the line."""

    async def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield frames of a payload."""
        async for frame in super().read_payload(digest=digest, offset=offset, stop=stop):
            RELAY_BYTES.labels("from_coordinator").inc(len(frame))
            yield frame
