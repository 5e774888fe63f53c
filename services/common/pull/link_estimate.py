"""What a link is like, from the downloads over it: pure but for the two numbers that it remembers."""

from __future__ import annotations

MAX_OBJECT_BYTES = 1 << 40
WEIGHT = 0.5
"""Share of the newest download in each estimate: links change within a run."""


class LinkEstimate:
    """Round trip and bandwidth of one link.

    With n bytes before the first frame's end, N bytes in all and the instants 0, t_1 (first frame) and t_N (end):

        round trip  t_1, less what n bytes take          bandwidth  (N - n) / (t_N - t_1)
    """

    def __init__(self) -> None:
        self._round_trip_s: float | None = None
        self._bytes_per_s: float | None = None

    def note(self, *, first_bytes: int, first_s: float, total_bytes: int, total_s: float) -> None:
        """Learn from one download; one of a single frame says nothing of the bandwidth."""
        if total_bytes > first_bytes and total_s > first_s:
            self._bytes_per_s = _mean(self._bytes_per_s, (total_bytes - first_bytes) / (total_s - first_s))
        sent_s = first_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        self._round_trip_s = _mean(self._round_trip_s, max(0.0, first_s - sent_s))

    @property
    def object_bytes(self) -> int:
        """Bytes that the link could have carried in one round trip; 0 while the bandwidth is not known."""
        if self._bytes_per_s is None or self._round_trip_s is None:
            return 0
        return min(MAX_OBJECT_BYTES, round(self._bytes_per_s * self._round_trip_s))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
