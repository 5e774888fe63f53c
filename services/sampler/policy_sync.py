"""Keeping the sampler's weights where the delay model says: watch, pull and verify while generation goes on.

    watch   waits for news of the head; unblocked by the coordinator, or by a broken link (then it dials again)
    sync    waits for a target other than what is staged; unblocked by watch or by time
    take    (generation) never waits: it gets the staged version, if there is a newer one

Guarantees: what `take` returns is verified and remembered; nothing half applied is ever visible; a version that no
trusted key signed, or that leads back behind what was used, is refused before a byte of it is fetched. Must never touch
the engine.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from services.common.api import CoordinatorApi, PullPlan
from services.common.bell import Bell
from services.common.clock import Clock
from services.common.errors import (
    CorruptData,
    Draining,
    HeterorlError,
    RollbackRefused,
    StateMismatch,
    UnknownVersion,
    Unreachable,
    UntrustedVersion,
)
from services.common.pull import PulledVersion, Puller
from services.common.trust import Trust
from services.common.wire import manifest_from_bytes
from services.sampler.delay import Visibility
from services.sampler.descent import check_descent
from services.sampler.memory import Memory, Used

_LOG = logging.getLogger(__name__)
RETRY_S = 1.0


class PolicySync:
    """Two loops around one puller; see the module docstring."""

    def __init__(
        self,
        *,
        api: CoordinatorApi,
        puller: Puller,
        visibility: Visibility,
        record: Path,
        clock: Clock,
        bell: Bell,
        trust: Trust | None = None,
    ) -> None:
        self._api = api
        self._puller = puller
        self._visibility = visibility
        self._memory = Memory(record)
        self._trust = trust or Trust()
        self._clock = clock
        self._bell = bell
        self._staged: PulledVersion | None = None
        self._refusal = ""
        self._is_newest_gone = False
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
                await self._stage(self._not_before(target))
                continue
            timeout = None if wake is None else max(0.0, wake - self._clock.monotonic())
            waiter = asyncio.ensure_future(ticket.wait())
            timer = None if timeout is None else asyncio.ensure_future(self._clock.sleep(timeout))
            await asyncio.wait([task for task in (waiter, timer) if task], return_when=asyncio.FIRST_COMPLETED)
            for task in (waiter, timer):
                if task is not None:
                    task.cancel()

    def _not_before(self, target: int) -> int:
        """What to ask for after a restart: never less than was used before.

        A delay model that let that version through once lets it through, and a coordinator that shows an old head is
        asked for what it should have.
        """
        newest = self._memory.newest
        if self._staged is not None or newest is None or target >= newest.version:
            return target
        # The version used last may have been abandoned since; the head then says so in its manifests.
        return max(self.head_version, newest.version) if self._is_newest_gone else newest.version

    async def _stage(self, version: int) -> None:
        try:
            pulled = await self._puller.pull(held=self._staged, want_version=version, admit=self._admit)
            self._check_known(pulled)
        except UnknownVersion as error:
            self._miss(version, error)
            await self._clock.sleep(RETRY_S)
            return
        except (Unreachable, Draining) as error:
            _LOG.info("version %d waits: %s", version, error)
            await self._clock.sleep(RETRY_S)
            return
        except (CorruptData, UntrustedVersion) as error:
            self._refuse(version, error)
            await self._clock.sleep(RETRY_S)
            return
        await asyncio.to_thread(
            self._memory.note,
            Used(
                version=pulled.version,
                state_root=pulled.manifest.state_root,
                manifest_digest=pulled.manifest_digest,
                run_id=pulled.manifest.run_id,
            ),
        )
        self._staged = pulled
        self._refusal = ""
        self._bell.ring()

    def _miss(self, version: int, error: UnknownVersion) -> None:
        newest = self._memory.newest
        if newest is None or version != newest.version or self._staged is not None:
            _LOG.info("version %d waits: %s", version, error)
        elif self.head_version < version:
            self._refuse(
                version,
                RollbackRefused(
                    f"the coordinator's head is version {self.head_version}, version {version} was used before"
                ),
            )
        else:
            self._is_newest_gone = True

    def _refuse(self, version: int, error: HeterorlError) -> None:
        # Tried again every second, for it may be the link's fault; said once.
        if str(error) != self._refusal:
            self._refusal = str(error)
            _LOG.error("version %d is not usable: %s", version, error)

    async def _admit(self, plan: PullPlan) -> None:
        if not plan.manifests:
            raise StateMismatch(f"the plan of version {plan.target_version} shows no manifest")
        target = plan.manifests[-1]
        self._trust.check(target, plan.signature, version=plan.target_version)
        abandoned = await check_descent(
            target,
            newest=self._memory.newest,
            known={manifest_from_bytes(data).version: data for data in plan.manifests},
            fetch=lambda version: self._api.get_manifest(version=version),
        )
        if abandoned:
            _LOG.warning(
                "the learner abandoned versions %d to %d, going on with version %d",
                abandoned[0],
                abandoned[-1],
                plan.target_version,
            )

    def _check_known(self, pulled: PulledVersion) -> None:
        known = self._memory.find(pulled.version)
        if known is not None and known.state_root != pulled.manifest.state_root:
            raise StateMismatch(f"version {pulled.version} had another state before", action="ask the operator")
