"""The column of evaluations: parts out to sites, scores in, what is known of every version. See heterorl.common.api."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from heterorl.common.errors import InvalidRequest
from heterorl.common.process import metrics
from heterorl.common.process.threads import in_thread
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.evaluation import (
    MAX_PARTS,
    Evaluation,
    EvaluationGrant,
    EvaluationPart,
    EvaluationSet,
    EvaluationState,
    PromptResult,
)
from heterorl.common.types.sample import as_sample
from heterorl.coordinator.evaluations import parts as store
from heterorl.coordinator.evaluations import results as scores
from heterorl.coordinator.evaluations.choice import Asker, choose
from heterorl.coordinator.parts import Parts
from heterorl.coordinator.sites import quarantine
from heterorl.coordinator.store.database import get_meta
from heterorl.coordinator.store.engine import Connection
from heterorl.coordinator.versions import lineage

_LOG = logging.getLogger(__name__)
RETRY_AFTER_S = 2.0
NEVER_RETRY_S = 60.0
"""When a site asks again that may not evaluate, or whose form of the weights is not evaluated."""


class EvaluationColumn:
    """Evaluations; what of them concerns liveness alone lies in memory."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._terms = store.Terms()
        self._refused: set[tuple[int, str]] = set()
        """Evaluations that a site said it cannot do. Read and written by store operations only, like the terms."""

    async def lease_evaluation(
        self,
        *,
        site: SiteId,
        incarnation: str,
        policy_version: int,
        sets: Sequence[EvaluationSet],
        can_pull: bool,
        max_parts: int,
        held: Sequence[int] = (),
    ) -> EvaluationGrant:
        """Hand out parts of one evaluation."""
        if not 1 <= max_parts <= MAX_PARTS:
            raise InvalidRequest(f"max_parts: {max_parts} is not in 1..{MAX_PARTS}")
        config, now = self._parts.config, self._parts.clock.monotonic()
        lessee = store.Lessee(
            site=site, incarnation=incarnation, terms=self._terms, lease_s=config.evaluation_lease_s, now=now
        )

        over: list[int] = []

        def operation(connection: Connection) -> tuple[tuple[EvaluationPart, ...], str, float]:
            over[:] = []
            self._parts.sites.require(connection, site, incarnation)
            quarantine.check_site(connection, site)
            if config.evaluation_sites and site not in config.evaluation_sites:
                return (), "evaluation_sites does not name this site", NEVER_RETRY_S
            if self._parts.sites.flavour(connection, site, incarnation):
                return (), "the weights are evaluated as they are trained, and this site pulls a flavour", NEVER_RETRY_S
            self._expire(connection, now)
            again = store.held(connection, lessee, known=held)
            if again:
                return again[:max_parts], "held before", 0.0
            room = min(max_parts, MAX_PARTS - store.num_held(connection, site=site, incarnation=incarnation))
            asker = Asker(
                policy_version=policy_version,
                sets={each.name: each for each in sets if each.num_prompts},
                can_pull=can_pull,
                refused=[job for job, by in self._refused if by == site],
            )
            is_ending = self._is_ending(connection)
            under_way = store.jobs(connection, self._terms, now=now)
            known = {each.id for each in under_way}
            self._refused = {(job, by) for job, by in self._refused if job in known}
            job, reason = choose(
                under_way,
                asker,
                digests=self._digests(connection),
                wait_s=0.0 if is_ending else config.evaluation_wait_s,
                # The last version comes first.
                silence_s=0.0 if is_ending else config.evaluation_lease_s,
            )
            if job is None or room < 1:
                return (), reason if job is None else "the site holds enough", RETRY_AFTER_S
            if not job.is_begun:
                store.begin(connection, job, asker.sets[job.task_set])
                self._terms.answered[job.id] = now
                over[:] = self._given_up(connection, scores.older_with_nobody(connection, job.id), now)
            return store.hand_out(connection, job.id, lessee, count=room), reason, RETRY_AFTER_S

        for job in await self._parts.database.run(scores.whole):
            await self._end(job, EvaluationState.DONE)
        parts, reason, retry_after_s = await self._parts.database.run(operation)
        for job in over:
            await self._end(job, EvaluationState.INCOMPLETE)
        self._parts.sites.see(site, incarnation, now)
        return EvaluationGrant(parts=parts, reason=reason, retry_after_s=0.0 if parts else retry_after_s)

    async def push_evaluation(
        self, *, site: SiteId, incarnation: str, part: int, state_root: Digest, results: Sequence[PromptResult]
    ) -> int:
        """Count what came of a part."""
        self._parts.room.check()
        instant = self._parts.clock.monotonic()

        def operation(connection: Connection) -> scores.Counted:
            self._parts.sites.require(connection, site, incarnation)
            quarantine.check_site(connection, site)
            counted = scores.count(
                connection,
                part=part,
                site=site,
                incarnation=incarnation,
                state_root=state_root,
                results=results,
            )
            if counted.job is not None:
                self._terms.moved[counted.job] = self._terms.answered[counted.job] = instant
                self._keep(connection, counted.job, site=site, version=counted.version, results=counted.new)
            return counted

        counted = await self._parts.database.run(operation)
        if counted.job is not None and counted.is_whole:
            # Before the answer: who hears none says it again, and it is ended then.
            await self._end(counted.job, EvaluationState.DONE)
        self._parts.sites.see(site, incarnation, instant)
        metrics.EVALUATED_PROMPTS.labels(metrics.SITES.of(site)).inc(len(counted.new))
        return len(counted.new)

    async def _end(self, job: int, state: EvaluationState) -> None:
        """End an evaluation, and those that give way to it; its statistics keep nobody from the store."""
        found = await self._parts.database.run(lambda connection: scores.scores_of(connection, job))
        if not found.draws:
            return
        clock = self._parts.clock
        summary, now, instant = await in_thread(found.summed_up), clock.wall(), clock.monotonic()

        def operation(connection: Connection) -> list[int]:
            parts, older = scores.end(connection, job, state, scores=found, summary=summary, now=now)
            if parts:
                self._terms.forget(job, parts)
            # The run waits for no other than the last version's.
            return older if self._is_ending(connection) else self._given_up(connection, older, instant)

        for each in await self._parts.database.run(operation):
            await self._end(each, EvaluationState.INCOMPLETE)

    def _keep(
        self,
        connection: Connection,
        job: int,
        *,
        site: SiteId,
        version: int,
        results: Sequence[PromptResult],
    ) -> None:
        """Put texts that came with scores into the ring of samples."""
        told = [result for result in results if result.prompt]
        if not told:
            return
        (task_set,) = connection.execute("SELECT task_set FROM evaluation_jobs WHERE job = ?", (job,)).fetchone()
        for result in told:
            sample = as_sample(result, version=version, task_set=task_set, site=site)
            self._parts.queue.ring.keep_evaluation(connection, sample)

    async def abandon_evaluation(
        self, *, site: SiteId, incarnation: str, parts: Sequence[int], reason: str = ""
    ) -> None:
        """Open parts that the site will not answer."""
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(f"parts: {len(parts)}, at most {MAX_PARTS} are taken at once")

        def operation(connection: Connection) -> None:
            self._parts.sites.require(connection, site, incarnation)
            jobs = store.give_back(connection, parts, site=site, incarnation=incarnation, terms=self._terms)
            if reason:
                self._refused |= {(job, site) for job in jobs}

        await self._parts.database.run(operation)
        if reason:
            _LOG.warning("site %s cannot do an evaluation: %s", site, reason[:300])

    async def list_evaluations(
        self, *, task_set: str = "", after_version: int = -1, limit: int = 1000
    ) -> tuple[Evaluation, ...]:
        """What is known of versions on sets."""
        if not 1 <= limit <= 1000:
            raise InvalidRequest(f"limit: {limit} is not in 1..1000")
        found = await self._parts.database.run(
            lambda connection: scores.listed(
                connection, task_set=task_set, after_version=max(-1, after_version), limit=limit
            )
        )
        return await in_thread(lambda: tuple(each.evaluation() for each in found))

    async def observe(self) -> None:
        """Set the gauges to the newest evaluation of each set."""
        if not self._parts.config.evaluation:
            return
        sets = [each.name for each in self._parts.config.evaluation]
        newest = await self._parts.database.run(lambda connection: scores.newest_done(connection, sets))
        for name, found in newest.items():
            metrics.EVALUATION_VERSION.labels(name).set(found.version)
            if found.summary.average is not None:
                metrics.EVALUATION_REWARD.labels(name).set(found.summary.average.mean)

    def _digests(self, connection: Connection) -> dict[str, str]:
        configured = {each.name: each.task_digest for each in self._parts.config.evaluation if each.task_digest}
        return store.digests(connection) | configured

    def _is_ending(self, connection: Connection) -> bool:
        return bool(get_meta(connection, "draining")) or self._parts.config.is_finished(
            lineage.head_version(connection)
        )

    def _given_up(self, connection: Connection, older: Sequence[int], now: float) -> list[int]:
        """Those that nothing came back of for as long as a site may take; the others are gone on with."""
        silent_s = {each.id: each.silent_s for each in store.jobs(connection, self._terms, now=now)}
        return [job for job in older if silent_s.get(job, 0.0) >= self._parts.config.evaluation_lease_s]

    def _expire(self, connection: Connection, now: float) -> None:
        """Open the parts of sites that took too long, or that are silent."""
        config, over = self._parts.config, []
        out = store.out(connection)
        # Also of versions that the lineage lost.
        leased = {part for part, _, _ in out}
        self._terms.out = {part: since for part, since in self._terms.out.items() if part in leased}
        for part, site, incarnation in out:
            since = self._terms.out.setdefault(part, now)
            seen = self._parts.sites.seen_at((site, incarnation))
            heard = since if seen is None else max(seen, since)
            if now - since > config.evaluation_lease_s or now - heard > config.work_lease_s:
                over.append(part)
                _LOG.info("part %d of an evaluation goes from site %s to another one", part, site)
        store.take_back(connection, over, self._terms)
