"""The coordinator as the relay itself asks it: for weights, under its own name."""

from __future__ import annotations

from heterorl.common.process.metrics import RELAY_BYTES
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.retry import RetryPolicy

FROM_COORDINATOR, FROM_BUCKET, TO_NODES = "from_coordinator", "from_bucket", "to_nodes"
"""Ways of a payload's bytes."""
BRIEF = RetryPolicy(budget_s=5.0)
"""Samplers ask again themselves; what is kept is to be given before their calls reach their deadlines."""


class Upstream(CoordinatorClient):
    """A client that counts what comes over the line."""

    def _note_frame(self, frame: bytes, *, is_direct: bool) -> None:
        RELAY_BYTES.labels(FROM_BUCKET if is_direct else FROM_COORDINATOR).inc(len(frame))
