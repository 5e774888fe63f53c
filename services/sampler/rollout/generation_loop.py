"""The generation loop: swaps weights and begins groups; `completion_collector` takes what ends.

With `swap = "drain"` no completion and no turn mixes versions: a due swap lets none begin and waits for those in
flight. With `work_ahead_s = 0` the sampler leases only after all earlier groups are spooled. Memory holds at most the
groups in the engine and a few fills of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from heterorl.common.errors import DiskFull, EngineError, PromptRefused
from heterorl.common.generation.inference_engine import Engine, Request, ScoredText
from heterorl.common.process import metrics
from heterorl.common.process.clock import Bell, ring_or_time
from heterorl.common.pull.puller import PulledVersion
from heterorl.common.tasks.environments.episodes import Episodes
from heterorl.common.types.rollout import FinishReason, WorkAssignment
from heterorl.common.types.run import Heartbeat
from heterorl.sampler.outbox.delivery import OutboxWriter
from heterorl.sampler.outbox.turn_store import KeptGroup
from heterorl.sampler.rollout.completion_collector import CompletionCollector
from heterorl.sampler.rollout.group_builder import GroupBuilder, Refused
from heterorl.sampler.rollout.in_flight_groups import EvaluationRequests, GroupDraft, InFlightNote, TurnJournal
from heterorl.sampler.rollout.prefetch import Prefetch, WorkClient
from heterorl.sampler.rollout.weight_swap import WeightSwap
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.sampler.site_session import Session
from heterorl.sampler.weight_sync import WeightSync

_LOG = logging.getLogger(__name__)
MAX_UNSCORED = 2
"""Fills of the engine that may wait for rewards; with more, no group begins."""
REFUSED_S = 1.0
"""Pause after an answer whose prompts were all refused."""


@dataclass(kw_only=True, eq=False, repr=False)
class GenerationLoop:
    """The loops around one engine."""

    config: SamplerConfig
    engine: Engine
    canary: Sequence[ScoredText]
    builder: GroupBuilder
    policy: WeightSync
    session: Session
    now: Callable[[], float]
    in_flight: InFlightNote
    left: Sequence[KeptGroup]

    def __post_init__(self) -> None:
        self.outbox, self.clock, self.bell = self.session.outbox, self.session.clock, self.session.bell
        self.outbox_writer = OutboxWriter(
            outbox=self.outbox, delay=self.config.delay, seed=self.config.delay_seed, clock=self.clock, now=self.now,
            rng=self.session.rng, numbering=self.session.numbering,
        )  # fmt: skip
        # Rings at events of groups in flight; the sampler's other loops need not wake for every completion.
        self.news = Bell()
        self._work = WorkClient(self.session)
        self.swap = WeightSwap(engine=self.engine, canary=self.canary, policy=self.policy, session=self.session)
        self.evaluation_requests = EvaluationRequests()
        self.is_swapping = False
        """Whether the engine is loading weights."""
        self._journal = TurnJournal(
            turns=self.outbox.turns, left=self.left, state_roots=lambda: self.swap.state_roots, clock=self.clock,
            now=self.now, news=self.news,
        )  # fmt: skip
        self.collector = CompletionCollector(
            builder=self.builder, outbox_writer=self.outbox_writer, swap=self.swap, work=self._work, news=self.news,
            evaluation_requests=self.evaluation_requests, journal=self._journal,
        )  # fmt: skip
        self._drafts = self.collector.drafts
        self._room = max(1, self.engine.max_running // self.builder.group_size)
        self.prefetch = Prefetch(
            work=self._work, num_prompts=self.builder.task.num_prompts, room_groups=self._room,
            rate=self.collector.groups, news=self.news, begun=self.collector.unsettled, spooled=self.outbox.assignments,
        )  # fmt: skip
        self._is_making = False
        self._made: tuple[list[WorkAssignment], list[GroupDraft], list[Refused]] | None = None
        """Next groups, before their submission."""
        self._is_ending = False

    def reported(self) -> Heartbeat:
        return replace(
            self.swap.reported,
            tokens_per_s=self.collector.tokens.per_s(self.clock.monotonic()),
            problem=self.swap.problem or self.outbox_writer.problem or self.policy.problem or self.collector.problem,
        )

    async def generate(self) -> None:
        """Generate until the run drains and every group in flight is spooled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = self.collector.loops(tasks)
                if self.config.work_ahead_s:
                    may_ask = lambda: self.swap.version if self._may_begin else None  # noqa: E731
                    loops.append(tasks.create_task(self.prefetch.keep(bell=self.bell, may_ask=may_ask)))
                await self._resume(tasks)
                await self._conduct(tasks)
                for loop in loops:
                    loop.cancel()
        finally:
            self.collector.close()
        await self.collector.hand_back()

    async def stop(self) -> None:
        """Begin no groups, spool ended ones, hand back others; takes seconds."""
        self._is_ending = True
        await asyncio.to_thread(self.engine.stop)
        self._return_prefetched()
        await self.collector.end(self.prefetch.end)
        async with self.swap.running:
            # The thread cannot be cancelled.
            pass

    async def empty(self) -> None:
        """Wait until every group is delivered, delayed ones at once."""
        try:
            await asyncio.to_thread(self.outbox.release_by, self.now())
        except DiskFull as error:
            _LOG.warning("the drain waits for the delays of groups: %s", error)
        self.bell.ring()
        ticket, num_groups = self.bell.ticket(), self.outbox.level().num_groups
        if num_groups:
            _LOG.info("the drain waits until %d groups are delivered", num_groups)
        while num_groups:
            await ticket.wait()
            ticket, num_groups = self.bell.ticket(), self.outbox.level().num_groups

    async def _resume(self, tasks: asyncio.TaskGroup) -> None:
        left, self._journal.left = self._journal.left, ()
        newest = self.policy.record.highest_version
        resumed = []
        for group in left:
            if group.newest_version > newest:
                # An operator agreed that the run went back: no coordinator takes such a group.
                _LOG.warning("assignment %d is returned: its version is of another history", group.first.assignment)
                self.collector.give_back([group.first.assignment])
                continue
            draft = await asyncio.to_thread(self.builder.resume, group, begun_at=self._journal.begun_at(group))
            if draft is None:
                _LOG.warning("assignment %d is returned: its prompt has changed", group.first.assignment)
                self.collector.give_back([group.first.assignment])
                continue
            resumed.append((draft, group))
        await self._journal.note_resumed([group.first.assignment for _, group in resumed])
        # Only now: live episodes could hold the processes in which a prompt's own episode begins, and their next turns
        # would wait for this loop.
        for draft, group in resumed:
            self.collector.resume(draft, group, tasks)
        if resumed:
            num_turns = sum(len(group.turns) for _, group in resumed)
            _LOG.info("%d groups of an earlier process go on after %d turns", len(resumed), num_turns)

    @property
    def num_in_flight(self) -> int:
        return len(self._drafts)

    @property
    def _may_begin(self) -> bool:
        level = self.outbox.level()
        metrics.OUTBOX_GROUPS.set(level.num_groups)
        return (
            not self.session.is_draining
            and not self._is_ending
            and self.swap.version >= 0
            and not self.outbox_writer.problem
            and level.num_bytes < self.config.outbox_bytes
        )

    async def _conduct(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            tickets = self.bell.ticket(), self.news.ticket()
            if self.session.is_draining:
                self._return_prefetched()
                if self.collector.is_empty and not self.evaluation_requests.is_expected:
                    return
            now = self.clock.monotonic()
            self.collector.groups.work(len(self._drafts) > 0, now)
            self.swap.forget_roots(self._drafts.oldest_version)
            self.collector.log.say(
                tokens_per_s=self.collector.tokens.per_s(now), now=now, version=self.swap.version,
                head=self.policy.head_version,
            )  # fmt: skip
            if await self._exchange(tasks) or await self._go_on(tasks) or await self._begin(tasks):
                continue
            waits = [wait for wait in (self.swap.wait_s, self._ask_wait_s()) if wait is not None and wait > 0]
            await ring_or_time(*tickets, clock=self.clock, seconds=min(waits, default=None))

    async def _exchange(self, tasks: asyncio.TaskGroup) -> bool:
        """Load due weights, during generation if allowed; returns whether it began."""
        pulled = self.swap.due()
        if pulled is None or self.is_swapping or self._is_ending:
            return False
        is_kept = self.evaluation_requests.keeps_version and self.swap.version >= 0
        if is_kept or (self._drafts.num_running and self.config.swap == "drain"):
            return False
        self.is_swapping = True
        if self._drafts.num_running:
            tasks.create_task(self._take(pulled))
        else:
            await self._take(pulled)
        return True

    async def _take(self, pulled: PulledVersion) -> None:
        try:
            if await self.swap.take(pulled):
                self._return_prefetched()
        finally:
            self.is_swapping = False
            self.collector.note_swapped()
        if self.swap.version == pulled.version:
            # Work refused to the old version may be granted to the new one.
            self._work.ask_time = self.clock.monotonic()
        self.news.ring()

    @property
    def _is_swap_first(self) -> bool:
        """Whether a due swap precedes new turns, so none mixes versions."""
        if self.config.swap != "drain" or self.evaluation_requests.keeps_version:
            return False
        return self.swap.due() is not None

    async def _go_on(self, tasks: asyncio.TaskGroup) -> bool:
        """Submit turns before new groups; returns whether any was submitted."""
        is_held = self._is_swap_first or self._is_ending or self.swap.version < 0
        if not self.collector.turns or is_held:
            return False
        turns, self.collector.turns = self.collector.turns, []
        keys = [next(self.builder.keys) for _ in turns]
        for key, turn in zip(keys, turns, strict=True):
            self._drafts.add(key, 1, (turn.draft, turn.member))
        requests = [
            Request(
                key=key,
                prompt=turn.context,
                seed=turn.seed,
                num_completions=1,
                first_member=turn.member,
                may_continue=True,
            )
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
        """Submit in a thread; returns the number seen, refusals, and the error."""
        too_long = {}
        for place, request in enumerate(requests):
            try:
                self.engine.submit(request)
            except PromptRefused as error:
                too_long[place] = error
            except EngineError as error:
                return place, too_long, error
        return len(requests), too_long, None

    def _note_failure(self, error: EngineError) -> None:
        # During a swap the engine refuses requests, and a failed swap reports its own error.
        if not self.is_swapping and self.swap.version >= 0:
            self.swap.note_failure(error)

    async def _begin(self, tasks: asyncio.TaskGroup) -> bool:
        """Submit what the engine has room for; returns whether anything was done."""
        if not self._may_begin or self._is_swap_first or self._is_making:
            return False
        if self._made is not None:
            (work, drafts, refused), self._made = self._made, None
            if self.prefetch.look(len(work)) == work:
                self.prefetch.drop(len(work))
                return await self._submit(drafts, refused)
        count = self._num_wanted()
        if count and not self.config.work_ahead_s and not len(self.prefetch):
            if (self._ask_wait_s() or 0.0) > 0:
                return False
            await self.prefetch.ask(self.swap.version, count)
            if not len(self.prefetch):
                return True
        work = self._playable(self.prefetch.look(count))
        if not work:
            return False
        self._is_making = True
        tasks.create_task(self._make(work))
        return False

    async def _make(self, work: list[WorkAssignment]) -> None:
        """Make groups while members go on: a prompt may take seconds."""
        drafts, refused = await asyncio.to_thread(self.builder.begin, work)
        self._is_making, self._made = False, (work, drafts, refused)
        self.news.ring()

    def _num_wanted(self) -> int:
        if not self.config.work_ahead_s:
            return self._room if self.collector.is_empty else 0
        rows, size = self.engine.max_running, self.builder.group_size
        if self._drafts.num_unscored >= MAX_UNSCORED * rows:
            return 0
        num_running = self._drafts.num_running + self.evaluation_requests.num_running
        return max(0, rows + max(size, rows // 4) - num_running) // size

    def _playable(self, work: list[WorkAssignment]) -> list[WorkAssignment]:
        """The first of these whose environments have room for their members.

        While tools run rows are free, but a new member would wait for a place among the live episodes, as would a
        prompt that begins an episode.
        """
        conversations = self.builder.conversations
        if conversations is None or not self.config.work_ahead_s:
            return work
        playing: Counter[Episodes] = Counter()
        for draft in self._drafts:
            if draft.conversation is not None:
                playing[draft.conversation.spec.episodes] += self.builder.group_size - len(draft.completions)
        for place, assignment in enumerate(work):
            episodes = conversations.at(assignment.prompt_index)
            if episodes is None:
                continue
            if playing[episodes] and playing[episodes] + self.builder.group_size > episodes.max_live:
                return work[:place]
            playing[episodes] += self.builder.group_size
        return work

    def _ask_wait_s(self) -> float | None:
        """Seconds until this loop may ask for work; None: it may not."""
        if self.config.work_ahead_s or not (self.collector.is_empty and self._may_begin):
            return None
        return self._work.ask_time - self.clock.monotonic()

    async def _submit(self, drafts: Sequence[GroupDraft], refused: Sequence[Refused]) -> bool:
        """Submit groups and hand refused prompts back; returns whether anything was done."""
        if drafts:
            self.collector.begin(drafts)
        in_flight, size = [draft.assignment.id for draft in self._drafts], self.builder.group_size
        requests = [
            Request(
                key=draft.key,
                prompt=draft.prompt_token_ids,
                seed=draft.seed,
                num_completions=size,
                may_continue=draft.conversation is not None,
            )
            for draft in drafts
        ]

        def submit() -> tuple[int, dict[int, PromptRefused], EngineError | None]:
            self.in_flight.note(in_flight)
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
            # Pause between questions if every row of the data is refused.
            self._work.ask_time = max(self._work.ask_time, self.clock.monotonic() + REFUSED_S)
        return count > 0 or bool(refused)

    def _return_prefetched(self) -> None:
        self.collector.give_back(self.prefetch.clear())
