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
from heterorl.sampler.outbox.outbox import Outbox, Spooling
from heterorl.sampler.outbox.turns import KeptGroup
from heterorl.sampler.rollout.drafts import Draft, HeldOut, Journal, UnderWay
from heterorl.sampler.rollout.harvest import Harvest
from heterorl.sampler.rollout.maker import Refused, RolloutMaker
from heterorl.sampler.rollout.swap import Swap
from heterorl.sampler.rollout.work import Reserve, Work
from heterorl.sampler.session import Reported, Session
from heterorl.sampler.sync import PolicySync

_LOG = logging.getLogger(__name__)
MAX_UNSCORED = 2
"""Fills of the engine that may wait for their rewards; then nothing begins until the rewards have come after."""
REFUSED_S = 1.0
"""Pause where nothing can be generated of any prompt that is given."""


class Generation:
    """The loops around one engine."""

    def __init__(
        self,
        *,
        config: SamplerConfig,
        api: SamplerApi,
        engine: Engine,
        canary: Sequence[ScoredText] = (),
        maker: RolloutMaker,
        outbox: Outbox,
        policy: PolicySync,
        session: Session,
        clock: Clock,
        bell: Bell,
        numbering: asyncio.Lock,
        rng: random.Random,
        now: Callable[[], float],
        under_way: UnderWay,
        left: Sequence[KeptGroup],
    ) -> None:
        self._under_way = under_way
        self.spooling = Spooling(
            outbox=outbox, delay=config.delay, seed=config.seed, clock=clock, now=now, rng=rng, numbering=numbering
        )
        self._config = config
        self._engine = engine
        self._maker = maker
        self._outbox = outbox
        self._policy = policy
        self._session = session
        self._clock = clock
        self._bell = bell
        # What happens to groups under way; the sampler's other loops need not look at every completion.
        self.news = Bell()
        self._work = Work(api=api, session=session, clock=clock, rng=rng)
        self.swap = Swap(
            api=api, engine=engine, canary=canary, policy=policy, session=session, clock=clock, rng=rng,
            on_quarantine=self._return_reserve,
        )  # fmt: skip
        self.held_out = HeldOut()
        self.is_swapping = False
        """Whether the engine is being given weights."""
        self._journal = Journal(
            turns=outbox.turns, left=left, state_roots=lambda: self.swap.state_roots, clock=clock, now=now,
            news=self.news,
        )  # fmt: skip
        self.harvest = Harvest(
            engine=engine, maker=maker, spooling=self.spooling, swap=self.swap, work=self._work, clock=clock,
            bell=bell, news=self.news, held_out=self.held_out, journal=self._journal,
        )  # fmt: skip
        self._drafts = self.harvest.drafts
        self._room = max(1, engine.max_running // maker.group_size)
        self.reserve = Reserve(
            work=self._work, num_prompts=maker.task.num_prompts, room_groups=self._room,
            work_ahead_s=lambda: session.work_ahead_s, rate=self.harvest.groups, clock=clock, news=self.news,
            under_way=self._under_way_now,
        )  # fmt: skip
        self._is_ending = False

    def reported(self) -> Reported:
        """What a heartbeat says of this."""
        return replace(
            self.swap.reported,
            tokens_per_s=self.harvest.tokens.per_s(self._clock.monotonic()),
            problem=self.spooling.problem or self._policy.problem or self.harvest.problem,
        )

    async def generate(self) -> None:
        """Generate until the run drains and everything under way is spooled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = self.harvest.loops(tasks)
                if self._config.work_ahead_s:
                    loops.append(tasks.create_task(self.reserve.keep(bell=self._bell, may_ask=self._version_to_ask)))
                await self._resume(tasks)
                await self._conduct(tasks)
                for loop in loops:
                    loop.cancel()
        finally:
            self.harvest.close()
        await self.harvest.hand_back()

    async def stop(self) -> None:
        """Begin nothing more: spool what has ended, give up the rest and hand it back; takes seconds at most."""
        self._is_ending = True
        await asyncio.to_thread(self._engine.cancel)
        self._return_reserve()
        await self.harvest.end()
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

    def _under_way_now(self) -> list[int]:
        return [draft.assignment.id for draft in self._drafts]

    async def _resume(self, tasks: asyncio.TaskGroup) -> None:
        """Go on with what an earlier process had under way."""
        left, self._journal.left = self._journal.left, ()
        num_turns = 0
        for group in left:
            draft = await asyncio.to_thread(self._maker.resume, group, begun_at=self._journal.begun_at(group))
            if draft is None:
                _LOG.warning("assignment %d goes back: its prompt is another one now", group.first.assignment)
                self.harvest.give_back([group.first.assignment])
                continue
            num_turns += len(group.turns)
            self.harvest.resume(draft, group, tasks)
        if num_turns:
            _LOG.info("going on with %d groups of an earlier process, %d turns of them", len(self._drafts), num_turns)

    @property
    def num_under_way(self) -> int:
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
            and not self.spooling.problem
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
                self._return_reserve()
                if self.harvest.is_empty and not self.held_out.is_expected:
                    return
            now = self._clock.monotonic()
            self.harvest.groups.work(len(self._drafts) > 0, now)
            self.swap.forget_roots(self._drafts.oldest_version)
            self.harvest.log.say(
                tokens_per_s=self.harvest.tokens.per_s(now), now=now, version=self.swap.version,
                head=self._policy.head_version, level=self._outbox.level(), num_ahead=len(self.reserve),
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
        if not is_mend and (self.held_out.keeps_version or (self._drafts.num_running and self._config.swap == "drain")):
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
        return self._config.swap == "drain" and self._is_newer_due and not self.held_out.keeps_version

    async def _go_on(self, tasks: asyncio.TaskGroup) -> bool:
        """Give the engine the turns that can be drawn, before anything new; whether anything was done."""
        is_held = self._is_swap_first or self._is_ending or self.swap.version < 0
        if not self.harvest.turns or is_held:
            return False
        turns, self.harvest.turns = self.harvest.turns, []
        keys = [next(self._maker.keys) for _ in turns]
        for key, turn in zip(keys, turns, strict=True):
            self._drafts.begin_turn(key, turn.draft, turn.member)
        requests = [
            Request(key=key, prompt=turn.context, seed=turn.seed, num_completions=1)
            for key, turn in zip(keys, turns, strict=True)
        ]
        count, too_long, error = await asyncio.to_thread(self._submit_all, requests)
        for place in too_long:
            if self._drafts.lose(keys[place]) is not None:
                self.harvest.end_turn(turns[place], FinishReason.CONTEXT, tasks)
        if error is not None:
            left = [place for place in range(count, len(turns)) if self._drafts.lose(keys[place]) is not None]
            self.harvest.turns += [turns[place] for place in left]
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
        if count and not self._config.work_ahead_s and not len(self.reserve):
            if (self._ask_wait_s() or 0.0) > 0:
                return False
            await self.reserve.ask(self.swap.version, count)
            if not len(self.reserve):
                return True
        work = self.reserve.look(count)
        if not work:
            return False
        version = self.swap.version
        drafts, refused = await asyncio.to_thread(
            self._maker.begin, work, version=version, state_root=self.swap.reported.state_root
        )
        if self._may_begin and self.swap.version == version and self.reserve.look(1) == work[:1]:
            self.reserve.drop(len(work))
            return await self._submit(drafts, refused)
        return True

    def _num_wanted(self) -> int:
        """Groups to begin now: a few more than there is room for, so that the engine never waits for this loop."""
        if not self._config.work_ahead_s:
            return self._room if self.harvest.is_empty else 0
        rows, size = self._engine.max_running, self._maker.group_size
        if self._drafts.num_unscored >= MAX_UNSCORED * rows:
            return 0
        wanted = max(0, rows + max(size, rows // 4) - self._drafts.num_running - self.held_out.num_running) // size
        if self._maker.conversations is not None:
            # While tools run rows are free, and what begins then waits for a place among the live episodes.
            num_playing = sum(draft.conversation is not None for draft in self._drafts)
            wanted = min(wanted, max(1, self._maker.conversations.max_live // size) - num_playing)
        return max(0, wanted)

    def _ask_wait_s(self) -> float | None:
        """Seconds until work may be asked for by this loop; None where another one asks, or nothing can be begun."""
        if self._config.work_ahead_s or not (self.harvest.is_empty and self._may_begin):
            return None
        return self._work.ask_time - self._clock.monotonic()

    async def _submit(self, drafts: Sequence[Draft], refused: Sequence[Refused]) -> bool:
        """Hand requests to the engine, and prompts back that were refused; whether anything became of them."""
        if drafts:
            self.harvest.begin(drafts)
        under_way, size = self._under_way_now(), self._maker.group_size
        requests = [
            Request(key=draft.key, prompt=draft.prompt_token_ids, seed=draft.seed, num_completions=size)
            for draft in drafts
        ]

        def submit() -> tuple[int, dict[int, PromptRefused], EngineError | None]:
            self._under_way.note(under_way)
            return self._submit_all(requests)

        count, too_long, error = await asyncio.to_thread(submit)
        found = [(drafts[n].assignment, why) for n, why in too_long.items() if self._drafts.withdraw(drafts[n])]
        self.harvest.refuse([*refused, *found])
        if error is not None:
            untaken = [draft for draft in drafts[count:] if self._drafts.withdraw(draft)]
            self.reserve.put_back([draft.assignment for draft in untaken])
            self._note_failure(error)
        if count > len(too_long):
            self.harvest.refusals.passed()
            self.news.ring()
        elif self.harvest.refusals.problem:
            # Data that is refused row by row is not asked for without a pause.
            self._work.ask_time = max(self._work.ask_time, self._clock.monotonic() + REFUSED_S)
        return count > 0 or bool(refused)

    def _return_reserve(self) -> None:
        self.harvest.give_back(self.reserve.clear())
