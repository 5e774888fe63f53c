"""Evaluations: leases held-out prompts to sites and counts their scores. See heterorl.common.api."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from heterorl.common.errors import InvalidRequest
from heterorl.common.process import metrics
from heterorl.common.process.threads import in_thread
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.evaluation import Evaluation, EvaluationSet, PromptResult
from heterorl.common.types.rollout import WorkGrant
from heterorl.common.types.sample import as_sample
from heterorl.coordinator import evaluation_jobs as jobs
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.sites import quarantine
from heterorl.coordinator.sites.sites import Holder
from heterorl.coordinator.store.database import Connection, get_meta
from heterorl.coordinator.versions import lineage

RETRY_AFTER_S = 2.0
NEVER_RETRY_S = 60.0
"""Seconds until a site asks again that may not evaluate, or that pulls a variant."""


class EvaluationColumn:
    """Evaluations."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    async def lease(
        self, *, holder: Holder, count: int, policy_version: int, request_id: str, sets: Sequence[EvaluationSet]
    ) -> WorkGrant:
        config, now = self._context.config, self._context.clock.monotonic()
        site, incarnation = holder

        def operation(connection: Connection) -> WorkGrant:
            self._context.sites.require(connection, site, incarnation)
            quarantine.check_site(connection, SiteId(site))
            head = lineage.head_version(connection)
            is_ending = self._is_ending(connection)
            refusal = ""
            if config.evaluation_sites and site not in config.evaluation_sites:
                refusal = "evaluation_sites does not name this site"
            elif self._context.sites.variant(connection, site, incarnation):
                refusal = "only the trained weights are evaluated, and this site pulls a variant"
            if refusal:
                return WorkGrant(assignments=(), reason=refusal, retry_after_s=0.0 if is_ending else NEVER_RETRY_S)
            self._context.deadlines.look(connection, now)
            job, handed, reason = jobs.hand_out(
                connection,
                holder,
                policy_version=policy_version,
                sets={each.name: each for each in sets if each.num_prompts},
                request_id=request_id,
                only=head if is_ending else None,
                count=count,
                digests={each.name: each.task_digest for each in config.evaluation if each.task_digest},
            )
            if job is None or not handed:
                is_over = is_ending and job is None
                return WorkGrant(assignments=(), reason=reason, retry_after_s=0.0 if is_over else RETRY_AFTER_S)
            assignments = self._context.deadlines.begin(connection, handed, holder, now)
            return WorkGrant(assignments=assignments, reason=reason, retry_after_s=0.0, evaluation=job.spec)

        # An earlier process may have left evaluations to sum up.
        await self._end_over()
        grant = await self._context.database.run(operation)
        self._context.sites.see(site, incarnation, self._context.clock.monotonic(), policy_version=policy_version)
        return grant

    async def push_evaluation(
        self, *, site: SiteId, incarnation: str, state_root: Digest, results: Sequence[PromptResult]
    ) -> int:
        self._context.disk.check()

        def operation(connection: Connection) -> tuple[int, bool]:
            self._context.sites.require(connection, site, incarnation)
            quarantine.check_site(connection, site)
            new = jobs.count(connection, (site, incarnation), state_root=state_root, results=results)
            for job, result in new:
                if result.prompt:
                    spec = job.spec
                    sample = as_sample(result, version=spec.version, task_set=spec.task_set, site=site)
                    num_tokens = sum(one.num_tokens for one in result.samples)
                    self._context.queue.ring.keep_evaluation(connection, sample, num_tokens=num_tokens)
            return len(new), bool(jobs.over(connection, in_use=None, is_ending=False))

        num_new, is_over = await self._context.database.run(operation)
        if is_over:
            # Before the answer: a site that gets none pushes again, which ends it then.
            await self._end_over()
        self._context.sites.see(site, incarnation, self._context.clock.monotonic())
        metrics.EVALUATED_PROMPTS.labels(metrics.SITES.of(site)).inc(num_new)
        return num_new

    async def _end_over(self) -> None:
        """End evaluations that are over; statistics run off the store's thread."""
        clock, since = self._context.clock, self._context.clock.monotonic() - self._context.config.work_lease_s
        # After a start the versions of sites are unknown for one lease.
        in_use = functools.partial(self._context.sites.versions_in_use, since)
        known = in_use if since >= self._context.started else None
        over = await self._context.database.run(
            lambda connection: jobs.over(connection, in_use=known, is_ending=self._is_ending(connection))
        )
        for job, state in over:
            found = await self._context.database.run(functools.partial(jobs.scores_of, job=job))
            if found.draws:
                summary = await in_thread(found.summed_up)
                end = functools.partial(jobs.end, job=job, state=state, scores=found, summary=summary, now=clock.wall())
                await self._context.database.run(end)

    async def list_evaluations(
        self, *, task_set: str = "", after_version: int = -1, limit: int = 1000
    ) -> tuple[Evaluation, ...]:
        if not 1 <= limit <= 1000:
            raise InvalidRequest(f"limit: {limit} is not in 1..1000")
        found = await self._context.database.run(
            lambda connection: jobs.listed(connection, task_set=task_set, after_version=after_version, limit=limit)
        )
        return await in_thread(lambda: tuple(each.evaluation() for each in found))

    async def observe(self) -> None:
        if not self._context.config.evaluation:
            return
        sets = [each.name for each in self._context.config.evaluation]
        newest = await self._context.database.run(lambda connection: jobs.newest_done(connection, sets))
        for name, found in newest.items():
            metrics.EVALUATION_VERSION.labels(name).set(found.version)
            if found.summary.average is not None:
                metrics.EVALUATION_REWARD.labels(name).set(found.summary.average.mean)

    def _is_ending(self, connection: Connection) -> bool:
        is_finished = self._context.config.is_finished(lineage.head_version(connection))
        return is_finished or bool(get_meta(connection, "draining"))
