"""Swaps of the engine's weights: due version, loading, canary.

Generation needs a verified version and stops at an engine failure; the engine then gets the version again with growing
backoff. A state root is known from before its version's first token until no group in flight may name it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.filesize import decimal

from heterorl.common.errors import EngineError, RemoteError, StaleWeights
from heterorl.common.generation.inference_engine import Engine, ScoredText
from heterorl.common.process import metrics
from heterorl.common.process.backoff import Backoff
from heterorl.common.pull.puller import PulledVersion
from heterorl.common.types.common import Digest, peer_words
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.types.run import RELEASE, CanaryReport, Heartbeat
from heterorl.sampler.site_session import Session
from heterorl.sampler.weight_sync import WeightSync

_LOG = logging.getLogger(__name__)
NO_ROOT = Digest("")
ENGINE_CAP_S = 300.0
"""Longest backoff: a new engine process loads the whole model."""


@dataclass(kw_only=True, eq=False, repr=False)
class WeightSwap:
    """The weights of one engine; one swap at a time."""

    engine: Engine
    canary: Sequence[ScoredText]
    policy: WeightSync
    session: Session

    def __post_init__(self) -> None:
        own = self.session.registration
        self.reported = Heartbeat(
            site=own.site, incarnation=own.incarnation, policy_version=NO_VERSION, state_root=NO_ROOT, tokens_per_s=0.0
        )
        """State of the weights in a heartbeat; `policy_version` NO_VERSION: the engine has none to trust."""
        self.state_roots: dict[int, Digest] = {}
        """State roots of the versions of tokens in flight."""
        self.running = asyncio.Lock()
        """Held during a load."""
        self.problem = ""
        """Why the engine has no version to trust."""
        self._clock = self.session.clock
        self._backoff = Backoff(clock=self._clock, rng=self.session.rng, cap_s=ENGINE_CAP_S)
        self._next_at = self._clock.monotonic()

    @property
    def version(self) -> int:
        """Version to generate with; NO_VERSION if there is none to trust."""
        return self.reported.policy_version

    def due(self) -> PulledVersion | None:
        return self.policy.take(self.version) if self._clock.monotonic() >= self._next_at else None

    @property
    def wait_s(self) -> float | None:
        return self._next_at - self._clock.monotonic() if self.policy.take(self.version) is not None else None

    async def take(self, pulled: PulledVersion) -> bool:
        """Load a version, then have the coordinator compare engine and learner.
        Returns whether the site is in quarantine."""
        async with self.running:
            if not await self._load(pulled):
                return False
        is_quarantined = await self._compare(pulled.version)
        # Not before: an engine that loads and then fails would load in a loop.
        if self.version == pulled.version:
            self._backoff.reset()
            self.problem = ""
        return is_quarantined

    def note_failure(self, error: EngineError) -> None:
        metrics.ENGINE_FAILURES.labels("stale" if isinstance(error, StaleWeights) else "died").inc()
        self.reported = replace(self.reported, policy_version=NO_VERSION, state_root=NO_ROOT)
        self._next_at = self._clock.monotonic() + self._backoff.delay_s()
        self.problem = str(error)
        _LOG.error("the engine generates nothing until it has loaded a version: %s", error)

    def forget_roots(self, oldest: int | None) -> None:
        """Keep state roots from `oldest` on; None: only the current version's."""
        lowest = self.version if oldest is None else oldest
        if self.version >= 0 and not self.running.locked():
            self.state_roots = {version: root for version, root in self.state_roots.items() if version >= lowest}

    def note_age(self, stage: str, version: int) -> None:
        age_s = self.policy.age_s(version)
        if age_s is not None:
            metrics.SAMPLER_POLICY_AGE_SECONDS.labels(stage).observe(age_s)

    async def _load(self, pulled: PulledVersion) -> bool:
        started = self._clock.monotonic()
        # Before the load: completions in flight may end with the new version at once.
        self.state_roots[pulled.version] = pulled.manifest.state_root
        try:
            await asyncio.to_thread(self.engine.load, pulled.arena, pulled.version)
        except EngineError as error:
            self.note_failure(error)
            return False
        except OSError as error:
            # An engine in its own process reads weights from files.
            problem = f"the weights of version {pulled.version} cannot be written: {error}"
            self.note_failure(EngineError(problem, action="free space under state_dir or engine.weights_dir"))
            return False
        swap_s, puller = self._clock.monotonic() - started, self.policy.puller
        _LOG.info(
            "version %d is used: %s in %.1f s, applied in %.1f s, swapped in %.1f s",
            pulled.version, decimal(puller.fetched_bytes), puller.fetch_s, puller.apply_s, swap_s,
        )  # fmt: skip
        metrics.SWAP_SECONDS.observe(swap_s)
        metrics.POLICY_VERSION.set(pulled.version)
        self.note_age("apply", pulled.version)
        self.reported = replace(
            self.reported, policy_version=pulled.version, state_root=pulled.manifest.state_root, apply_s=puller.apply_s
        )
        return True

    async def _compare(self, version: int) -> bool:
        if not self.canary:
            return False
        try:
            scores = await asyncio.to_thread(self.engine.score, self.canary)
        except EngineError as error:
            self.note_failure(error)
            return False
        if not scores:
            return False
        own = self.session.registration
        logprobs = tuple(float(value) for score in scores for value in score)
        report = CanaryReport(site=own.site, incarnation=own.incarnation, version=version, logprobs=logprobs)
        try:
            verdict = await self.session.api.report_canary(report)
        except RemoteError as error:
            # Most causes refuse a lease too; leased work is judged at its push.
            _LOG.info("version %d is not compared with the learner: %s", version, error)
            return False
        if verdict.quarantine:
            _LOG.error(
                "this site is in quarantine and gets no work: %s; a version that it scores right ends the quarantine,"
                " or an operator: %s",
                peer_words(verdict.quarantine), RELEASE,
            )  # fmt: skip
        return bool(verdict.quarantine)
