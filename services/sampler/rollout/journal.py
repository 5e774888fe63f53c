"""The turns of the groups under way, noted as they end, and the groups that an earlier process left.

Guarantees: what is noted is written by one task at a time, never of a group that is under way no longer; a group whose
environment leaves things to chance is not noted, because nobody can step it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Container, Mapping

import numpy as np

from heterorl.common.errors import DiskFull
from heterorl.common.generation.requests import Completion
from heterorl.common.process.clock import Bell, Clock
from heterorl.common.types.common import Digest, Int32Array, SiteId
from heterorl.common.types.rollout import GIVEN, Group, GroupId, Rollout, Span
from heterorl.sampler.outbox.turns import KeptGroup, KeptTurn, Turns
from heterorl.sampler.rollout.drafts import Draft

_LOG = logging.getLogger(__name__)


class Journal:
    """The turns of one engine's groups; `left` is what an earlier process had under way."""

    def __init__(
        self,
        *,
        turns: Turns,
        left: Collection[KeptGroup],
        state_roots: Callable[[], Mapping[int, Digest]],
        clock: Clock,
        now: Callable[[], float],
        news: Bell,
    ) -> None:
        """Join it.

        Args:
            turns: on the disk.
            left: see above.
            state_roots: of every version that a turn may be of.
            clock: time.
            now: an instant that a later process understands.
            news: rings when there is something to write.
        """
        self.left = left
        self._turns = turns
        self._state_roots = state_roots
        self._clock = clock
        self._now = now
        self._news = news
        self._lock = asyncio.Lock()
        self._noted: list[tuple[Draft, KeptTurn]] = []

    @property
    def is_written(self) -> bool:
        """Whether all that was noted is written."""
        return not self._noted

    def begun_at(self, left: KeptGroup) -> float:
        """When a group of an earlier process was begun, by this process's clock."""
        return self._clock.monotonic() - max(0.0, self._now() - left.first.begun)

    def note(self, draft: Draft, member: int, number: int, given: Int32Array, turn: Completion) -> None:
        """Note that a member's turn ended.

        Args:
            draft: the group.
            member: of the group.
            number: of the turn, from 0.
            given: what was given in front of it.
            turn: as it was drawn.
        """
        if draft.conversation is None or not draft.conversation.spec.is_deterministic:
            return
        draft.is_noted = True
        begun = self._now() - (self._clock.monotonic() - draft.begun_at)
        version = min(span.version for span in turn.spans)
        spans = [Span(version=GIVEN, start=0, end=given.size)] if given.size else []
        rollout = Rollout(
            token_ids=np.concatenate([given, turn.token_ids]),
            sampler_logprobs=turn.logprobs,
            spans=(*spans, *_moved(turn.spans, given.size)),
            reward=0.0,
            reward_parts=(),
            finish_reason=turn.finish_reason,
        )
        group = Group(
            id=GroupId(site=SiteId(""), incarnation="", sequence=0),
            assignment=draft.assignment.id,
            prompt_index=draft.assignment.prompt_index,
            prompt_token_ids=draft.prompt_token_ids if number == 0 else np.zeros(0, np.int32),
            rollouts=(rollout,),
            oldest_version=version,
            state_root=self._state_roots()[version],
            generation_s=0.0,
        )
        kept = KeptTurn(member=member, number=number, seed=draft.seed, begun=begun, turn=group)
        self._noted.append((draft, kept))
        self._news.ring()

    async def write(self, under_way: Container[int]) -> None:
        """Write what was noted of the groups whose keys these are, as far as the disk has room."""
        async with self._lock:
            noted, self._noted = self._noted, []
            turns = [turn for draft, turn in noted if draft.key in under_way]
            if turns:
                await asyncio.to_thread(self._turns.keep, turns)

    async def forget(self, assignments: Collection[int]) -> None:
        """Delete the turns of groups that were given up; on a full disk they stay until they are too old."""
        async with self._lock:
            with contextlib.suppress(DiskFull):
                await asyncio.to_thread(self._turns.forget, assignments)


def turns_of(left: KeptGroup, member: int) -> list[tuple[Int32Array, Completion]]:
    """What was given in front of each turn of a member, and the turn as it was drawn."""
    return [_parted(kept) for kept in left.members.get(member, ())]


def _parted(kept: KeptTurn) -> tuple[Int32Array, Completion]:
    (rollout,) = kept.turn.rollouts
    size = sum(span.end - span.start for span in rollout.spans if not span.is_drawn)
    turn = Completion(
        token_ids=rollout.token_ids[size:],
        logprobs=rollout.sampler_logprobs,
        finish_reason=rollout.finish_reason,
        spans=_moved([span for span in rollout.spans if span.is_drawn], -size),
    )
    return rollout.token_ids[:size], turn


def _moved(spans: Collection[Span], by: int) -> tuple[Span, ...]:
    return tuple(Span(version=span.version, start=span.start + by, end=span.end + by) for span in spans)
