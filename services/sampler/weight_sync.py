"""Keeping the sampler's weights where the delay model says: watch, pull and verify while generation goes on.

    watch   waits for news of the head; unblocked by the coordinator, or by a broken link (then it dials again)
    sync    waits for a target newer than what is staged; unblocked by watch or by time
    take    (generation) never waits: it gets the staged version, if there is another one

Guarantees: what `take` returns is verified and recorded; nothing half applied is ever visible; exactly the target is
staged, or the next version of the lineage where the target was abandoned, and never one older than any used before; a
version that no trusted key signed, or that does not descend from the one used last, is refused before a byte of it is
fetched; whatever fails on the way, generation goes on with the version it has. Only a run that contradicts the record
(RunReplaced) ends the process. Must never touch the engine.
"""

from __future__ import annotations

import asyncio
import logging
import random

from heterorl.common.api import SamplerApi
from heterorl.common.errors import CorruptData, DiskFull, RemoteError, UnknownVersion, Unreachable, UntrustedVersion
from heterorl.common.identity.signing import Trust
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.pull.puller import PulledVersion, Puller
from heterorl.common.types.policy import NO_VERSION, PullPlan
from heterorl.common.wire.policy import manifest_from_bytes
from heterorl.sampler.delay import Visibility
from heterorl.sampler.trust_record import SeenVersion, TrustRecord, check_descent, check_head

_LOG = logging.getLogger(__name__)

DAMAGED_CAP_S = 300.0
"""A version that fails its checks costs a whole snapshot per attempt: attempts become this rare."""
MAX_SKIPPED = 256
"""Versions that are found missing in one attempt; the next attempt goes on behind them."""
MAX_PUBLISHED = 4096
"""Versions whose publication is remembered, for their age; far more than staleness may be."""


