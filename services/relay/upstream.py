"""The coordinator as the relay itself asks it: for weights, under its own name."""

from __future__ import annotations

from heterorl.common.process.metrics import RELAY_BYTES
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.retry import RetryPolicy

BRIEF = RetryPolicy(budget_s=5.0)
"""Samplers ask again themselves; what is kept is to be given before their calls reach their deadlines."""
FROM_COORDINATOR, FROM_STORE, TO_NODES = "from_coordinator", "from_store", "to_nodes"
"""Ways of payload bytes."""


class Upstream(CoordinatorClient):
    """A client that counts what comes over the line."""

    def _received(self, num_bytes: int, *, is_direct: bool) -> None:
        RELAY_BYTES.labels(FROM_STORE if is_direct else FROM_COORDINATOR).inc(num_bytes)
