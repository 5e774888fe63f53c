"""How fast a site is: tokens of the last minute, and groups over minutes of work. Pure; instants are monotonic."""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 60.0
MEMORY_S = 300.0
"""Of work: what lies so far back counts e times less."""


class TokenRate:
    """Tokens a second over the last minute."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque()
        self._total = 0
        self._began_at: float | None = None

    def begin(self, now: float) -> None:
        """Note that something is under way: until a minute has passed, the rate is over the time since then."""
        if self._began_at is None:
            self._began_at = now

    def add(self, tokens: int, now: float) -> None:
        """Count the tokens of what ended."""
        self.begin(now)
        self._ends.append((now, tokens))
        self._total += tokens

    def per_s(self, now: float) -> float:
        """Tokens a second."""
        while self._ends and self._ends[0][0] <= now - WINDOW_S:
            self._total -= self._ends.popleft()[1]
        span_s = min(WINDOW_S, now - self._began_at) if self._began_at is not None else 0.0
        return self._total / span_s if span_s > 0 else 0.0


class GroupRate:
    """Groups a second of work, an exponential mean: a pause of the engine changes nothing."""

    def __init__(self) -> None:
        self._groups = self._seconds = 0.0
        self._since: float | None = None

    def work(self, is_busy: bool, now: float) -> None:
        """Note whether anything is under way from now on."""
        self._pass(now)
        self._since = now if is_busy else None

    def add(self, groups: int, now: float) -> None:
        """Count groups that ended."""
        self._pass(now)
        self._groups += groups

    @property
    def per_s(self) -> float | None:
        """Groups a second; None before the first."""
        return self._groups / self._seconds if self._groups and self._seconds > 0 else None

    def _pass(self, now: float) -> None:
        if self._since is None:
            return
        seconds, self._since = now - self._since, now
        fading = math.exp(-seconds / MEMORY_S)
        # The mean of what fades within the time itself, so that a long interval does not weigh beyond its memory.
        self._groups *= fading
        self._seconds = self._seconds * fading + MEMORY_S * (1 - fading)
