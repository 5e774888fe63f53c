"""How the loops wait after a refusal: for longer each time, with full jitter, for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass

from heterorl.common.errors import ContractMismatch, InvalidRequest, PermissionDenied, RemoteError, Unauthenticated
from heterorl.common.types.words import peer_seconds

PERMANENT = (ContractMismatch, InvalidRequest, PermissionDenied)
"""Refusals of a peer that no repetition changes: a person must correct this node."""


@dataclass(slots=True, kw_only=True)
class Patience:
    """Delays that grow with failures in a row: drawn from [0, min(cap_s, base_s * 2^n)] on top of what is asked for."""

    rng: random.Random
    base_s: float = 1.0
    cap_s: float = 15.0
    num_failures: int = 0

    def delay_s(self, *, asked_s: float = 0.0) -> float:
        """Count a failure and say how long to wait; never less than the peer asks for."""
        longest = min(self.cap_s, self.base_s * 2 ** min(self.num_failures, 32))
        self.num_failures += 1
        return peer_seconds(asked_s) + self.rng.uniform(0.0, longest)

    def after(self, error: Exception) -> float:
        """How long to wait after a failure.

        Raises:
            RemoteError: the failure itself, when no repetition changes it.
        """
        if isinstance(error, PERMANENT) or (isinstance(error, Unauthenticated) and error.retry_after_s == 0):
            raise error
        return self.delay_s(asked_s=error.retry_after_s if isinstance(error, RemoteError) else 0.0)

    def reset(self) -> None:
        """Note a success."""
        self.num_failures = 0