class WeightSync:
    """Two loops around one puller; see the module docstring. `backoff` is for pulls."""

    def __init__(
        self,
        *,
        api: SamplerApi,
        puller: Puller,
        visibility: Visibility,
        record: TrustRecord,
        trust: Trust,
        clock: Clock,
        bell: Bell,
        rng: random.Random,
        backoff: Backoff,
    ) -> None:
        self._api = api
        self.puller = puller
        self._visibility = visibility
        self._record = record
        self._trust = trust
        self._clock = clock
        self._bell = bell
        self._staged: PulledVersion | None = None
        self._signed_by = ""
        self._refusal = ""
        self._skipped_to = 0
        self.problem = ""
        """Why the newest version cannot be stored; empty while all is well."""
        self._watch_backoff = Backoff(clock=clock, rng=rng)
        self._sync_backoff = backoff
        self._damage_backoff = Backoff(clock=clock, rng=rng, cap_s=DAMAGED_CAP_S)
        self.head_version = NO_VERSION
        self._published: dict[int, float] = {}

    def take(self, current: int) -> PulledVersion | None:
        """The staged version, when it is another than `current`."""
        staged = self._staged
        return staged if staged is not None and staged.version != current else None

    def age_s(self, version: int) -> float | None:
        """Seconds since a version was published; None for one whose news was never heard."""
        published = self._published.get(version)
        return None if published is None else max(0.0, self._clock.monotonic() - published)

    async def watch(self) -> None:
        """Follow the head for ever.

        Raises:
            RunReplaced: the head went back.
        """
        while True:
            try:
                await self._follow()
                delay_s = self._watch_backoff.delay_s()
            except (RemoteError, CorruptData) as error:
                # The link says when nobody answers, and when somebody does again.
                level = logging.DEBUG if isinstance(error, Unreachable) else logging.INFO
                _LOG.log(level, "the watch on the head broke: %s", error)
                retry_after_s = error.retry_after_s if isinstance(error, RemoteError) else 0.0
                delay_s = self._watch_backoff.delay_s(asked_s=retry_after_s)
            await self._clock.sleep(delay_s)

    async def _follow(self) -> None:
        seen_version = max(self.head_version, self._record.highest_version)
        # From nothing, not from what was seen: a coordinator whose head went back would never pass that cursor.
        async for update in self._api.watch_head(after_version=NO_VERSION):
            check_head(update.version, seen_version=seen_version)
            seen_version = update.version
            self._watch_backoff.reset()
            self.head_version = update.version
            published = self._clock.monotonic() - update.age_s
            self._visibility.see(update.version, published)
            self._published[update.version] = published
            if len(self._published) > MAX_PUBLISHED:
                del self._published[next(iter(self._published))]
            self._bell.ring()

    async def sync(self) -> None:
        """Stage the target version for ever.

        Raises:
            RunReplaced: a version has another state than before, or is of another history.
        """
        while True:
            ticket = self._bell.ticket()
            current = NO_VERSION if self._staged is None else self._staged.version
            now = self._clock.monotonic()
            target, wake = self._visibility.target(now, current=current)
            if target <= current:
                await ring_or_time(ticket, clock=self._clock, seconds=None if wake is None else wake - now)
                continue
            delay_s = await self._stage(target)
            if delay_s:
                await self._clock.sleep(delay_s)

    async def _stage(self, target: int) -> float:
        """Stage `target`; returns how long to wait before the next attempt, 0 after success."""
        try:
            pulled = await self._pull(target)
            await asyncio.to_thread(self._record.note, self._seen(pulled))
        except RemoteError as error:
            _LOG.log(
                logging.DEBUG if isinstance(error, Unreachable) else logging.INFO, "version %d waits: %s", target, error
            )
            return self._sync_backoff.delay_s(asked_s=error.retry_after_s)
        except UntrustedVersion as error:
            # Costs no payload, so it is asked for as often as over a broken link; said once.
            if str(error) != self._refusal:
                self._refusal = str(error)
                _LOG.error("version %d is refused: %s", target, error)
            return self._sync_backoff.delay_s()
        except (DiskFull, OSError) as error:
            # Nothing is wrong with the version: it is asked for as often as over a broken link, and said once.
            if not self.problem:
                _LOG.error("VERSION %d CANNOT BE STORED, generation goes on with the one before: %s", target, error)
            self.problem = str(error)
            return self._sync_backoff.delay_s()
        except CorruptData as error:
            _LOG.error("version %d is not usable: %s", target, error)
            return self._damage_backoff.delay_s()
        if self.problem:
            _LOG.info("the disk has room again: version %d is here", target)
        self._sync_backoff.reset()
        self._damage_backoff.reset()
        self._staged = pulled
        self._refusal = self.problem = ""
        self._bell.ring()
        return 0.0

    async def _pull(self, target: int) -> PulledVersion:
        """The target, or the first version after it that is still in the lineage.

        Waiting for an abandoned version would never end: a sampler held back behind it gets no work, and without
        work there are no new versions that would move the target on. Never less than was used before: after a
        restart the delay model may ask for it, but it let the newer version through once.
        """
        if self._skipped_to > self.head_version:
            self._skipped_to = 0
        target = max(target, self._record.highest_version, self._skipped_to)
        for version in range(target, self.head_version):
            try:
                pulled = await self.puller.pull(held=self._staged, want_version=version, admit=self._admit)
            except UnknownVersion as error:
                _LOG.debug("version %d is skipped: %s", version, error)
                if version - target + 1 >= MAX_SKIPPED:
                    # The head is a peer's word: however far it is, between so many questions there is a wait.
                    self._skipped_to = version + 1
                    raise
                continue
            self._skipped_to = 0
            if version > target:
                _LOG.info("versions %d to %d are skipped", target, version - 1)
            return pulled
        want = max(target, self.head_version)
        pulled = await self.puller.pull(held=self._staged, want_version=want, admit=self._admit)
        self._skipped_to = 0
        return pulled

    async def _admit(self, plan: PullPlan) -> None:
        """Judge the version that a plan leads to by its manifest, whatever payloads lead there.

        Raises:
            UntrustedVersion: no trusted key signed it, or nothing shows that it descends from the one used last.
            RunReplaced: it is of another history than the one used last.
        """
        target = plan.manifests[-1]
        self._signed_by = self._trust.check(target, plan.signature, version=plan.target_version)
        abandoned = await check_descent(
            target,
            newest=self._record.newest,
            known={manifest_from_bytes(data).version: data for data in plan.manifests},
            fetch=self.puller.chain.list,
        )
        if abandoned:
            _LOG.warning(
                "the learner abandoned versions %d to %d, going on with version %d",
                abandoned[0],
                abandoned[-1],
                plan.target_version,
            )

    def _seen(self, pulled: PulledVersion) -> SeenVersion:
        return SeenVersion(
            version=pulled.version,
            state_root=pulled.manifest.state_root,
            manifest_digest=pulled.manifest_digest,
            run_id=pulled.manifest.run_id,
            signed_by=self._signed_by,
        )
