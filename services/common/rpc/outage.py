"""Saying that the other end does not answer: within seconds, then ever more rarely, and once when it does again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from heterorl.common.process.clock import Clock
from heterorl.common.types.words import peer_words

_LOG = logging.getLogger(__name__)
SAY_AFTER_S = 2.0
"""A link that heals sooner is not worth a line."""
SILENT_S = 4.0
"""A call that nobody answered for so long counts as failing, where no other was answered meanwhile."""
FIRST_EVERY_S = 10.0
LAST_EVERY_S = 600.0


class Outage:
    """One link's times without an answer; all calls over it tell what they saw."""

    def __init__(self, address: str, *, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._since: float | None = None
        self._answered_at = clock.monotonic()
        self._say_at = 0.0
        self._every_s = FIRST_EVERY_S
        self._is_said = False

    def failed(self, problem: str) -> None:
        """A call was not answered."""
        self._note(problem, since=self._clock.monotonic())

    def answered(self) -> None:
        """A call was answered, be it by a refusal."""
        now = self._clock.monotonic()
        if self._is_said and self._since is not None:
            _LOG.info("the coordinator at %s answers again, after %.0f s", self._address, now - self._since)
        self._since, self._is_said, self._every_s = None, False, FIRST_EVERY_S
        self._answered_at = now

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Look at a call: one that hangs is told while it hangs."""
        timer = asyncio.get_running_loop().call_later(SILENT_S, self._hung, name)
        try:
            yield
        finally:
            timer.cancel()

    def _hung(self, name: str) -> None:
        now = self._clock.monotonic()
        if now - self._answered_at >= SILENT_S:
            self._note(f"{name} has no answer for {SILENT_S:g} s", since=now - SILENT_S)

    def _note(self, problem: str, *, since: float) -> None:
        now = self._clock.monotonic()
        if self._since is None:
            self._since, self._say_at = since, since + SAY_AFTER_S
        if now < self._say_at:
            return
        _LOG.warning(
            "the coordinator at %s has not answered for %.0f s, going on: %s",
            self._address, now - self._since, peer_words(problem),
        )  # fmt: skip
        self._is_said = True
        self._say_at = now + self._every_s
        self._every_s = min(LAST_EVERY_S, 2 * self._every_s)
