"""Bytes of requests in memory at one server: a lane for each kind of caller and of message.

Requests of some KiB have a lane of their own: no push that crawls in, and no caller that sends none, delays a
heartbeat. The learner and the operator have room of their own, which others' bytes never take.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from heterorl.common.rpc.lanes import Holder, Lane, Room

SHORT = frozenset(
    {
        "/heterorl.v1.PolicyService/WatchHead",
        "/heterorl.v1.PolicyService/GetManifest",
        "/heterorl.v1.PolicyService/ListManifests",
        "/heterorl.v1.PolicyService/PlanPull",
        "/heterorl.v1.PolicyService/ReadPayload",
        "/heterorl.v1.RolloutService/LeaseWork",
        "/heterorl.v1.RolloutService/AbandonWork",
        "/heterorl.v1.RunService/Heartbeat",
        "/heterorl.v1.EvaluationService/LeaseEvaluation",
        "/heterorl.v1.EvaluationService/AbandonEvaluation",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    }
)
"""Methods of samplers and relays whose longest request has at most SHORT_BYTES."""
SHORT_BYTES = 1 << 16
OF_HOLDER, OF_PRIVILEGED = 4, 16
"""Messages of the largest size that one holder may have in a lane. A learner's streams are seldom written to."""
SHORT_PART = 4
"""One byte in this many of the total is the short lane's."""
SHORT_S, LONG_S = 10.0, 900.0
"""Longest that a message may take. A short one is sent with its call; 900 s are 16 MiB at 18 kB/s."""
SHORT_PATIENCE_S, LONG_PATIENCE_S = 0.5, 10.0
"""How long a read is left alone that brings nothing while a holder without room waits."""
LAST_S = 30.0
"""Least time between two ends of a long read that is the last one of its holder."""


class Budget:
    """The lanes of one server. Belongs to the event loop.

    Args:
        total_bytes: of samplers' messages; raised to what one holder may have in each lane.
        message_bytes: of the longest message.
    """

    def __init__(self, *, total_bytes: int, message_bytes: int) -> None:
        of_short = total_bytes // SHORT_PART
        self.short = Lane(
            total_bytes=of_short, message_bytes=message_bytes, of_holder=OF_HOLDER, longest=SHORT_BYTES,
            limit_s=SHORT_S, patience_s=SHORT_PATIENCE_S,
        )  # fmt: skip
        self.long = Lane(
            total_bytes=total_bytes - of_short, message_bytes=message_bytes, of_holder=OF_HOLDER, limit_s=LONG_S,
            patience_s=LONG_PATIENCE_S, last_s=LAST_S,
        )  # fmt: skip
        # A learner's streams may be silent for as long as a step takes.
        self.privileged = Lane(total_bytes=math.inf, message_bytes=message_bytes, of_holder=OF_PRIVILEGED)

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken now."""
        return self.short.num_bytes + self.long.num_bytes + self.privileged.num_bytes

    async def message(
        self, holder: Holder, method: str, read: Callable[[], Awaitable[Any]], *, times: int = 1
    ) -> tuple[Room, Any]:
        """Wait for room, then for the message that `read` gives; returns it with its room, which the caller closes.

        At the end of a stream the message is gRPC's EOF, whose length is 0. `times` its bytes are what it will take.

        Raises:
            QuotaExceeded: none came in time, or others without room could not wait longer; worth repeating.
            InvalidRequest: the method needs no message of this length.
        """
        lane = self.privileged if holder.is_privileged else self.short if method in SHORT else self.long
        return await lane.message(holder, read, times=times)
