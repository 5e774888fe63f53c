"""The weights that an engine generates with: which are due, loaded, compared, or not to be trusted.

Guarantees: without a verified version nothing is generated, nor with an engine that failed: it is given the version
again, ever more rarely, until a swap succeeds; a state root is known from before its version's first token until no
group under way may name it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.filesize import decimal

from heterorl.common.api import SamplerApi
from heterorl.common.errors import EngineError, RemoteError, StaleWeights
from heterorl.common.generation.inference_engine import Engine, ScoredText
from heterorl.common.process import metrics
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock
from heterorl.common.pull.puller import PulledVersion
from heterorl.common.types.common import Digest, peer_words
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.types.run import RELEASE, CanaryReport
from heterorl.sampler.site_session import NO_ROOT, Reported, Session
from heterorl.sampler.weight_sync import WeightSync

_LOG = logging.getLogger(__name__)
ENGINE_CAP_S = 300.0
"""A new engine process loads the whole model: attempts become this rare."""


class WeightSwap:
    """One engine's weights; one swap at a time."""

    def __init__(
        self,
        *,
        api: SamplerApi,
        engine: Engine,
        canary: Sequence[ScoredText],
        policy: WeightSync,
        session: Session,
        clock: Clock,
        rng: random.Random,
        on_quarantine: Callable[[], None],
    ) -> None:
        self.reported = Reported()
        """What a heartbeat says of the weights; its `policy_version` is the one to generate with, NO_VERSION: none."""
        self.state_roots: dict[int, Digest] = {}
        """Of every version that a token of a group under way may be of."""
        self.running = asyncio.Lock()
        """Held while the engine is given weights."""
        self._api = api
        self._engine = engine
        self._canary = canary
        self._policy = policy
        self._session = session
        self._clock = clock
        self._on_quarantine = on_quarantine
        self._backoff = Backoff(clock=clock, rng=rng, cap_s=ENGINE_CAP_S)
        self._next_at = clock.monotonic()
        # Of one engine of several that is out; the others take new versions meanwhile.
        self._mending = Backoff(clock=clock, rng=rng, cap_s=ENGINE_CAP_S)
        self._mend_at = self._next_at

    @property
    def version(self) -> int:
        """The version to generate with; NO_VERSION while there is none that can be trusted."""
        return self.reported.policy_version

    def due(self) -> PulledVersion | None:
        """The version that the engine, or one of several, should have and has not, when it may be given it now."""
        now = self._clock.monotonic()
        newer = self._policy.take(self.version) if now >= self._next_at else None
        if newer is None and self._is_partly_out and now >= self._mend_at:
            return self._policy.take(NO_VERSION)
        return newer

    @property
    def _is_partly_out(self) -> bool:
        return self.version >= 0 and not self._engine.is_whole

    @property
    def wait_s(self) -> float | None:
        """Seconds until a version that waits for another attempt is due; None where none waits."""
        times = [self._next_at] if self._policy.take(self.version) is not None else []
        if self._is_partly_out:
            times.append(self._mend_at)
        return min(times) - self._clock.monotonic() if times else None

    async def take(self, pulled: PulledVersion) -> None:
        """Give the engine a version, and let the coordinator compare what it computes with it."""
        async with self.running:
            is_loaded = await self._load(pulled)
        if is_loaded:
            await self._compare(pulled.version)

    def note_failure(self, error: EngineError) -> None:
        """Trust the engine no longer, until it has loaded a version."""
        metrics.ENGINE_FAILURES.labels("stale" if isinstance(error, StaleWeights) else "died").inc()
        self.reported = replace(self.reported, policy_version=NO_VERSION, state_root=NO_ROOT)
        self._next_at = self._clock.monotonic() + self._backoff.delay_s()
        _LOG.error("nothing is generated until the engine has loaded a version: %s", error)

    def forget_roots(self, oldest: int | None) -> None:
        """Keep the state roots from a version on; None keeps that of the version in use alone."""
        lowest = self.version if oldest is None else oldest
        if self.version >= 0 and not self.running.locked():
            self.state_roots = {version: root for version, root in self.state_roots.items() if version >= lowest}

    def note_age(self, stage: str, version: int) -> None:
        """Observe how long ago a version was published."""
        age_s = self._policy.age_s(version)
        if age_s is not None:
            metrics.SAMPLER_POLICY_AGE_SECONDS.labels(stage).observe(age_s)

    async def _load(self, pulled: PulledVersion) -> bool:
        started, is_mend = self._clock.monotonic(), pulled.version == self.version
        # Before the engine has it: what is under way may end with it at once.
        self.state_roots[pulled.version] = pulled.manifest.state_root
        try:
            await asyncio.to_thread(self._engine.load, pulled.arena, pulled.version)
        except EngineError as error:
            self.note_failure(error)
            return False
        except OSError as error:
            # An engine in processes of its own takes weights from files.
            self.note_failure(
                EngineError(
                    f"the weights of version {pulled.version} cannot be written: {error}",
                    action="free space under state_dir or engine.weights_dir",
                )
            )
            return False
        swap_s, puller = self._clock.monotonic() - started, self._policy.puller
        _LOG.info(
            "version %d is used: %s in %.1f s, applied in %.1f s, swapped in %.1f s",
            pulled.version, decimal(puller.fetched_bytes), puller.fetch_s, puller.apply_s, swap_s,
        )  # fmt: skip
        self._backoff.reset()
        if self._engine.is_whole:
            self._mending.reset()
        elif is_mend:
            self._mend_at = self._clock.monotonic() + self._mending.delay_s()
        metrics.SWAP_SECONDS.observe(swap_s)
        metrics.POLICY_VERSION.set(pulled.version)
        self.note_age("apply", pulled.version)
        self.reported = replace(
            self.reported,
            policy_version=pulled.version,
            state_root=pulled.manifest.state_root,
            apply_s=puller.apply_s,
        )
        return True

    async def _compare(self, version: int) -> None:
        """Let the coordinator compare the engine with the learner."""
        if not self._canary:
            return
        try:
            scores = await asyncio.to_thread(self._engine.score, self._canary)
        except EngineError as error:
            self.note_failure(error)
            return
        if not scores:
            return
        report = CanaryReport(
            site=self._session.registration.site,
            incarnation=self._session.registration.incarnation,
            version=version,
            logprobs=tuple(float(value) for score in scores for value in score),
        )
        try:
            verdict = await self._api.report_canary(report)
        except RemoteError as error:
            # Most reasons for this refuse a lease too; what is leased already is judged when it is pushed.
            _LOG.info("no canary of version %d: %s", version, error)
            return
        if verdict.quarantine:
            self._on_quarantine()
            _LOG.error(
                "this site is in quarantine and gets no work: %s; a version that it scores right ends that, or an"
                " operator: %s",
                peer_words(verdict.quarantine),
                RELEASE,
            )
