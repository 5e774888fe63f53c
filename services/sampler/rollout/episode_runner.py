"""Episode runner: steps each turn of a member in its environment.

A failure of an environment ends one member; the event loop, the engine and other members go on. Drawn ids stay as
drawn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from heterorl.common.errors import EnvironmentFailed, EpisodeError, PromptRefused, RewardError, ToolLost
from heterorl.common.generation.inference_engine import Completion
from heterorl.common.model.logprobs import turn_seed
from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.process.logs import Rarely
from heterorl.common.tasks.environments.environment_task import cure_of
from heterorl.common.tasks.environments.episodes import Episode, Episodes
from heterorl.common.text.conversation import Conversation
from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import GIVEN, FinishReason, RewardPart, Span, total_reward
from heterorl.sampler.rollout.in_flight_groups import GroupDraft

_LOG = logging.getLogger(__name__)
Note = Callable[[GroupDraft, int, int, Int32Array, Completion], None]
"""Called with a group, its member, the turn's number from 0, the tokens in front of the turn, and the turn."""
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A member whose next turn can be drawn from `context` with `seed`."""

    draft: GroupDraft
    member: int
    context: Int32Array
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class End:
    """A member that ended: its trajectory, with reward parts or an error."""

    draft: GroupDraft
    member: int
    completion: Completion
    parts: tuple[RewardPart, ...] = ()
    error: Exception | None = None


class _Member:
    """One member's tokens after its prompt, and its episode."""

    def __init__(self, draft: GroupDraft) -> None:
        self.draft = draft
        self.turns: list[Completion] = []
        self.given: list[Int32Array] = []
        self.episode: Episode | None = None
        self.asked_at = draft.begun_at
        """When the current turn was submitted."""
        self.waited_s = 0.0
        """Wait for a place among the live episodes, which is no time of its own."""

    @property
    def num_tokens(self) -> int:
        return sum(part.size for part in self.parts())

    def parts(self) -> list[Int32Array]:
        parts = []
        for number, turn in enumerate(self.turns):
            parts += [turn.token_ids, *self.given[number : number + 1]]
        return parts

    def ended(self, reason: FinishReason) -> Completion:
        spans: list[Span] = []
        start = 0
        for number, turn in enumerate(self.turns):
            if number:
                size = self.given[number - 1].size
                spans.append(Span(version=GIVEN, start=start, end=start + size))
                start += size
            spans += [dataclasses.replace(s, start=start + s.start, end=start + s.end) for s in turn.spans]
            start += turn.token_ids.size
        return Completion(
            token_ids=np.concatenate([np.zeros(0, np.int32), *self.parts()])[:start],
            logprobs=np.concatenate([np.zeros(0, np.float32), *(turn.logprobs for turn in self.turns)]),
            finish_reason=reason,
            spans=tuple(spans),
        )


