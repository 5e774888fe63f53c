"""Groups under way: what of each is generated and scored, and what the next process in state_dir goes on from.

    begun -> completions end, one by one -> each is scored, or lost -> the last one makes the group whole
          -> too few members are left, an engine that fails: given up, its assignment is handed back

Guarantees: a completion counts once, whatever became of its group; what is given up never becomes a group. `Drafts` is
pure, and the event loop's. Turns are noted as they end and written by one task at a time, never of a group that is
under way no longer; a group whose environment leaves things to chance is not noted: nobody can step it again.

A row may end the process that computes it, as by the system's killer for memory: no line of that process can say so.
The next process returns what the note `under_way.json` names and it does not continue, as if its engine had failed
under it, so that a row that kills three processes is closed (heterorl.coordinator.groups.work_assignments). What was
answered meanwhile is not held any more, and its return means nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from heterorl.common.errors import DiskFull
from heterorl.common.generation.inference_engine import Completion, Finished, Lost
from heterorl.common.process.clock import Bell, Clock
from heterorl.common.process.files import replacing
from heterorl.common.tasks.task import Prompt
from heterorl.common.text.conversation import Conversation
from heterorl.common.types.common import Digest, Int32Array, SiteId
from heterorl.common.types.rollout import GIVEN, Group, GroupId, RewardPart, Rollout, Span, WorkAssignment
from heterorl.sampler.outbox.turn_store import KeptGroup, KeptTurn, TurnStore

_LOG = logging.getLogger(__name__)
NAME = "under_way.json"
MAX_NOTED = 1024
"""Assignments in a note; the newest ones."""


@dataclass(slots=True, kw_only=True, eq=False)
class GroupDraft:
    """A group that is being made."""

    key: int
    assignment: WorkAssignment
    prompt: Prompt
    prompt_token_ids: Int32Array
    seed: int
    version: int
    """Loaded when it was begun: none of its tokens is of an older one."""
    begun_at: float
    conversation: Conversation | None = None
    """The environment that answers its members' turns; None where each is one completion."""
    source: str = ""
    """Label of its prompt's source, where tasks are mixed."""
    is_noted: bool = False
    """Whether turns of it are kept on the disk, so that the next process can go on with it."""
    ended_at: float = 0.0
    """Of its last completion; both by the monotonic clock."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """Of members that ended, whole."""
    scores: dict[int, tuple[RewardPart, ...]] = field(default_factory=dict)
    """Of members that ended and have their rewards; empty of lost ones."""

    @property
    def num_lost(self) -> int:
        """Members that ended and are not trained on."""
        return sum(not completion.finish_reason.is_trainable for completion in self.completions.values())

    @property
    def generation_s(self) -> float:
        """Seconds from its beginning to its last completion."""
        return self.ended_at - self.begun_at


class InFlightGroups:
    """All groups under way, by their keys, and the requests that the engine has for them."""

    def __init__(self, *, group_size: int) -> None:
        self._group_size = group_size
        self._drafts: dict[int, GroupDraft] = {}
        self._requests: dict[int, _Request] = {}
        self.num_running = 0
        """Completions in the engine, those of groups that were given up too."""

    def __len__(self) -> int:
        return len(self._drafts)

    def __iter__(self) -> Iterator[GroupDraft]:
        return iter(self._drafts.values())

    def __contains__(self, key: object) -> bool:
        return key in self._drafts

    @property
    def num_unscored(self) -> int:
        """Completions that ended and wait for their reward."""
        return sum(len(draft.completions) - len(draft.scores) for draft in self)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that any of them may name; None where nothing is under way."""
        return min((draft.version for draft in self), default=None)

    def begin(self, draft: GroupDraft) -> None:
        """Count a group whose request the engine is given, of all members, under the group's key."""
        self._drafts[draft.key] = draft
        self._begin(draft.key, _Request(draft=draft, left=self._group_size))

    def resume(self, draft: GroupDraft) -> None:
        """Count a group of an earlier process, of which the engine has nothing yet."""
        self._drafts[draft.key] = draft

    def begin_turn(self, key: int, draft: GroupDraft, member: int) -> None:
        """Count the request of one member's next turn."""
        self._begin(key, _Request(draft=draft, left=1, member=member))

    def take(self, finished: Finished, now: float) -> tuple[GroupDraft, int] | None:
        """Count a completion that ended; its group and its member, unless the group was given up."""
        request = self._requests.get(finished.key)
        if request is None:
            return None
        self.num_running -= 1
        request.left -= 1
        if not request.left:
            del self._requests[finished.key]
        draft = request.draft
        if draft.key not in self._drafts:
            return None
        draft.ended_at = now
        return draft, finished.member if request.member is None else request.member

    def end(self, draft: GroupDraft, member: int, completion: Completion) -> None:
        """Note that a member has ended."""
        draft.completions[member] = completion

    def score(self, key: int, member: int, parts: tuple[RewardPart, ...]) -> GroupDraft | None:
        """Note a reward, none of a lost member; the group where it was the last one, which is under way no longer."""
        draft = self._drafts.get(key)
        if draft is None:
            return None
        draft.scores[member] = parts
        return self._drafts.pop(key) if len(draft.scores) == self._group_size else None

    def give_up(self, key: int) -> GroupDraft | None:
        """Give a group up while its completions go on; None where it was before."""
        return self._drafts.pop(key, None)

    def lose(self, key: int) -> tuple[GroupDraft, int | None] | None:
        """Forget a request that the engine has lost; its group, and the member whose turn it was, unless given up."""
        request = self._requests.pop(key, None)
        if request is None:
            return None
        self.num_running -= request.left
        return (request.draft, request.member) if request.draft.key in self._drafts else None

    def withdraw(self, draft: GroupDraft) -> bool:
        """Take back a group that the engine did not take; False where it was given up before."""
        return self.lose(draft.key) is not None and self.give_up(draft.key) is not None

    def lose_all(self) -> list[GroupDraft]:
        """Give up every group of which the engine still had completions; the others stay."""
        lost = [found[0] for key in list(self._requests) if (found := self.lose(key)) is not None]
        return [draft for draft in lost if self.give_up(draft.key) is not None]

    def _begin(self, key: int, request: _Request) -> None:
        self._requests[key] = request
        self.num_running += request.left


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """What the engine computes for a group: `left` completions, of one member's turn or of all members."""

    draft: GroupDraft
    left: int
    member: int | None = None


