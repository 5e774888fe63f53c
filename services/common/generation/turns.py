"""Turns between a loop that computes and a thread that changes what it computes with; and what came of them.

Guarantees: between two turns of a loop, whoever asked meanwhile is served first; a plain lock would go back to the
loop, which takes it again at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from heterorl.common.types.rollout import Span


class Turns:
    """A lock for two threads that alternate.

    Example: `with turns.taken(): output = model(ids)` in the loop, `with turns.taken(): load(weights)` beside it.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._turn = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn and hold it."""
        with self._next:
            self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()


def spans_of(versions: Sequence[int]) -> tuple[Span, ...]:
    """Runs of equal versions, one version for each token."""
    starts = [place for place, version in enumerate(versions) if place == 0 or version != versions[place - 1]]
    return tuple(
        Span(version=int(versions[start]), start=start, end=end)
        for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
    )
