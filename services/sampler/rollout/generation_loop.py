"""The loop that generates: swap, begin; what was begun is `harvest`'s.

    generate  waits for a verified version, an assignment of the reserve, room in the engine, room in the outbox and on
              the disk; unblocked by sync, the reserve, collect, deliver; time, or a person who makes room

Guarantees: no completion and no turn mixes versions where `swap = "drain"`: a swap that is due lets none begin, and
waits for those under way; where `work_ahead_s` is 0, nothing is leased before everything begun is spooled; no more
groups are in memory than the engine holds and a few fills of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from heterorl.common.api import SamplerApi
from heterorl.common.errors import EngineError, PromptRefused
from heterorl.common.generation.inference_engine import Engine, Request, ScoredText
from heterorl.common.process import metrics
from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.pull.puller import PulledVersion
from heterorl.common.types.rollout import FinishReason
from heterorl.sampler.config import SamplerConfig
from heterorl.sampler.outbox.outbox import Outbox, OutboxWriter
from heterorl.sampler.outbox.turn_store import KeptGroup
from heterorl.sampler.rollout.completion_collector import CompletionCollector
from heterorl.sampler.rollout.group_builder import GroupBuilder, Refused
from heterorl.sampler.rollout.in_flight_groups import EvaluationRequests, GroupDraft, InFlightNote, TurnJournal
from heterorl.sampler.rollout.prefetch import Prefetch, WorkClient
from heterorl.sampler.rollout.weight_swap import WeightSwap
from heterorl.sampler.site_session import Reported, Session
from heterorl.sampler.weight_sync import WeightSync

_LOG = logging.getLogger(__name__)
MAX_UNSCORED = 2
"""Fills of the engine that may wait for their rewards; then nothing begins until the rewards have come after."""
REFUSED_S = 1.0
"""Pause where nothing can be generated of any prompt that is given."""


class GenerationLoop:
    """The loops around one engine."""

    def __init__(
        self,
        *,
        config: SamplerConfig,
        api: SamplerApi,
        engine: Engine,
        canary: Sequence[ScoredText] = (),
        builder: GroupBuilder,
        outbox: Outbox,
        policy: WeightSync,
        session: Session,
        clock: Clock,
        bell: Bell,
        numbering: asyncio.Lock,
        rng: random.Random,
        now: Callable[[], float],
        in_flight: InFlightNote,
        left: Sequence[KeptGroup],
    ) -> None:
        self._in_flight = in_flight
        self.outbox_writer = OutboxWriter(
            outbox=outbox, delay=config.delay, seed=config.seed, clock=clock, now=now, rng=rng, numbering=numbering
        )
        self._config = config
        self._engine = engine
        self._builder = builder
        self._outbox = outbox
        self._policy = policy
        self._session = session
        self._clock = clock
        self._bell = bell
        # What happens to groups under way; the sampler's other loops need not look at every completion.
        self.news = Bell()
        self._work = WorkClient(api=api, session=session, clock=clock, rng=rng)
        self.swap = WeightSwap(
            api=api, engine=engine, canary=canary, policy=policy, session=session, clock=clock, rng=rng,
            on_quarantine=self._return_prefetched,
        )  # fmt: skip
        self.evaluation_requests = EvaluationRequests()
        self.is_swapping = False
        """Whether the engine is being given weights."""
        self._journal = TurnJournal(
            turns=outbox.turns, left=left, state_roots=lambda: self.swap.state_roots, clock=clock, now=now,
            news=self.news,
        )  # fmt: skip
        self.collector = CompletionCollector(
            engine=engine, builder=builder, outbox_writer=self.outbox_writer, swap=self.swap, work=self._work,
            clock=clock, bell=bell, news=self.news, evaluation_requests=self.evaluation_requests, journal=self._journal,
        )  # fmt: skip
        self._drafts = self.collector.drafts
        self._room = max(1, engine.max_running // builder.group_size)
        self.prefetch = Prefetch(
            work=self._work, num_prompts=builder.task.num_prompts, room_groups=self._room,
            work_ahead_s=lambda: session.work_ahead_s, rate=self.collector.groups, clock=clock, news=self.news,
            in_flight=self._in_flight_now,
        )  # fmt: skip
        self._is_ending = False

    def reported(self) -> Reported:
        """What a heartbeat says of this."""
        return replace(
            self.swap.reported,
            tokens_per_s=self.collector.tokens.per_s(self._clock.monotonic()),
            problem=self.outbox_writer.problem or self._policy.problem or self.collector.problem,
        )

    async def generate(self) -> None:
        """Generate until the run drains and everything under way is spooled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = self.collector.loops(tasks)
                if self._config.work_ahead_s:
                    loops.append(tasks.create_task(self.prefetch.keep(bell=self._bell, may_ask=self._version_to_ask)))
                await self._resume(tasks)
                await self._conduct(tasks)
                for loop in loops:
                    loop.cancel()
        finally:
            self.collector.close()
        await self.collector.hand_back()

    async def stop(self) -> None:
        """Begin nothing more: spool what has ended, give up the rest and hand it back; takes seconds at most."""
        self._is_ending = True
        await asyncio.to_thread(self._engine.cancel)
        self._return_prefetched()
        await self.collector.end()
        async with self.swap.running:
            # Its thread cannot be cancelled.
            pass

    async def empty(self) -> None:
        """Push what is held: a drained run waits for no delay."""
        await asyncio.to_thread(self._outbox.release_all)
        self._bell.ring()
        is_said = False
        while True:
            ticket = self._bell.ticket()
            level = self._outbox.level()
            if not level.num_groups:
                return
            if not is_said:
                _LOG.info("draining: %d groups are left to deliver", level.num_groups)
                is_said = True
            await ticket.wait()

    def _in_flight_now(self) -> list[int]:
        return [draft.assignment.id for draft in self._drafts]

    async def _resume(self, tasks: asyncio.TaskGroup) -> None:
        """Go on with what an earlier process had under way."""
        left, self._journal.left = self._journal.left, ()
        num_turns = 0
        for group in left:
            draft = await asyncio.to_thread(self._builder.resume, group, begun_at=self._journal.begun_at(group))
            if draft is None:
                _LOG.warning("assignment %d goes back: its prompt is another one now", group.first.assignment)
                self.collector.give_back([group.first.assignment])
                continue
            num_turns += len(group.turns)
            self.collector.resume(draft, group, tasks)
        if num_turns:
            _LOG.info("going on with %d groups of an earlier process, %d turns of them", len(self._drafts), num_turns)

    @property
    def num_in_flight(self) -> int:
        """Groups that are being made."""
        return len(self._drafts)

    @property
    def _may_begin(self) -> bool:
        level = self._outbox.level()
        metrics.OUTBOX_GROUPS.set(level.num_groups)
        metrics.OUTBOX_BYTES.set(level.num_bytes)
        return (
            not self._session.is_draining
            and not self._is_ending
            and self.swap.version >= 0
            and not self.outbox_writer.problem
            and level.num_bytes < self._config.outbox_bytes
        )

    @property
    def _is_newer_due(self) -> bool:
        pulled = self.swap.due()
        return pulled is not None and pulled.version != self.swap.version

    def _version_to_ask(self) -> int | None:
        return self.swap.version if self._may_begin else None

    async def _conduct(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            tickets = self._bell.ticket(), self.news.ticket()
            if self._session.is_draining:
                self._return_prefetched()
                if self.collector.is_empty and not self.evaluation_requests.is_expected:
                    return
            now = self._clock.monotonic()
            self.collector.groups.work(len(self._drafts) > 0, now)
            self.swap.forget_roots(self._drafts.oldest_version)
            self.collector.log.say(
                tokens_per_s=self.collector.tokens.per_s(now), now=now, version=self.swap.version,
                head=self._policy.head_version, level=self._outbox.level(), num_ahead=len(self.prefetch),
            )  # fmt: skip
            if await self._exchange(tasks) or await self._go_on(tasks) or await self._begin():
                continue
            waits = [wait for wait in (self.swap.wait_s, self._ask_wait_s()) if wait is not None and wait > 0]
            await ring_or_time(*tickets, clock=self._clock, seconds=min(waits, default=None))

    async def _exchange(self, tasks: asyncio.TaskGroup) -> bool:
        """Give the engine what is due, beside what is under way where that may be; whether anything was done."""
        pulled = self.swap.due()
        if pulled is None or self.is_swapping or self._is_ending:
            return False
        # One engine of several is started again beside what the others do.
        is_mend = pulled.version == self.swap.version
        if not is_mend and (
            self.evaluation_requests.keeps_version or (self._drafts.num_running and self._config.swap == "drain")
        ):
            return False
        self.is_swapping = True
        if self._drafts.num_running or is_mend:
            tasks.create_task(self._take(pulled))
        else:
            await self._take(pulled)
        return True

    async def _take(self, pulled: PulledVersion) -> None:
        try:
            await self.swap.take(pulled)
        finally:
            self.is_swapping = False
        if self.swap.version == pulled.version:
            # What was refused to the old version may be given to the new one.
            self._work.ask_time = self._clock.monotonic()
        self.news.ring()

    @property
    def _is_swap_first(self) -> bool:
        """Whether nothing may begin before a swap that is due, so that no turn mixes versions."""
        return self._config.swap == "drain" and self._is_newer_due and not self.evaluation_requests.keeps_version

    async def _go_on(self, tasks: asyncio.TaskGroup) -> bool:
        """Give the engine the turns that can be drawn, before anything new; whether anything was done."""
        is_held = self._is_swap_first or self._is_ending or self.swap.version < 0
        if not self.collector.turns or is_held:
            return False
        turns, self.collector.turns = self.collector.turns, []
        keys = [next(self._builder.keys) for _ in turns]
        for key, turn in zip(keys, turns, strict=True):
            self._drafts.begin_turn(key, turn.draft, turn.member)
        requests = [
            Request(key=key, prompt=turn.context, seed=turn.seed, num_completions=1)
            for key, turn in zip(keys, turns, strict=True)
        ]
        count, too_long, error = await asyncio.to_thread(self._submit_all, requests)
        for place in too_long:
            if self._drafts.lose(keys[place]) is not None:
                self.collector.end_turn(turns[place], FinishReason.CONTEXT, tasks)
        if error is not None:
            left = [place for place in range(count, len(turns)) if self._drafts.lose(keys[place]) is not None]
            self.collector.turns += [turns[place] for place in left]
            self._note_failure(error)
        if count:
            self.news.ring()
        return count > 0

    def _submit_all(self, requests: Sequence[Request]) -> tuple[int, dict[int, PromptRefused], EngineError | None]:
        """How many of them the engine has seen, which of these are too long, and why not all; in a thread."""
        too_long = {}
        for place, request in enumerate(requests):
            try:
                self._engine.submit(request)
            except PromptRefused as error:
                too_long[place] = error
            except EngineError as error:
                return place, too_long, error
        return len(requests), too_long, None

    def _note_failure(self, error: EngineError) -> None:
        # During a swap the engine takes nothing; a swap that failed says so itself.
        if not self.is_swapping and self.swap.version >= 0:
            self.swap.note_failure(error)

    async def _begin(self) -> bool:
        """Give the engine what it has room for; whether anything was done."""
        if not self._may_begin or self._is_swap_first:
            return False
        count = self._num_wanted()
        if count and not self._config.work_ahead_s and not len(self.prefetch):
            if (self._ask_wait_s() or 0.0) > 0:
                return False
            await self.prefetch.ask(self.swap.version, count)
            if not len(self.prefetch):
                return True
        work = self.prefetch.look(count)
        if not work:
            return False
        version = self.swap.version
        drafts, refused = await asyncio.to_thread(
            self._builder.begin, work, version=version, state_root=self.swap.reported.state_root
        )
        if self._may_begin and self.swap.version == version and self.prefetch.look(1) == work[:1]:
            self.prefetch.drop(len(work))
            return await self._submit(drafts, refused)
        return True

    def _num_wanted(self) -> int:
        """Groups to begin now: a few more than there is room for, so that the engine never waits for this loop."""
        if not self._config.work_ahead_s:
            return self._room if self.collector.is_empty else 0
        rows, size = self._engine.max_running, self._builder.group_size
        if self._drafts.num_unscored >= MAX_UNSCORED * rows:
            return 0
        wanted = (
            max(0, rows + max(size, rows // 4) - self._drafts.num_running - self.evaluation_requests.num_running)
            // size
        )
        if self._builder.conversations is not None:
            # While tools run rows are free, and what begins then waits for a place among the live episodes.
            num_playing = sum(draft.conversation is not None for draft in self._drafts)
            wanted = min(wanted, max(1, self._builder.conversations.max_live // size) - num_playing)
        return max(0, wanted)

    def _ask_wait_s(self) -> float | None:
        """Seconds until work may be asked for by this loop; None where another one asks, or nothing can be begun."""
        if self._config.work_ahead_s or not (self.collector.is_empty and self._may_begin):
            return None
        return self._work.ask_time - self._clock.monotonic()

    async def _submit(self, drafts: Sequence[GroupDraft], refused: Sequence[Refused]) -> bool:
        """Hand requests to the engine, and prompts back that were refused; whether anything became of them."""
        if drafts:
            self.collector.begin(drafts)
        in_flight, size = self._in_flight_now(), self._builder.group_size
        requests = [
            Request(key=draft.key, prompt=draft.prompt_token_ids, seed=draft.seed, num_completions=size)
            for draft in drafts
        ]

        def submit() -> tuple[int, dict[int, PromptRefused], EngineError | None]:
            self._in_flight.note(in_flight)
            return self._submit_all(requests)

        count, too_long, error = await asyncio.to_thread(submit)
        found = [(drafts[n].assignment, why) for n, why in too_long.items() if self._drafts.withdraw(drafts[n])]
        self.collector.refuse([*refused, *found])
        if error is not None:
            untaken = [draft for draft in drafts[count:] if self._drafts.withdraw(draft)]
            self.prefetch.put_back([draft.assignment for draft in untaken])
            self._note_failure(error)
        if count > len(too_long):
            self.collector.refusals.passed()
            self.news.ring()
        elif self.collector.refusals.problem:
            # Data that is refused row by row is not asked for without a pause.
            self._work.ask_time = max(self._work.ask_time, self._clock.monotonic() + REFUSED_S)
        return count > 0 or bool(refused)

    def _return_prefetched(self) -> None:
        self.collector.give_back(self.prefetch.clear())
