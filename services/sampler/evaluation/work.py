"""The loop that evaluates: asks for parts, pins their version, draws, delivers.

    run  waits for a verified version, for parts, for the engine, for the coordinator; unblocked by sync, time, the
         engine, the coordinator; ends when the run drains and there is nothing to evaluate

    the part's version is the engine's   pinned: rollouts go on beside it with that version, and a newer one waits until
                                         the evaluation has no more parts, `evaluation_hold_s` at most
    it is another one                    fetched beside rollouts; when those under way have ended the engine takes it,
                                         evaluates alone, and goes back to the site's own version; the site then rests
                                         until that was no more than its share of the time

Guarantees: what is delivered was drawn by the part's version alone; a part that gives nothing is handed back; a set
that this site cannot draw is refused once and not asked for again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from heterorl.common.api import SamplerApi
from heterorl.common.errors import (
    ConfigError,
    CorruptData,
    DiskFull,
    EngineError,
    HeterorlError,
    InvalidRequest,
    MessageTooLarge,
    RemoteError,
    Unreachable,
    UntrustedVersion,
)
from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.process.patience import Patience
from heterorl.common.pull.pull import TrustedPuller
from heterorl.common.types.common import peer_seconds, peer_words
from heterorl.common.types.evaluation import MAX_PARTS, PART_SAMPLES, EvaluationPart, PromptResult, without_texts
from heterorl.sampler.config import SamplerConfig
from heterorl.sampler.evaluation.drawing import Drawing
from heterorl.sampler.evaluation.sets import SiteSet
from heterorl.sampler.rollout.guests import Guests
from heterorl.sampler.rollout.swap import Swap
from heterorl.sampler.session import Session
from heterorl.sampler.sync import PolicySync

_LOG = logging.getLogger(__name__)
PAUSE_S = 2.0
"""Between questions that found nothing, where the coordinator says nothing else."""
MAX_FAILURES = 8
"""In a row, before a sampler that drains ends without the evaluation: about a minute of waiting."""
HAND_BACK_S = 3.0
"""What a stop waits for a coordinator that takes parts back."""


class EvaluationWork:
    """Evaluation beside the rollouts of one engine."""

    def __init__(
        self,
        *,
        config: SamplerConfig,
        api: SamplerApi,
        sets: Sequence[SiteSet],
        drawing: Drawing,
        guests: Guests,
        swap: Swap,
        policy: PolicySync,
        session: Session,
        puller: TrustedPuller,
        clock: Clock,
        bell: Bell,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._api = api
        self._sets = {each.name: each for each in sets}
        self._drawing = drawing
        self._guests = guests
        self._swap = swap
        self._policy = policy
        self._session = session
        self._puller = puller
        self._clock = clock
        self._bell = bell
        self._patience = Patience(clock=clock, rng=rng)
        self._held: set[int] = set()
        self._rest_until = clock.monotonic()
        self._pause_s = PAUSE_S
        self._num_failures = 0
        """Leases and deliveries that failed since one was taken."""
        self._is_all_done = False
        """Whether the coordinator had nothing when it was last asked."""
        guests.are_expected = True

    async def run(self) -> None:
        """Evaluate until the run drains and nothing is left."""
        try:
            while True:
                version = self._swap.version
                parts = await self._lease() if version >= 0 else ()
                while parts:
                    parts = await self._evaluate(parts)
                if self._session.is_draining and (version < 0 or self._is_all_done):
                    return
                if self._session.is_draining and self._num_failures >= MAX_FAILURES:
                    _LOG.warning("draining without the last evaluation: nothing came of it %d times", MAX_FAILURES)
                    return
                await self._pause(version)
        finally:
            self._drawing.close()
            self._guests.are_expected = False
            self._guests.leave()

    async def hand_back(self) -> None:
        """Hand back what is under way, as long as a stop may take; where that fails it expires."""
        if self._held:
            try:
                async with asyncio.timeout(HAND_BACK_S):
                    await self._abandon(sorted(self._held))
            except TimeoutError:
                _LOG.info("%d parts of an evaluation are left to expire", len(self._held))

    async def _lease(self) -> tuple[EvaluationPart, ...]:
        can_pull = self._session.is_draining or self._clock.monotonic() >= self._rest_until
        wanted = max(1, self._drawing.num_rows // PART_SAMPLES)
        self._is_all_done = False
        try:
            grant = await self._api.lease_evaluation(
                site=self._session.registration.site,
                incarnation=self._session.registration.incarnation,
                policy_version=self._swap.version,
                sets=[each.stated for each in self._sets.values()],
                can_pull=can_pull,
                max_parts=min(MAX_PARTS, wanted),
                held=sorted(self._held),
            )
        except (RemoteError, TimeoutError) as error:
            # Whoever asks for rollouts registers again, and ends where that does not help.
            _LOG.log(
                logging.DEBUG if isinstance(error, Unreachable | TimeoutError) else logging.INFO,
                "nothing is evaluated: %s", error,
            )  # fmt: skip
            self._pause_s = self._patience.delay_s()
            self._num_failures += 1
            return ()
        self._patience.reset()
        self._pause_s = peer_seconds(grant.retry_after_s) or PAUSE_S
        # Nothing that was not asked for: what is left expires.
        parts = tuple(
            part
            for part in grant.parts[:wanted]
            if (part.task_set, part.version) == (grant.parts[0].task_set, grant.parts[0].version)
            and part.task_set in self._sets
        )
        if not parts:
            self._is_all_done = True
            _LOG.debug("nothing is evaluated: %s", peer_words(grant.reason))
        return parts

    async def _evaluate(self, parts: tuple[EvaluationPart, ...]) -> tuple[EvaluationPart, ...]:
        """Evaluate parts of one version, and further ones; returns what was given of another version."""
        version, started = parts[0].version, self._clock.monotonic()
        self._held |= {part.id for part in parts}
        if not await self._guests.pin(self._swap, version) and not await self._bring(parts):
            self._num_failures += 1
            # As after a visit: rollouts come first for a while.
            now = self._clock.monotonic()
            self._rest_until = now + max(PAUSE_S, (now - started) * (1.0 / self._config.evaluation_share - 1.0))
            return ()
        is_visit = self._guests.are_alone
        _LOG.info("set %s is evaluated on version %d", parts[0].task_set, version)
        try:
            while parts and parts[0].version == version:
                self._held |= {part.id for part in parts}
                if not await self._deliver(parts):
                    self._num_failures += 1
                    return ()
                is_held_long = self._clock.monotonic() - started >= self._config.evaluation_hold_s
                if is_held_long and self._policy.take(version) is not None and not self._session.is_draining:
                    return ()
                parts = await self._lease()
            return parts
        finally:
            self._guests.leave()
            if is_visit:
                now = self._clock.monotonic()
                self._rest_until = now + (now - started) * (1.0 / self._config.evaluation_share - 1.0)

    async def _deliver(self, parts: Sequence[EvaluationPart]) -> bool:
        """Draw parts together and deliver each when it is whole; whether the engine can go on."""
        tasks = [asyncio.ensure_future(self._part(part)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        except ConfigError as error:
            # Another site's engine may have more room.
            self._sets.pop(parts[0].task_set, None)
            _LOG.error("set %s is not evaluated here: %s", parts[0].task_set, error)
            await self._cancelled(tasks)
            await self._abandon([part.id for part in parts if part.id in self._held], reason=str(error))
            return False
        except EngineError as error:
            _LOG.warning("an evaluation is given up: %s", error)
            await self._cancelled(tasks)
            await self._abandon([part.id for part in parts if part.id in self._held])
            return False
        except BaseException:
            await self._cancelled(tasks)
            raise
        return True

    async def _part(self, part: EvaluationPart) -> None:
        results = await self._drawing.results(part, self._sets[part.task_set])
        try:
            try:
                num_counted = await self._pushed(part, results)
            except MessageTooLarge as error:
                # Texts are for people to read; what the part is for are the numbers.
                _LOG.warning("part %d of an evaluation is delivered without its texts: %s", part.id, error)
                num_counted = await self._pushed(part, [without_texts(result) for result in results])
        except RemoteError as error:
            _LOG.warning("part %d of an evaluation is not taken: %s", part.id, error)
            # Drawn again it would be refused again.
            is_final = isinstance(error, MessageTooLarge | InvalidRequest)
            await self._abandon([part.id], reason=str(error) if is_final else "")
            return
        self._held.discard(part.id)
        self._num_failures = 0
        _LOG.debug("part %d of an evaluation is delivered, %d prompts are new", part.id, num_counted)

    async def _pushed(self, part: EvaluationPart, results: Sequence[PromptResult]) -> int:
        return await self._patience.insist(
            lambda: self._api.push_evaluation(
                site=self._session.registration.site,
                incarnation=self._session.registration.incarnation,
                part=part.id,
                state_root=part.state_root,
                results=results,
            )
        )

    async def _bring(self, parts: Sequence[EvaluationPart]) -> bool:
        """Fetch the version of parts and give it to the engine; parts are handed back where that fails."""
        first = parts[0]
        try:
            async with asyncio.timeout(max(1.0, first.lease_s)):
                pulled = await self._puller.pull(first.version)
            if await self._guests.bring(self._swap, pulled):
                return True
            reason = f"the engine does not take version {first.version}"
        except TimeoutError:
            reason = ""
        except (RemoteError, CorruptData, UntrustedVersion, DiskFull, OSError) as error:
            reason = f"version {first.version} cannot be fetched: {error}"
            _LOG.warning("nothing is evaluated: %s", reason)
        await self._abandon([part.id for part in parts], reason=reason)
        return False

    async def _abandon(self, parts: Sequence[int], *, reason: str = "") -> None:
        self._held -= set(parts)
        if not parts:
            return
        try:
            await self._api.abandon_evaluation(
                site=self._session.registration.site,
                incarnation=self._session.registration.incarnation,
                parts=parts,
                reason=reason,
            )
        except (HeterorlError, TimeoutError) as error:
            _LOG.info("%d parts of an evaluation are left to expire: %s", len(parts), error)

    async def _pause(self, version: int) -> None:
        """Wait until it is time to ask again, the engine has another version, or the run drains."""
        until = self._clock.monotonic() + self._pause_s
        # A run that drains ends when all is evaluated; what failed is tried again, and not at once.
        while (not self._session.is_draining or self._num_failures) and self._swap.version == version:
            ticket, left_s = self._bell.ticket(), until - self._clock.monotonic()
            if left_s <= 0 and version >= 0:
                return
            await ring_or_time(ticket, clock=self._clock, seconds=left_s if version >= 0 else PAUSE_S)

    async def _cancelled(self, tasks: Sequence[asyncio.Future[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
