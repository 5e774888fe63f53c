"""Weight sync: watches the head, pulls and verifies versions during generation.

`take` returns only a version that is verified and recorded. The sync stages the target of the delay model. If the
learner abandoned the target, the sync stages the next version of the lineage. A download that broke is finished first,
though a newer version is the target by now. The sync never stages an older version than the newest one used. It refuses
a version without a trusted signature or the right ancestry before it fetches a byte. After any other failure generation
continues with the version it has. Only a run that contradicts the record (RunReplaced) ends the process.
This module must never touch the engine.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

from heterorl.common.api import SamplerApi
from heterorl.common.errors import Busy, CorruptData, DiskFull, RemoteError, UnknownVersion, UntrustedVersion
from heterorl.common.identity.signing import Trust
from heterorl.common.process.backoff import Backoff, log_level
from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.pull.puller import PulledVersion, Puller
from heterorl.common.types.policy import NO_VERSION, PullPlan
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.sampler.delay import Visibility
from heterorl.sampler.trust_record import SeenVersion, TrustRecord, check_descent, check_head

_LOG = logging.getLogger(__name__)

DAMAGED_CAP_S = 300.0
"""Longest backoff after a version that fails its checks: each attempt costs a whole snapshot."""
MAX_SKIPPED = 256
"""Missing versions that one attempt skips; the next attempt continues behind them."""
MAX_PUBLISHED = 4096
"""Versions whose publication time is kept, for their age; far more than the staleness bound."""


@dataclass(kw_only=True, eq=False, repr=False)
class WeightSync:
    """Two loops around one puller; `backoff` is for pulls.

    `run` is the run of this site's certificate, empty without one.
    """

    api: SamplerApi
    puller: Puller
    visibility: Visibility
    record: TrustRecord
    trust: Trust
    clock: Clock
    bell: Bell
    rng: random.Random
    backoff: Backoff
    run: str = ""

    def __post_init__(self) -> None:
        self._staged: PulledVersion | None = None
        self._signed_by = ""
        self._refusal = ""
        self._skipped_to = 0
        self.problem = ""
        """Why the newest version cannot be stored; empty if all is well."""
        self._watch_backoff = Backoff(clock=self.clock, rng=self.rng)
        self._damage_backoff = Backoff(clock=self.clock, rng=self.rng, cap_s=DAMAGED_CAP_S)
        self.head_version = NO_VERSION
        self._published: dict[int, float] = {}

    def take(self, current: int) -> PulledVersion | None:
        """The staged version if it is another one than `current`; never waits."""
        staged = self._staged
        return staged if staged is not None and staged.version != current else None

    def age_s(self, version: int) -> float | None:
        """Seconds since a version was published; None if that was not heard."""
        published = self._published.get(version)
        return None if published is None else max(0.0, self.clock.monotonic() - published)

    async def watch(self) -> None:
        """Follow the head forever. Raises RunReplaced: the head went back."""
        while True:
            try:
                await self._follow()
                delay_s = self._watch_backoff.delay_s()
            except (RemoteError, CorruptData) as error:
                _LOG.log(log_level(error), "the watch on the head broke: %s", error)
                retry_after_s = error.retry_after_s if isinstance(error, RemoteError) else 0.0
                delay_s = self._watch_backoff.delay_s(asked_s=retry_after_s)
            await self.clock.sleep(delay_s)

    async def _follow(self) -> None:
        seen_version = max(self.head_version, self.record.highest_version)
        # From NO_VERSION: a coordinator whose head went back would never pass a later cursor.
        async for update in self.api.watch_head(after_version=NO_VERSION):
            check_head(update.version, seen_version=seen_version)
            seen_version = update.version
            self._watch_backoff.reset()
            self.head_version = update.version
            published = self.clock.monotonic() - update.age_s
            self.visibility.see(update.version, published)
            self._published[update.version] = published
            if len(self._published) > MAX_PUBLISHED:
                del self._published[next(iter(self._published))]
            self.bell.ring()

    async def sync(self) -> None:
        """Stage the target version forever.

        Raises RunReplaced: a version has another state than before, or another history.
        """
        while True:
            ticket = self.bell.ticket()
            current = NO_VERSION if self._staged is None else self._staged.version
            now = self.clock.monotonic()
            target, wake = self.visibility.target(now, current=current)
            if target <= current:
                await ring_or_time(ticket, clock=self.clock, seconds=None if wake is None else wake - now)
                continue
            delay_s = await self._stage(target)
            if delay_s:
                await self.clock.sleep(delay_s)

    async def _stage(self, target: int) -> float:
        """Stage `target`; returns seconds until the next attempt, 0 after success."""
        try:
            pulled = await self._pull(target)
            await asyncio.to_thread(self.record.note, self._seen(pulled))
        except RemoteError as error:
            _LOG.log(log_level(error), "version %d waits: %s", target, error)
            return self.backoff.delay_s(asked_s=error.retry_after_s)
        except UntrustedVersion as error:
            # Costs no payload, so retried as often as a broken link; logged once.
            if str(error) != self._refusal:
                self._refusal = str(error)
                _LOG.error("version %d is refused and asked for again: %s", target, error)
            return self.backoff.delay_s()
        except (DiskFull, OSError) as error:
            # The version is sound, so retried as often as a broken link; logged once.
            if not self.problem:
                _LOG.error("VERSION %d CANNOT BE STORED, generation goes on with the one before: %s", target, error)
            self.problem = str(error)
            return self.backoff.delay_s()
        except CorruptData as error:
            _LOG.error("version %d is not usable and is pulled again: %s", target, error)
            return self._damage_backoff.delay_s()
        if self.problem:
            _LOG.info("the disk has room again: version %d is here", target)
        self.backoff.reset()
        self._damage_backoff.reset()
        self._staged = pulled
        self._refusal = self.problem = ""
        self.bell.ring()
        return 0.0

    async def _pull(self, target: int) -> PulledVersion:
        """The target, or the first later version still in the lineage.

        A wait for an abandoned version would never end: a sampler behind it gets no work, and without work no new
        version moves the target. Never below the newest version used: after a restart the delay model may ask for less.
        """
        if self._skipped_to > self.head_version:
            self._skipped_to = 0
        target = max(target, self.record.highest_version, self._skipped_to)
        resumed = await self._resume(before=target)
        if resumed is not None:
            return resumed
        for version in range(target, self.head_version):
            try:
                pulled = await self.puller.pull(held=self._staged, want_version=version, admit=self._admit)
            except UnknownVersion as error:
                _LOG.debug("version %d is skipped: %s", version, error)
                if version - target + 1 >= MAX_SKIPPED:
                    # The coordinator states the head: the sampler waits after MAX_SKIPPED questions, however far it is.
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

    async def _resume(self, *, before: int) -> PulledVersion | None:
        """Finish a download that broke, of a version older than `before`.

        None: there is none newer than the version in use, or it cannot be had any more.
        """
        begun = self.puller.begun()
        current = NO_VERSION if self._staged is None else self._staged.version
        if begun <= current or not self.record.highest_version <= begun < before:
            return None
        try:
            return await self.puller.pull(held=self._staged, want_version=begun, admit=self._admit)
        except (RemoteError, UntrustedVersion, CorruptData) as error:
            # Busy: the coordinator cannot read a file of this version, perhaps never again.
            if isinstance(error, RemoteError) and error.is_transient and not isinstance(error, Busy):
                raise
            _LOG.info("the broken download of version %d is given up: %s", begun, error)
            return None

    async def _admit(self, plan: PullPlan) -> None:
        """Check the target's signature and ancestry by its manifest, before any payload.

        Raises UntrustedVersion: no trusted key signed it, or it does not prove its descent from the version used last;
        RunReplaced: it is of another run, or has another history than the version used last.
        """
        target = plan.manifests[-1]
        self._signed_by = self.trust.check(target, plan.signature, version=plan.target_version)
        abandoned = await check_descent(
            target,
            used=self.record.versions,
            known={manifest_from_bytes(data).version: data for data in plan.manifests},
            fetch=self.puller.chain.list,
            run=self.run,
        )
        if abandoned:
            _LOG.warning(
                "the learner abandoned versions %d to %d, the sampler goes on with version %d",
                abandoned[0], abandoned[-1], plan.target_version,
            )  # fmt: skip

    def _seen(self, pulled: PulledVersion) -> SeenVersion:
        return SeenVersion(
            version=pulled.version,
            state_root=pulled.manifest.state_root,
            manifest_digest=pulled.manifest_digest,
            run_id=pulled.manifest.run_id,
            signed_by=self._signed_by,
        )
