"""The completion collector: scores completions, spools groups, returns assignments without a group.

A group is in the outbox before its assignment is forgotten. A reward or environment that fails costs one member, and
the group if fewer than `min_members` are left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from heterorl.common.errors import EngineError, EpisodeError, RewardError
from heterorl.common.generation.inference_engine import Completion, Finished
from heterorl.common.process import metrics
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Bell, ends_within, ring_or_time
from heterorl.common.process.logs import Rarely
from heterorl.common.tasks.environments.environment_task import cure_of
from heterorl.common.types.rollout import FinishReason, ReturnReason, RewardPart
from heterorl.sampler.outbox.delivery import OutboxWriter
from heterorl.sampler.outbox.turn_store import KeptGroup
from heterorl.sampler.rollout.episode_runner import End, EpisodeRunner, Turn
from heterorl.sampler.rollout.group_builder import GroupBuilder, Refusals, Refused, Scorer
from heterorl.sampler.rollout.in_flight_groups import (
    EvaluationRequests,
    GroupDraft,
    InFlightGroups,
    TurnJournal,
    turns_of,
)
from heterorl.sampler.rollout.prefetch import GROUPS_S, TOKENS_S, Rate, WorkClient
from heterorl.sampler.rollout.weight_swap import WeightSwap

_LOG = logging.getLogger(__name__)
LAST_SCORES_S = 3.0
"""Longest wait at a stop for rewards of completions that ended."""
HAND_BACK_S = 3.0
"""Longest wait at an end for a coordinator that takes assignments back."""
LOG_EVERY_S = 60.0
HUNG_S, HUNG_TIMES = 600.0, 10.0
"""An engine may give nothing for so long, and for so many times its longest completion."""
SWAP_S = 3600.0
"""And for so long while it swaps: the limits of vLLM's swap."""
_RETURNED_AS = {
    FinishReason.REWARD_FAILED: ReturnReason.REWARD_FAILED,
    FinishReason.ENGINE_FAILED: ReturnReason.ENGINE_FAILED,
    FinishReason.ENVIRONMENT_FAILED: ReturnReason.ENVIRONMENT_FAILED,
    FinishReason.TOOL_LOST: ReturnReason.TOOL_LOST,
}


