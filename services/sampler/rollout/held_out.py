"""Requests of held-out prompts in the engine, and whether it keeps its version for them. Owned by the event loop.

Guarantees: while the version is kept the engine is given no other one; a completion goes to who asked for it, once.
"""

from __future__ import annotations

from collections.abc import Callable

from heterorl.common.generation.engine import Finished, Lost

OnEnd = Callable[[Finished | None], None]
"""Called with each completion that ends; once with None where the rest is lost."""


class HeldOut:
    """What evaluations have in the engine, beside rollouts."""

    def __init__(self) -> None:
        self.num_running = 0
        """Completions under way."""
        self.keeps_version = False
        """Whether newer weights wait."""
        self.is_expected = False
        """Whether a drained run is to go on until the evaluations have ended."""
        self._waiting: dict[int, tuple[int, OnEnd]] = {}

    def begin(self, key: int, count: int, on_end: OnEnd) -> None:
        """Count a request that the engine is about to be given."""
        self._waiting[key] = (count, on_end)
        self.num_running += count

    def drop(self, key: int) -> None:
        """Forget a request that the engine did not take."""
        count, _ = self._waiting.pop(key, (0, None))
        self.num_running -= count

    def take(self, one: Finished | Lost) -> bool:
        """Hand over what ended; whether it is of a held-out prompt."""
        if one.key not in self._waiting:
            return False
        left, on_end = self._waiting.pop(one.key)
        if isinstance(one, Lost):
            self.num_running -= left
            on_end(None)
            return True
        self.num_running -= 1
        if left > 1:
            self._waiting[one.key] = (left - 1, on_end)
        on_end(one)
        return True

    def lose_all(self) -> None:
        """Say of everything under way that it is lost."""
        waiting, self._waiting, self.num_running = self._waiting, {}, 0
        for _, on_end in waiting.values():
            on_end(None)
