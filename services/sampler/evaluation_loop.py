"""The evaluation loop: leases held-out prompts, draws them, delivers results.

The prompts are for the engine's version.

While the site holds prompts, the engine keeps their version and rollouts go on; newer weights wait at most
`evaluation_hold_s`, after which prompts without a result are handed back. A drained site waits as long for the last
version. Only the evaluated version draws results. The site does not ask again for a set that it cannot draw. A prompt
that ends the engine or the process three times is answered without a score.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence

from heterorl.common.errors import ConfigError, EngineError, InvalidRequest, MessageTooLarge, RemoteError
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import ends_within, ring_or_time
from heterorl.common.process.threads import cause_of
from heterorl.common.types.common import Digest
from heterorl.common.types.evaluation import MAX_HELD_OUT, MAX_RESULT_SAMPLES, EvaluationSpec, PromptResult, cut_texts
from heterorl.common.types.rollout import WorkAssignment, WorkGrant
from heterorl.sampler.prompt_evaluator import BLOCK, PromptEvaluator, SiteSet
from heterorl.sampler.rollout.generation_loop import GenerationLoop
from heterorl.sampler.rollout.prefetch import WorkClient
from heterorl.sampler.sampler_config import SamplerConfig

_LOG = logging.getLogger(__name__)
PAUSE_S = 2.0
"""Shortest wait after an empty answer or a set that was not drawn."""
MAX_FAILURES = 8
"""Failures in a row after which a draining sampler ends without the evaluation: about a minute."""
HAND_BACK_S = 3.0
"""Longest wait at a stop for a coordinator that takes prompts back."""


class EvaluationLoop:
    """Evaluation in the engine that rollouts use."""

    def __init__(self, config: SamplerConfig, sets: Sequence[SiteSet], generation: GenerationLoop) -> None:
        self._config = config
        self._sets = {each.name: each for each in sets}
        self._generation = generation
        self._policy, self._session = generation.policy, generation.session
        self._clock, self._bell = generation.clock, generation.bell
        self._evaluation_requests = generation.evaluation_requests
        self._evaluator = PromptEvaluator(
            engine=generation.engine, evaluation_requests=generation.evaluation_requests, builder=generation.builder,
            share=config.evaluation_share, max_trajectory_tokens=config.sampling.max_trajectory_tokens,
            news=generation.news,
        )  # fmt: skip
        self._in_flight = generation.in_flight
        self._evaluator.failures.update(self._in_flight.held_out)
        self._work = WorkClient(self._session, name="evaluate")
        self._backoff = Backoff(clock=self._clock, rng=self._session.rng)
        self._held: set[int] = set()
        self._asking = asyncio.Lock()
        self._has_stopped = False
        self._drawing: set[asyncio.Task[None]] = set()
        self._drawn: list[PromptResult] = []
        self._pushing = asyncio.Lock()
        self._num_samples = BLOCK
        """Completions of a prompt of the last set."""
        self._kept_version, self._kept_until = -1, math.inf
        """The last evaluated version, and the time from which newer weights do not wait for it."""
        self._drained_at = math.inf
        self._num_failures = 0
        """Failed questions and deliveries since the last success."""
        self._is_over = False
        """Whether the coordinator said that the run has no evaluation left for this site."""
        self._evaluation_requests.is_expected = True

    async def run(self) -> None:
        """Evaluate until the run drains and the last evaluation has ended."""
        try:
            while True:
                version = self._generation.swap.version
                if version >= 0:
                    await self._evaluate(version)
                if self._session.is_draining and self._may_end():
                    return
                await self._pause(version)
        finally:
            self._evaluator.close()
            self._evaluation_requests.is_expected = False
            self._release()

    def stop(self) -> None:
        self._has_stopped = True

    async def hand_back(self) -> None:
        """Hand prompts back within HAND_BACK_S; after that they expire.

        Prompts that an open question gets are among them.
        """

        async def given_back() -> None:
            await self._give_back()
            async with self._asking:
                await self._give_back()

        if not await ends_within(given_back(), clock=self._clock, seconds=HAND_BACK_S):
            _LOG.info("held-out prompts are left to expire: the coordinator does not answer")

    def _may_end(self) -> bool:
        now = self._clock.monotonic()
        self._drained_at = min(self._drained_at, now)
        if self._is_over:
            return True
        is_late = not self._num_failures and now - self._drained_at >= self._config.evaluation_hold_s
        if is_late or self._num_failures >= MAX_FAILURES:
            why = "its weights did not come" if is_late else f"nothing came of it {MAX_FAILURES} times"
            _LOG.warning("the sampler drains without the last evaluation: %s", why)
            return True
        return False

    async def _evaluate(self, version: int) -> None:
        """Evaluate a version while there are prompts and newer weights may wait."""
        if version != self._kept_version:
            self._kept_version, self._kept_until = version, math.inf
        try:
            while not self._is_late(version):
                grant = await self._lease(version)
                if grant is None or not await self._deliver(grant):
                    return
        finally:
            self._release()

    def _is_late(self, version: int) -> bool:
        return self._clock.monotonic() >= self._kept_until and self._policy.take(version) is not None

    async def _let_in(self, version: int) -> None:
        """Wait until newer weights have waited long enough, then draw no more."""
        while not self._is_late(version):
            ticket, left_s = self._bell.ticket(), self._kept_until - self._clock.monotonic()
            await ring_or_time(ticket, clock=self._clock, seconds=left_s if left_s > 0 else None)
        for task in self._drawing:
            task.cancel()
        # Results that a link holds back do not keep the version.
        self._release()

    def _release(self) -> None:
        self._evaluation_requests.keeps_version = False
        self._generation.news.ring()

    async def _lease(self, version: int) -> WorkGrant | None:
        """Lease prompts for the engine's version and keep it; None without prompts."""
        await self._give_back()
        if not self._sets:
            self._is_over = True
            return None
        wanted = max(1, self._evaluator.num_rows // self._num_samples)
        stated = [each.stated for each in self._sets.values()]
        async with self._asking:
            if self._has_stopped:
                return None
            grant = await self._work.ask(version, wanted, num_prompts=MAX_HELD_OUT, sets=stated)
            self._held |= {each.id for each in grant.assignments} if grant is not None else set()
        self._is_over = grant is not None and not grant.assignments and not grant.retry_after_s
        if grant is None:
            self._num_failures += 1
            return None
        if not grant.assignments:
            # The coordinator answers: the last version may only be late.
            self._num_failures = 0
            return None
        spec, is_there = grant.evaluation, self._generation.swap.version == version and not self._generation.is_swapping
        is_there = is_there and not self._has_stopped
        if spec is None or spec.task_set not in self._sets or spec.version != version or not is_there:
            await self._give_back()
            return None
        self._evaluation_requests.keeps_version = True
        self._kept_until = min(self._kept_until, self._clock.monotonic() + self._config.evaluation_hold_s)
        self._num_samples = spec.draws.num_samples
        return grant

    async def _deliver(self, grant: WorkGrant) -> bool:
        """Draw prompts together, deliver each one; returns whether the engine can continue."""
        spec = grant.evaluation
        assert spec is not None, "they are held-out prompts"
        of = self._sets[spec.task_set]
        self._drawn = []
        _LOG.debug("%d prompts of set %s are drawn with version %d", len(grant.assignments), of.name, spec.version)
        failures, drawn = self._evaluator.failures, list[WorkAssignment]()
        suspects = [[each] for each in grant.assignments if failures[of.name, each.prompt_index]]
        others = [each for each in grant.assignments if not failures[of.name, each.prompt_index]]
        letting_in = asyncio.ensure_future(self._let_in(spec.version))
        try:
            # Prompts that the engine failed at are drawn one by one, so that only the one at fault fails again.
            for drawn in (others, *suspects):
                await self._note(of, drawn)
                if self._is_late(spec.version):
                    break
                async with asyncio.TaskGroup() as tasks:
                    self._drawing = {tasks.create_task(self._prompt(spec, of, each)) for each in drawn}
        except ExceptionGroup as group:
            error = cause_of(group)
            if not isinstance(error, ConfigError | EngineError | RemoteError):
                raise
            if isinstance(error, ConfigError | InvalidRequest | MessageTooLarge):
                # A second try here would fail again; another site's engine may have more room.
                self._sets.pop(of.name, None)
                _LOG.error("this site no longer evaluates set %s, another site may: %s", of.name, error)
            else:
                _LOG.warning("%d held-out prompts of set %s are handed back: %s", len(self._held), of.name, error)
            if isinstance(error, EngineError):
                failures.update((of.name, each.prompt_index) for each in drawn if each.id in self._held)
            self._num_failures += 1
            await self._end_delivery(of)
            return False
        finally:
            letting_in.cancel()
        if self._held:
            _LOG.info("%d held-out prompts of set %s are handed back: newer weights waited", len(self._held), of.name)
        self._num_failures = 0
        await self._end_delivery(of)
        return True

    async def _end_delivery(self, of: SiteSet) -> None:
        await self._note(of, ())
        await self._give_back()

    async def _note(self, of: SiteSet, drawn: Sequence[WorkAssignment]) -> None:
        """Write failures for the next process.
        Each prompt that is drawn counts once more, since it may kill this one."""
        counts = self._evaluator.failures + Counter((of.name, each.prompt_index) for each in drawn)
        await asyncio.to_thread(self._in_flight.note_held_out, counts)

    async def _prompt(self, spec: EvaluationSpec, of: SiteSet, assignment: WorkAssignment) -> None:
        self._drawn.append(await self._evaluator.result(spec, of, assignment))
        self._drawing -= {asyncio.current_task()}
        # Results that ended during another delivery go together.
        async with self._pushing:
            while self._drawn:
                some = self._drawn[: max(1, MAX_RESULT_SAMPLES // spec.draws.num_samples)]
                await self._push(spec.state_root, some)
                self._held -= {each.assignment for each in some}
                del self._drawn[: len(some)]

    async def _push(self, state_root: Digest, results: Sequence[PromptResult]) -> None:
        try:
            await self._pushed(state_root, results)
        except MessageTooLarge as error:
            # Texts are for readers; statistics need only the numbers.
            _LOG.warning("%d results are delivered without their texts: %s", len(results), error)
            await self._pushed(state_root, [cut_texts(result, 0) for result in results])

    async def _pushed(self, state_root: Digest, results: Sequence[PromptResult]) -> None:
        own = self._session.registration
        await self._backoff.retry(
            lambda: self._session.api.push_evaluation(
                site=own.site, incarnation=own.incarnation, state_root=state_root, results=results
            )
        )

    async def _give_back(self) -> None:
        held = sorted(self._held)
        # Prompts that a broken link kept here are handed back before the next question.
        if held and await self._work.abandon(held):
            self._held -= set(held)

    async def _pause(self, version: int) -> None:
        until = max(self._work.ask_time, self._clock.monotonic() + PAUSE_S)
        was_draining = self._session.is_draining
        while self._session.is_draining == was_draining and self._generation.swap.version == version:
            ticket, left_s = self._bell.ticket(), until - self._clock.monotonic()
            if left_s <= 0:
                return
            await ring_or_time(ticket, clock=self._clock, seconds=left_s)