@dataclass(kw_only=True, eq=False, repr=False)
class CompletionCollector:
    """Takes the groups in flight, `drafts`, to the outbox.

    The session's bell rings when the outbox has more groups, `news` at every event of a group in flight.
    """

    builder: GroupBuilder
    outbox_writer: OutboxWriter
    swap: WeightSwap
    work: WorkClient
    news: Bell
    evaluation_requests: EvaluationRequests
    journal: TurnJournal

    def __post_init__(self) -> None:
        self.engine, self.clock = self.swap.engine, self.work.clock
        self.drafts = InFlightGroups(group_size=self.builder.group_size)
        self.tokens, self.groups = Rate(TOKENS_S), Rate(GROUPS_S)
        self.tokens.work(True, self.clock.monotonic())
        self.log = WorkLog()
        self._scorer = Scorer(self.builder)
        self._said = Rarely(_LOG, self.clock.monotonic)
        own = self.builder
        self._runner: EpisodeRunner | None = None
        if own.conversations is not None:
            self._runner = EpisodeRunner(
                max_live=own.conversations.max_live, max_new_tokens=own.max_new_tokens,
                max_trajectory_tokens=own.max_trajectory_tokens, clock=self.clock, note=self.journal.note,
            )  # fmt: skip
        self._pass_s: float | None = None
        """When the engine was asked, or has swapped since; None: it is not asked."""
        self._token_s = 0.0
        """Most seconds a token of a completion took."""
        self._scoring: dict[int, list[asyncio.Task[None]]] = {}
        self.turns: list[Turn] = []
        """Members whose next turn can be submitted."""
        self._returned: list[tuple[int, ReturnReason | None]] = []
        self._backoff = Backoff(clock=self.clock, rng=self.work.session.rng)
        self.refusals = Refusals()

    @property
    def is_empty(self) -> bool:
        return not (self.drafts or self.outbox_writer.num_waiting)

    def unsettled(self) -> list[int]:
        """Assignments in flight, before the disk, or not taken back yet."""
        drafts, returned = [draft.assignment.id for draft in self.drafts], [number for number, _ in self._returned]
        return [*drafts, *self.outbox_writer.assignments, *returned]

    def begin(self, drafts: Sequence[GroupDraft]) -> None:
        now = self.clock.monotonic()
        for draft in drafts:
            draft.version, draft.begun_at = self.swap.version, now
            self.drafts.begin(draft)
        self.groups.work(True, now)

    def resume(self, draft: GroupDraft, left: KeptGroup, tasks: asyncio.TaskGroup) -> None:
        assert self._runner is not None, "it has a conversation"
        for kept in left.turns:
            self.swap.state_roots.setdefault(kept.turn.oldest_version, kept.turn.state_root)
        self.drafts.resume(draft)
        self.groups.work(True, self.clock.monotonic())
        for member in range(self.builder.group_size):
            resuming = functools.partial(self._runner.resume, draft, member, turns_of(left, member))
            self._follow(draft, self._play(resuming), tasks)

    def give_back(self, assignments: Sequence[int]) -> None:
        if assignments:
            self._returned += [(number, None) for number in assignments]
            self.news.ring()

    def refuse(self, refused: Sequence[Refused]) -> None:
        for assignment, error in refused:
            source = self.builder.task.source_of(assignment.prompt_index)
            self._returned.append((assignment.id, self.refusals.note(assignment, error, source=source)))
        if refused:
            self.news.ring()

    @property
    def problem(self) -> str:
        """Why groups that begin do not complete; empty if some do."""
        return self.refusals.problem or self._scorer.failures.problem

    def loops(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        return [tasks.create_task(loop) for loop in (self._collect(tasks), self._spool(), self._return())]

    async def end(self, late: Callable[[], Awaitable[Sequence[int]]]) -> None:
        """Spool ended groups, hand back others and `late` ones, within seconds.

        Groups for the next process stay. The loops must run meanwhile.
        """
        await self._leave()
        self._lose_all()
        until = self.clock.monotonic() + LAST_SCORES_S
        while not (self.is_empty or self.outbox_writer.problem):
            ticket, left_s = self.news.ticket(), until - self.clock.monotonic()
            if left_s <= 0:
                break
            await ring_or_time(ticket, clock=self.clock, seconds=left_s)
        for draft in list(self.drafts):
            self.drafts.give_up(draft.key)
            self._give_up(draft)
        await self.hand_back(late)

    def close(self) -> None:
        # A thread that waits for the engine would delay the end of the process.
        self.engine.cancel()
        self._scorer.close()
        if self._runner is not None:
            self._runner.close()

    async def _collect(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            ticket = self.news.ticket()
            ended: list[Finished] = []
            was_swapping = self.swap.running.locked()
            if self.drafts.num_running or self.evaluation_requests.num_running:
                self._pass_s = self.clock.monotonic()
                try:
                    ended = await asyncio.to_thread(self.engine.collect)
                except EngineError as error:
                    # A failed swap reports its own error; else one of the rows may be the cause, and return forever.
                    is_by_swap = was_swapping or self.swap.running.locked() or self.swap.version < 0
                    self._lose_all(None if is_by_swap else ReturnReason.ENGINE_FAILED)
                    if not is_by_swap:
                        self.swap.note_failure(error)
                    self.news.ring()
                self._note_pass(ended)
            if ended:
                self._take_in(ended, tasks)
                self.news.ring()
            else:
                await ticket.wait()

    def note_swapped(self) -> None:
        """Count the silence of the engine from now."""
        if self._pass_s is not None:
            self._pass_s = self.clock.monotonic()

    def _note_pass(self, ended: Sequence[Finished]) -> None:
        sizes = [one.completion.token_ids.size for one in ended]
        assert self._pass_s is not None, "the pass began"
        if any(sizes):
            self._token_s = max(self._token_s, (self.clock.monotonic() - self._pass_s) / max(sizes))
        self._pass_s = None

    def silent_s(self) -> float:
        """Seconds by which an engine is late; 0 before its first completions."""
        if self._pass_s is None or not self._token_s:
            return 0.0
        longest_s = self._token_s * max(self.builder.max_new_tokens, self.evaluation_requests.longest)
        limit_s = max(HUNG_S, HUNG_TIMES * longest_s) + SWAP_S * self.swap.running.locked()
        return max(0.0, self.clock.monotonic() - self._pass_s - limit_s)

    def _take_in(self, ended: Sequence[Finished], tasks: asyncio.TaskGroup) -> None:
        now, num_tokens = self.clock.monotonic(), 0
        for one in ended:
            num_tokens += one.completion.token_ids.size
            found = None if self.evaluation_requests.take(one) else self.drafts.take(one, now)
            if found is not None:
                self._ended(*found, one.completion, tasks)
        metrics.TOKENS.inc(num_tokens)
        self.tokens.add(num_tokens, now)

    def _ended(self, draft: GroupDraft, member: int, completion: Completion, tasks: asyncio.TaskGroup) -> None:
        """A completion ended: the member's only one, or one of its turns."""
        if self._runner is not None and draft.conversation is not None:
            self._follow(draft, self._play(functools.partial(self._runner.play, draft, member, completion)), tasks)
            return
        self._note_ended(draft, member, completion)
        members = self._scorer.ready(draft, member)
        if members:
            self._follow(draft, self._score(draft, members), tasks)

    def _note_ended(self, draft: GroupDraft, member: int, completion: Completion) -> None:
        draft.completions[member] = completion
        if len(draft.completions) == self.builder.group_size:
            metrics.GENERATE_SECONDS.observe(draft.generation_s)

    def _follow(self, draft: GroupDraft, work: Coroutine[Any, Any, None], tasks: asyncio.TaskGroup) -> None:
        self._scoring.setdefault(draft.key, []).append(tasks.create_task(work))

    def end_turn(self, turn: Turn, reason: FinishReason, tasks: asyncio.TaskGroup) -> None:
        assert self._runner is not None, "it gave the turn"
        ending = functools.partial(self._runner.end, turn.draft, turn.member, reason)
        self._follow(turn.draft, self._play(ending), tasks)

    async def _play(self, played: Callable[[], Coroutine[Any, Any, Turn | End]]) -> None:
        self._note_played(await played())
        self.news.ring()

    def _note_played(self, came: Turn | End) -> None:
        draft = came.draft
        if draft.key not in self.drafts:
            return
        if isinstance(came, Turn):
            self.turns.append(came)
            return
        draft.ended_at = self.clock.monotonic()
        self._note_ended(draft, came.member, came.completion)
        self._note_score(draft, came.member, came.parts, came.error)

    async def _score(self, draft: GroupDraft, members: Sequence[int]) -> None:
        try:
            rows = await self._scorer.score(draft.prompt, [draft.completions[member] for member in members])
        except RewardError as error:
            metrics.REWARD_ERRORS.labels(draft.source).inc()
            self._said.warn(
                "member", "prompt %d lost member %d (%s): %s (%s)",
                draft.prompt.index, members[0], FinishReason.REWARD_FAILED.value, error, self._scorer.failures.cure,
                count=len(members),
            )  # fmt: skip
            for member in members:
                draft.completions[member] = dataclasses.replace(
                    draft.completions[member], finish_reason=FinishReason.REWARD_FAILED
                )
                self._note_score(draft, member, (), error)
        else:
            for member, parts in zip(members, rows, strict=True):
                self._note_score(draft, member, parts)
        self.news.ring()

    def _note_score(
        self, draft: GroupDraft, member: int, parts: tuple[RewardPart, ...], error: Exception | None = None
    ) -> None:
        """Store a member's reward or loss, then judge whether its group ends."""
        if draft.num_lost > self.builder.group_size - (self.builder.min_members or self.builder.group_size):
            if self.drafts.give_up(draft.key) is not None:
                lost, cure = draft.completions[member].finish_reason, ""
                if draft.conversation is not None:
                    cure = cure_of(error) if error else "see the errors of the engine above"
                    error = EpisodeError(
                        f"its members are lost, the last one by {lost.value}{f': {error}' if error else ''}"
                    )
                assert error is not None, "a completion of one turn is lost by an error"
                self._scorer.failures.failed(error, cure=cure)
                self._said.warn(
                    "group", "assignment %d, prompt %d%s (%.60r), gives no group and is returned: %s",
                    draft.assignment.id, draft.prompt.index, draft.source and f" of {draft.source}",
                    draft.prompt.shown, error,
                )  # fmt: skip
                self.groups.add(1, self.clock.monotonic())
                self._give_up(draft, _RETURNED_AS[lost])
            return
        whole = self.drafts.score(draft.key, member, parts)
        if whole is not None:
            self._scoring.pop(draft.key, None)
            self._scorer.failures.passed()
            group = self.builder.group(whole, state_roots=self.swap.state_roots)
            self.outbox_writer.add(group)
            self.groups.add(1, self.clock.monotonic())
            self.log.num_groups += 1
            self.swap.note_age("generate", group.oldest_version)

    async def _leave(self) -> None:
        await self.journal.write(self.drafts)
        left = [draft for draft in self.drafts if draft.is_noted]
        for draft in left:
            self.drafts.give_up(draft.key)
            self._forsake(draft)
        if left:
            _LOG.info("%d groups in flight are left to the next start, which continues their turns", len(left))

    def _give_up(self, draft: GroupDraft, reason: ReturnReason | None = None) -> None:
        self._returned.append((draft.assignment.id, reason))
        self._forsake(draft)

    def _forsake(self, draft: GroupDraft) -> None:
        for task in self._scoring.pop(draft.key, ()):
            if task is not asyncio.current_task():
                task.cancel()
        if self._runner is not None:
            self._runner.drop(draft.key)
            self.turns = [turn for turn in self.turns if turn.draft is not draft]

    async def _spool(self) -> None:
        while True:
            ticket = self.news.ticket()
            if not self.outbox_writer.num_waiting and self.journal.is_written:
                await ticket.wait()
            elif not self.outbox_writer.num_waiting:
                await self.journal.write(self.drafts)
            elif self.outbox_writer.retry_s > 0:
                await ring_or_time(ticket, clock=self.clock, seconds=self.outbox_writer.retry_s)
            else:
                # A stop writes turns too: none may follow the transaction that deletes them.
                async with self.journal.lock:
                    await self.outbox_writer.retry()
                self.news.ring()
                self.work.session.bell.ring()

    def _lose_all(self, reason: ReturnReason | None = None) -> None:
        self.evaluation_requests.lose_all()
        for draft in self.drafts.lose_all():
            self._give_up(draft, reason)

    async def _return(self) -> None:
        while True:
            ticket = self.news.ticket()
            if not self._returned:
                await ticket.wait()
            elif await self._abandon():
                self._backoff.reset()
            else:
                await self.clock.sleep(self._backoff.delay_s())

    async def _abandon(self) -> bool:
        given = tuple(self._returned)
        # Before the coordinator hands them out again.
        await self.journal.forget([number for number, _ in given])
        done = set()
        for reason in dict.fromkeys(reason for _, reason in given):
            some = [number for number, other in given if other is reason]
            if await self.work.abandon(some, reason):
                done |= {(number, reason) for number in some}
        self._returned = [each for each in self._returned if each not in done]
        return done == set(given)

    async def hand_back(self, late: Callable[[], Awaitable[Sequence[int]]] | None = None) -> None:
        """Return assignments within HAND_BACK_S; without an answer they expire."""
        if not self._returned and late is None:
            return

        async def returned() -> None:
            if self._returned:
                await self._abandon()
            if late is not None and (found := await late()):
                self.give_back(found)
                await self._abandon()

        await ends_within(returned(), clock=self.clock, seconds=HAND_BACK_S)
        if self._returned:
            _LOG.info("%d assignments are left to expire: the coordinator does not answer", len(self._returned))


class WorkLog:
    """A log line each minute with groups for the operator."""

    def __init__(self) -> None:
        self._said_at = -math.inf
        self.num_groups = 0

    def say(self, *, tokens_per_s: float, now: float, version: int, head: int) -> None:
        if now - self._said_at >= LOG_EVERY_S and self.num_groups:
            _LOG.info(
                "the sampler made %d groups, %s tokens/s; version %d, %d behind the head",
                self.num_groups, f"{tokens_per_s:,.0f}", version, max(0, head - version),
            )  # fmt: skip
            self._said_at, self.num_groups = now, 0