class EpisodeRunner:
    """Live episodes of one engine's members."""

    def __init__(
        self, *, max_live: int, max_new_tokens: int, max_trajectory_tokens: int, clock: Clock,
        note: Note = lambda *_: None,
    ) -> None:  # fmt: skip
        """Run at most `max_live` episodes; call `note` after each turn.

        `max_new_tokens` bounds a turn, `max_trajectory_tokens` drawn and given tokens of a member.
        """
        self._note = note
        self._max_new_tokens, self._max_trajectory_tokens = max_new_tokens, max_trajectory_tokens
        self._clock = clock
        self._rooms: dict[Episodes, asyncio.Semaphore] = {}
        self._threads = ThreadPoolExecutor(max_live, thread_name_prefix="episode")
        self._members: dict[tuple[int, int], _Member] = {}
        self._is_closed = False
        self._said = Rarely(_LOG, clock.monotonic)

    async def play(self, draft: GroupDraft, number: int, completion: Completion) -> Turn | End:
        member = self._members.setdefault((draft.key, number), _Member(draft))
        metrics.TURNS.labels(draft.source).inc()
        self._spend(member, "model", member.asked_at)
        member.turns.append(completion)
        self._note(draft, number, len(member.turns) - 1, member.given[-1] if member.given else _NONE, completion)
        return await self._go_on(member, number)

    async def resume(
        self, draft: GroupDraft, number: int, turns: Sequence[tuple[Int32Array, Completion]]
    ) -> Turn | End:
        """Step a member of an earlier process through its kept turns.

        Each turn comes with the tokens given in front of it.
        """
        member = self._members[draft.key, number] = _Member(draft)
        try:
            for given, turn in turns:
                if member.turns:
                    await self._repeat(member, given)
                member.turns.append(turn)
        except (EpisodeError, PromptRefused) as error:
            return self._lost(draft, number, error)
        return await self._go_on(member, number) if turns else self._turn(draft, number)

    async def end(self, draft: GroupDraft, number: int, reason: FinishReason) -> End:
        member = self._members[draft.key, number]
        if member.episode is None:
            # It began in an earlier process, whose engine had more room.
            return self._ended(draft, number, member, FinishReason.ENGINE_FAILED)
        try:
            parts = await self._call(member.episode.score)
            total_reward(parts)
        except (EpisodeError, RewardError) as error:
            return self._lost(draft, number, error)
        return self._ended(draft, number, member, reason, parts)

    def drop(self, key: int) -> None:
        for name in [name for name in self._members if name[0] == key]:
            self._forget(*name)

    def close(self) -> None:
        """Begin no more episodes; those that end still give their places back."""
        self._is_closed = True
        self._threads.shutdown(wait=False)

    def _turn(self, draft: GroupDraft, number: int) -> Turn:
        member = self._members[draft.key, number]
        member.asked_at = self._clock.monotonic()
        context = np.concatenate([draft.prompt_token_ids, *member.parts()])
        return Turn(draft=draft, member=number, context=context, seed=turn_seed(draft.seed, len(member.turns)))

    async def _go_on(self, member: _Member, number: int) -> Turn | End:
        since = self._clock.monotonic()
        try:
            reason = await self._step(member)
        except (EpisodeError, PromptRefused) as error:
            return self._lost(member.draft, number, error)
        finally:
            self._spend(member, "tools", since)
        return self._turn(member.draft, number) if reason is None else await self.end(member.draft, number, reason)

    async def _repeat(self, member: _Member, given: Int32Array) -> None:
        """Step again with the last turn, which `given` answered before.

        Raises EnvironmentFailed: the answer differs now.
        """
        said = await self._answer(member)
        if said is None or not np.array_equal(said, given):
            raise EnvironmentFailed(
                f"turn {len(member.turns)} is answered otherwise than before this process started; an environment that"
                " row, seed and actions do not decide says is_deterministic = False"
            )
        member.given.append(given)

    async def _answer(self, member: _Member) -> Int32Array | None:
        conversation, turn = member.draft.conversation, member.turns[-1]
        assert conversation is not None, "its group has turns"
        episode = member.episode or await self._open(member, conversation)
        given: Int32Array | None = await self._call(lambda: conversation.step(episode, turn.token_ids))
        return given

    async def _step(self, member: _Member) -> FinishReason | None:
        """Step with the last turn; returns why the member ended, if so."""
        given = await self._answer(member)
        if given is None:
            return member.turns[-1].finish_reason
        conversation = member.draft.conversation
        assert conversation is not None, "its group has turns"
        seconds = self._clock.monotonic() - member.draft.begun_at - member.waited_s
        room = self._max_trajectory_tokens - self._max_new_tokens - member.num_tokens - given.size
        reason = conversation.spec.limits.reached(num_turns=len(member.turns), seconds=seconds, room=room)
        if reason is None:
            member.given.append(given)
        return reason

    async def _open(self, member: _Member, conversation: Conversation) -> Episode:
        since = self._clock.monotonic()
        room = self._room(conversation)
        await room.acquire()
        member.waited_s = self._clock.monotonic() - since
        if self._is_closed:
            raise ToolLost("the sampler ends")
        loop = asyncio.get_running_loop()
        opening = self._threads.submit(conversation.spec.open)
        try:
            member.episode = await asyncio.shield(asyncio.wrap_future(opening))
        except asyncio.CancelledError:
            opening.cancel()
            # A thread that began goes on, and the episode that it opens has no other owner. A callback would close one
            # that is open already in this thread, for seconds.
            threading.Thread(target=self._close_opened, args=(opening, room, loop), daemon=True).start()
            raise
        except BaseException:
            room.release()
            raise
        return member.episode

    def _room(self, conversation: Conversation) -> asyncio.Semaphore:
        # Its own: a member would wait in a thread for a process of its environment, as a part of its time.
        episodes = conversation.spec.episodes
        return self._rooms.setdefault(episodes, asyncio.Semaphore(episodes.max_live))

    def _lost(self, draft: GroupDraft, number: int, error: Exception) -> End:
        reason = FinishReason.ENVIRONMENT_FAILED
        if isinstance(error, ToolLost):
            reason = FinishReason.TOOL_LOST
        elif isinstance(error, RewardError):
            reason = FinishReason.REWARD_FAILED
        self._said.warn(
            reason.value, "prompt %d lost member %d (%s): %s (%s)",
            draft.prompt.index, number, reason.value, error, cure_of(error),
        )  # fmt: skip
        member = self._members.get((draft.key, number)) or _Member(draft)
        return dataclasses.replace(self._ended(draft, number, member, reason), error=error)

    def _ended(
        self, draft: GroupDraft, number: int, member: _Member, reason: FinishReason, parts: tuple[RewardPart, ...] = ()
    ) -> End:
        completion = member.ended(reason)
        num_drawn = completion.logprobs.size
        metrics.TRAJECTORIES.labels(draft.source, reason.value).inc()
        metrics.TRAJECTORY_TOKENS.labels(draft.source, "drawn").inc(num_drawn)
        metrics.TRAJECTORY_TOKENS.labels(draft.source, "given").inc(completion.token_ids.size - num_drawn)
        self._forget(draft.key, number)
        return End(draft=draft, member=number, completion=completion, parts=parts)

    def _spend(self, member: _Member, part: str, since: float) -> None:
        metrics.TRAJECTORY_SECONDS.labels(member.draft.source, part).inc(max(0.0, self._clock.monotonic() - since))

    def _forget(self, key: int, number: int) -> None:
        member = self._members.pop((key, number), None)
        if member is not None and member.episode is not None and not self._is_closed:
            conversation = member.draft.conversation
            assert conversation is not None, "it has an episode"
            loop, room = asyncio.get_running_loop(), self._room(conversation)
            closing = self._threads.submit(member.episode.close)
            closing.add_done_callback(lambda _: _release(room, loop))

    def _close_opened(self, opened: Future[Episode], room: asyncio.Semaphore, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(BaseException):
            opened.result().close()
        _release(room, loop)

    async def _call(self, function: Callable[..., Any]) -> Any:
        if self._is_closed:
            raise ToolLost("the sampler ends")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _release(room: asyncio.Semaphore, loop: asyncio.AbstractEventLoop) -> None:
    # The loop may have ended with the process.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(room.release)
