"""Requests in the engine that are no rollouts, and the version that it keeps for them. Owned by the event loop.

    pin    waits for a swap that is under way; unblocked by it
    bring  waits until no rollout is under way, then for the swap; unblocked by the engine

Guarantees: while a version is pinned the engine is given no other one; while guests are alone no rollout begins, so
that what a rollout names as its oldest version is never older than what the site had before.
"""

from __future__ import annotations

from collections.abc import Callable

from heterorl.common.generation.engine import Finished, Lost
from heterorl.common.process.clock import Bell
from heterorl.common.pull.pull import PulledVersion
from heterorl.common.types.policy import NO_VERSION
from heterorl.sampler.rollout.swap import Swap

OnEnd = Callable[[Finished | None], None]
"""Called with each completion that ends; once with None where the rest is lost."""


class Guests:
    """What others than rollouts have in the engine."""

    def __init__(self, *, num_rollouts: Callable[[], int], news: Bell) -> None:
        """Join it.

        Args:
            num_rollouts: completions of rollouts that are under way.
            news: rings when anything happened in the engine.
        """
        self.num_running = 0
        """Completions under way."""
        self.pinned = NO_VERSION
        """Version that the engine keeps; NO_VERSION: it may be given any."""
        self.are_alone = False
        """Whether no rollout may begin."""
        self.are_expected = False
        """Whether a drained run is to go on until they have left."""
        self.is_swapping = False
        """Whether the engine is being given weights."""
        self._num_rollouts = num_rollouts
        self._news = news
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
        """Hand over what ended; whether it was a guest's."""
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

    async def pin(self, swap: Swap, version: int) -> bool:
        """Keep a version in the engine, whose weights `swap` swaps; False where it has another one."""
        while self.is_swapping:
            await self._news.ticket().wait()
        if swap.version != version or version < 0:
            return False
        self.pinned = version
        return True

    async def bring(self, swap: Swap, pulled: PulledVersion) -> bool:
        """Give the engine another version and keep it there, alone; False where it does not take it."""
        self.are_alone = True
        try:
            while self.is_swapping or self._num_rollouts():
                await self._news.ticket().wait()
            self.is_swapping = True
            try:
                await swap.take(pulled)
            finally:
                self.is_swapping = False
        except BaseException:
            self.leave()
            raise
        if swap.version != pulled.version:
            self.leave()
            return False
        self.pinned = pulled.version
        return True

    def leave(self) -> None:
        """Let rollouts begin and weights be swapped again."""
        self.pinned, self.are_alone = NO_VERSION, False
        self._news.ring()
