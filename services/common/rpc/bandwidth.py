"""Bandwidth caps of one process: a token bucket per direction, so that a site's uplink stays usable for others."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from heterorl.common.process.clock import Clock
from heterorl.common.process.config import Config

BURST_S = 0.25
"""Unused allowance that is kept, as seconds at the cap."""


class BandwidthConfig(Config):
    """What this process may use of its site's link; weights and rollouts count, small messages do not."""

    down_bytes_per_s: float = Field(default=0.0, ge=0.0)
    """Bytes a second received; 0 is no cap."""
    up_bytes_per_s: float = Field(default=0.0, ge=0.0)
    """Bytes a second sent; 0 is no cap."""


@dataclass(slots=True, kw_only=True)
class TokenBucket:
    """Lets `bytes_per_s` through; what is taken beyond the allowance is a debt that the taker waits for.

    A single take may be larger than the bucket, and the mean rate is exact over any long time, however takes are sized.
    """

    bytes_per_s: float
    clock: Clock
    _allowance: float = field(init=False, default=0.0)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._at = self.clock.monotonic()

    async def take(self, num_bytes: int) -> float:
        """Count bytes and wait until they are paid for; returns the seconds waited. Takers are served in order."""
        if not self.bytes_per_s:
            return 0.0
        now = self.clock.monotonic()
        earned = (now - self._at) * self.bytes_per_s
        self._at = now
        self._allowance = min(BURST_S * self.bytes_per_s, self._allowance + earned) - num_bytes
        wait_s = max(0.0, -self._allowance / self.bytes_per_s)
        if wait_s:
            await self.clock.sleep(wait_s)
        return wait_s
