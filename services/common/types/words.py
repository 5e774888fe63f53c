"""Another machine's words, fit to be logged: one line, printable, not many."""

from __future__ import annotations

import math

MOST = 300
MAX_ASKED_S = 600.0
"""The longest wait that a peer may ask for at once; it can ask again."""


def peer_words(text: str, *, most: int = MOST) -> str:
    """What a peer wrote without what would begin a line of its own, move a cursor or fill a disk."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * most])
    return line if len(line) <= most else f"{line[:most]} ..."


def peer_seconds(seconds: float) -> float:
    """A wait that a peer asks for: what is no number counts as none, and none is without end."""
    return min(max(0.0, seconds), MAX_ASKED_S) if math.isfinite(seconds) else 0.0
