"""The run's head at a site: one watch of the coordinator, told to all who watch here."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable

from heterorl.common.api import WeightsApi
from heterorl.common.errors import Draining, HeterorlError
from heterorl.common.process.clock import Bell, Clock
from heterorl.common.process.patience import Patience
from heterorl.common.types.policy import NO_VERSION, HeadUpdate

_LOG = logging.getLogger(__name__)


class Head:
    """The newest version that the coordinator told; while its line is broken, the last one.

    `on_change` hears whether the run went back, as a coordinator does that was restored from a backup.
    """

    def __init__(self, *, api: WeightsApi, clock: Clock, on_change: Callable[[bool], None]) -> None:
        self._api = api
        self._clock = clock
        self._on_change = on_change
        self._bell = Bell()
        self._update: HeadUpdate | None = None
        self._told_at = 0.0
        self._is_closing = False

    @property
    def version(self) -> int:
        """Number of the newest version; -1 where none is known."""
        return NO_VERSION if self._update is None else self._update.version

    async def run(self) -> None:
        """Watch the coordinator for ever."""
        patience = Patience(clock=self._clock, rng=random.Random())
        while True:
            try:
                # From the beginning each time: a head that went back is seen only so.
                async for update in self._api.watch_head(after_version=NO_VERSION):
                    patience.reset()
                    self._note(update)
                error = HeterorlError("the coordinator ended the watch")
            except HeterorlError as caught:
                error = caught
            wait_s = patience.delay_s(asked_s=getattr(error, "retry_after_s", 0.0))
            _LOG.debug("watching the head again in %.1f s: %s", wait_s, error)
            await self._clock.sleep(wait_s)

    def _note(self, update: HeadUpdate) -> None:
        went_back = update.version < self.version
        is_new = update.version != self.version
        if went_back:
            _LOG.warning("the run went back from version %d to %d: nothing is kept of it", self.version, update.version)
        self._update, self._told_at = update, self._clock.monotonic()
        if is_new:
            self._on_change(went_back)
            self._bell.ring()

    async def watch(self, *, after_version: int) -> AsyncIterator[HeadUpdate]:
        """Yield every head that passes the cursor, until the relay stops."""
        while not self._is_closing:
            ticket, update = self._bell.ticket(), self._update
            if update is not None and update.version > after_version:
                after_version = update.version
                yield HeadUpdate(version=update.version, age_s=update.age_s + self._clock.monotonic() - self._told_at)
            else:
                await ticket.wait()
        raise Draining("the relay is stopping", retry_after_s=1.0)

    def close(self) -> None:
        """End the streams of those who watch."""
        self._is_closing = True
        self._bell.ring()