class TurnJournal:
    """The turns of one engine's groups; `left` is what an earlier process had under way."""

    def __init__(
        self,
        *,
        turns: TurnStore,
        left: Collection[KeptGroup],
        state_roots: Callable[[], Mapping[int, Digest]],
        clock: Clock,
        now: Callable[[], float],
        news: Bell,
    ) -> None:
        """`now` is an instant that a later process understands; `news` rings when there is something to write."""
        self.left = left
        self._turns = turns
        self._state_roots = state_roots
        self._clock = clock
        self._now = now
        self._news = news
        self._lock = asyncio.Lock()
        self._noted: list[tuple[GroupDraft, KeptTurn]] = []

    @property
    def is_written(self) -> bool:
        """Whether all that was noted is written."""
        return not self._noted

    def begun_at(self, left: KeptGroup) -> float:
        """When a group of an earlier process was begun, by this process's clock."""
        return self._clock.monotonic() - max(0.0, self._now() - left.first.begun)

    def note(self, draft: GroupDraft, member: int, number: int, given: Int32Array, turn: Completion) -> None:
        """Note that a member's turn, numbered from 0, ended; `given` is what was given in front of it."""
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

    async def write(self, in_flight: Container[int]) -> None:
        """Write what was noted of the groups whose keys these are, as far as the disk has room."""
        async with self._lock:
            noted, self._noted = self._noted, []
            turns = [turn for draft, turn in noted if draft.key in in_flight]
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


class InFlightNote:
    """The note of one state_dir; `left` is what an earlier process had under way when it was killed."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / NAME
        self.left: tuple[int, ...] = _read(self._path)

    def note(self, assignments: Sequence[int]) -> None:
        """Write what the engine has or is about to get, oldest first; blocking.

        The note outlives the process, not the machine: nothing waits for the disk.
        """
        # On a full disk nothing begins soon, and a kill meanwhile counts for nobody.
        with contextlib.suppress(OSError), replacing(self._path, is_durable=False) as file:
            file.write(json.dumps([*reversed(assignments)][:MAX_NOTED]).encode("ascii"))

    def clear(self) -> None:
        """Nothing is under way any more: the process ends in order."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[int, ...]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ()
    if not isinstance(found, list):
        return ()
    return tuple(number for number in found[:MAX_NOTED] if type(number) is int and 0 <= number < 1 << 63)


OnEnd = Callable[[Finished | None], None]
"""Called with each completion that ends; once with None where the rest is lost."""


class EvaluationRequests:
    """What evaluations have in the engine, beside rollouts."""

    def __init__(self) -> None:
        self.num_running = 0
        """Completions under way."""
        self.keeps_version = False
        """Whether newer weights wait."""
        self.is_expected = False
        """Whether a drained run is to go on until the evaluations have ended."""
        self._waiting: dict[int, tuple[int, OnEnd]] = {}

    def begin(self, key: int, count: int, on_end: OnEnd) -> None:
        """Count a request that the engine is about to be given."""
        self._waiting[key] = (count, on_end)
        self.num_running += count

    def drop(self, key: int) -> None:
        """Forget a request that the engine did not take."""
        count, _ = self._waiting.pop(key, (0, None))
        self.num_running -= count

    def take(self, one: Finished | Lost) -> bool:
        """Hand over what ended; whether it is of a held-out prompt."""
        if one.key not in self._waiting:
            return False
        left, on_end = self._waiting.pop(one.key)
        if isinstance(one, Lost):
            self.num_running -= left
            on_end(None)
            return True
        self.num_running -= 1
        if left > 1:
            self._waiting[one.key] = (left - 1, on_end)
        on_end(one)
        return True

    def lose_all(self) -> None:
        """Say of everything under way that it is lost."""
        waiting, self._waiting, self.num_running = self._waiting, {}, 0
        for _, on_end in waiting.values():
            on_end(None)
