"""Keeping the sampler's weights where the delay model says: watch, pull and verify while generation goes on.

    watch   waits for news of the head; unblocked by the coordinator, or by a broken link (then it dials again)
    sync    waits for a target other than what is staged; unblocked by watch or by time
    take    (generation) never waits: it gets the staged version, if there is a newer one

Guarantees: what `take` returns is verified; nothing half applied is ever visible; a version seen before with another
state is refused. Must never touch the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from services.common.api import CoordinatorApi
from services.common.bell import Bell
from services.common.clock import Clock
from services.common.errors import CorruptData, Draining, StateMismatch, UnknownVersion, Unreachable
from services.common.pull import PulledVersion, Puller
from services.sampler.delay import Visibility

_LOG = logging.getLogger(__name__)
RETRY_S = 1.0


class PolicySync:
    """Two loops around one puller; see the module docstring."""

    def __init__(
        self, *, api: CoordinatorApi, puller: Puller, visibility: Visibility, record: Path, clock: Clock, bell: Bell
    ) -> None:
        self._api = api
        self._puller = puller
        self._visibility = visibility
        self._record = record
        self._clock = clock
        self._bell = bell
        self._staged: PulledVersion | None = None
        self._roots = _read_roots(record)
        self.head_version = -1

    def take(self, current: int) -> PulledVersion | None:
        """The staged version, when it is another than `current`."""
        staged = self._staged
        return staged if staged is not None and staged.version != current else None

    async def watch(self) -> None:
        """Follow the head for ever."""
        while True:
            try:
                async for update in self._api.watch_head(after_version=self.head_version):
                    self.head_version = update.version
                    self._visibility.see(update.version, self._clock.monotonic() - update.age_s)
                    self._bell.ring()
            except (Unreachable, Draining) as error:
                _LOG.info("the watch on the head broke: %s", error)
            await self._clock.sleep(RETRY_S)

    async def sync(self) -> None:
        """Stage the target version for ever."""
        while True:
            ticket = self._bell.ticket()
            current = -1 if self._staged is None else self._staged.version
            target, wake = self._visibility.target(self._clock.monotonic(), current=current)
            if target > current:
                await self._stage(target)
                continue
            timeout = None if wake is None else max(0.0, wake - self._clock.monotonic())
            waiter = asyncio.ensure_future(ticket.wait())
            timer = None if timeout is None else asyncio.ensure_future(self._clock.sleep(timeout))
            await asyncio.wait([task for task in (waiter, timer) if task], return_when=asyncio.FIRST_COMPLETED)
            for task in (waiter, timer):
                if task is not None:
                    task.cancel()

    async def _stage(self, version: int) -> None:
        try:
            pulled = await self._puller.pull(held=self._staged, want_version=version)
            self._check_known(pulled)
        except (Unreachable, Draining, UnknownVersion) as error:
            _LOG.info("version %d waits: %s", version, error)
            await self._clock.sleep(RETRY_S)
            return
        except CorruptData as error:
            _LOG.error("version %d is not usable: %s", version, error)
            await self._clock.sleep(RETRY_S)
            return
        self._staged = pulled
        self._roots[pulled.version] = pulled.manifest.state_root
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"version": pulled.version, "state_root": pulled.manifest.state_root}) + "\n")
        self._bell.ring()

    def _check_known(self, pulled: PulledVersion) -> None:
        known = self._roots.get(pulled.version)
        if known is not None and known != pulled.manifest.state_root:
            raise StateMismatch(f"version {pulled.version} had another state before", action="ask the operator")


def _read_roots(record: Path) -> dict[int, str]:
    if not record.exists():
        return {}
    roots = {}
    for line in record.read_text(encoding="utf-8").splitlines():
        # A line cut short by a crash is the last one; its version is pulled and written again.
        if line.endswith("}"):
            entry = json.loads(line)
            roots[int(entry["version"])] = str(entry["state_root"])
    return roots
