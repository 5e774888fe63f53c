"""Groups in flight: completions, scores, and work that a restart continues.

    begun -> completions end, one by one -> each is scored, or lost -> the last one completes the group
          -> too few members are left, or the engine fails: given up, its assignment is handed back

A completion counts once, also when its group is given up; a group that was given up never enters the outbox.
`InFlightGroups` is pure and used from the event loop. One task at a time writes turns, only of groups in flight. Turns
are not kept if the environment is not deterministic: no process could step it again.

A row can kill its process, for example by the kernel's memory killer, and that process cannot report it. So
`under_way.json` names the assignments in flight. The next process returns those that it does not continue, with the
reason ENGINE_FAILED, and the coordinator closes a row that killed three processes. `held_out.json` counts such ends of
held-out prompts, which the sampler itself answers without a score after three. After a registration a stop, and an end
by an error that no prompt causes, remove both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from heterorl.common.errors import DiskFull
from heterorl.common.generation.inference_engine import Completion, Finished
from heterorl.common.process.clock import Bell, Clock
from heterorl.common.process.files import replacing
from heterorl.common.tasks.task import Prompt
from heterorl.common.text.conversation import Conversation
from heterorl.common.types.common import Digest, Int32Array, SiteId
from heterorl.common.types.rollout import GIVEN, Group, GroupId, RewardPart, Rollout, Span, WorkAssignment
from heterorl.sampler.outbox.turn_store import KeptGroup, KeptTurn, TurnStore

_Owner = TypeVar("_Owner")
NAME, HELD_OUT_NAME = "under_way.json", "held_out.json"
MAX_NOTED = 1024
"""Entries in a note, the newest assignments."""


@dataclass(slots=True, kw_only=True, eq=False)
class GroupDraft:
    """A group in flight."""

    key: int
    assignment: WorkAssignment
    prompt: Prompt
    prompt_token_ids: Int32Array
    seed: int
    version: int = 0
    """The version loaded when the group began: no token is of an older one."""
    begun_at: float = 0.0
    is_seeded: bool = False
    """See Group."""
    conversation: Conversation | None = None
    """The environment that answers its members; None if each member is one completion."""
    source: str = ""
    """Label of the prompt's source, for mixed tasks."""
    is_noted: bool = False
    """Whether turns of it are on disk, so that the next process can continue it."""
    ended_at: float = 0.0
    """End of its last completion; both times are monotonic."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """Completions of members that ended."""
    scores: dict[int, tuple[RewardPart, ...]] = field(default_factory=dict)
    """Rewards of members that ended, once computed; empty for lost members."""

    @property
    def num_lost(self) -> int:
        return sum(not completion.finish_reason.is_trainable for completion in self.completions.values())

    @property
    def generation_s(self) -> float:
        return self.ended_at - self.begun_at


class EngineRequests(Generic[_Owner]):
    """Requests in the engine by key, each with its owner."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, _Owner]] = {}
        self.num_running = 0
        """Completions in the engine, also of owners that were given up."""

    def add(self, key: int, count: int, owner: _Owner) -> None:
        self._open[key] = count, owner
        self.num_running += count

    def ended(self, one: Finished) -> _Owner | None:
        """Count what ended; returns its owner, None if the request was dropped."""
        left, owner = self._open.get(one.key, (0, None))
        if owner is None or left == 1:
            return self.drop(one.key)
        self._open[one.key] = left - 1, owner
        self.num_running -= 1
        return owner

    def drop(self, key: int) -> _Owner | None:
        left, owner = self._open.pop(key, (0, None))
        self.num_running -= left
        return owner

    def drop_all(self) -> list[_Owner]:
        return [owner for key in list(self._open) if (owner := self.drop(key)) is not None]


OnEnd = Callable[[Finished | None], None]
"""Called with each completion that ends, and once with None if the rest is lost."""


class EvaluationRequests(EngineRequests[OnEnd]):
    """Requests of evaluations in the engine that rollouts use."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps_version = False
        """Whether newer weights wait."""
        self.is_expected = False
        """Whether a drained run continues until the evaluations end."""
        self.longest = 0
        """Most tokens of a completion that was requested."""

    def take(self, one: Finished) -> bool:
        """Hand over what ended; returns whether it belongs to an evaluation."""
        on_end = self.ended(one)
        if on_end is not None:
            on_end(one)
        return on_end is not None

    def lose_all(self) -> None:
        for on_end in self.drop_all():
            on_end(None)


class InFlightGroups(EngineRequests[tuple[GroupDraft, int | None]]):
    """All groups in flight by key, and their requests in the engine."""

    def __init__(self, *, group_size: int) -> None:
        super().__init__()
        self._group_size = group_size
        self._drafts: dict[int, GroupDraft] = {}

    def __len__(self) -> int:
        return len(self._drafts)

    def __iter__(self) -> Iterator[GroupDraft]:
        return iter(self._drafts.values())

    def __contains__(self, key: object) -> bool:
        return key in self._drafts

    @property
    def num_unscored(self) -> int:
        return sum(len(draft.completions) - len(draft.scores) for draft in self)

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that any of them may name; None without groups."""
        return min((draft.version for draft in self), default=None)

    def begin(self, draft: GroupDraft) -> None:
        self._drafts[draft.key] = draft
        self.add(draft.key, self._group_size, (draft, None))

    def resume(self, draft: GroupDraft) -> None:
        self._drafts[draft.key] = draft

    def take(self, finished: Finished, now: float) -> tuple[GroupDraft, int] | None:
        """Count an ended completion; returns group and member, None if given up."""
        found = self.ended(finished)
        if found is None or found[0].key not in self._drafts:
            return None
        draft, member = found
        draft.ended_at = now
        return draft, finished.member if member is None else member

    def score(self, key: int, member: int, parts: tuple[RewardPart, ...]) -> GroupDraft | None:
        """Store a reward, empty if lost; remove and return a complete group."""
        draft = self._drafts.get(key)
        if draft is None:
            return None
        draft.scores[member] = parts
        return self._drafts.pop(key) if len(draft.scores) == self._group_size else None

    def give_up(self, key: int) -> GroupDraft | None:
        """Give a group up while completions go on; None if done before."""
        return self._drafts.pop(key, None)

    def lose(self, key: int) -> tuple[GroupDraft, int | None] | None:
        """Remove a lost request; returns group and member, None if given up."""
        found = self.drop(key)
        return found if found is not None and found[0].key in self._drafts else None

    def withdraw(self, draft: GroupDraft) -> bool:
        return self.lose(draft.key) is not None and self.give_up(draft.key) is not None

    def lose_all(self) -> list[GroupDraft]:
        """Give up every group with completions in the engine; returns them."""
        return [draft for draft, _ in self.drop_all() if self.give_up(draft.key) is not None]


@dataclass(kw_only=True, eq=False, repr=False)
class TurnJournal:
    """Turns of an engine's groups; `left` is from an earlier process.

    `now` is a time that a later process understands; `news` rings when there is a turn to write.
    """

    turns: TurnStore
    left: Collection[KeptGroup]
    state_roots: Callable[[], Mapping[int, Digest]]
    clock: Clock
    now: Callable[[], float]
    news: Bell

    def __post_init__(self) -> None:
        self.lock = asyncio.Lock()
        """Held while the outbox's file gets turns or loses them."""
        self._noted: list[tuple[GroupDraft, KeptTurn]] = []
        self._given_up: set[int] = set()
        """Assignments whose turns must go, and stayed on a full disk."""

    @property
    def is_written(self) -> bool:
        return not self._noted

    def begun_at(self, left: KeptGroup) -> float:
        """Start of a group of an earlier process, by this process's clock."""
        return self.clock.monotonic() - max(0.0, self.now() - left.first.begun)

    def note(self, draft: GroupDraft, member: int, number: int, given: Int32Array, turn: Completion) -> None:
        """Note a member's turn `number`, from 0; `given` precedes it."""
        if draft.conversation is None or not draft.conversation.spec.is_deterministic:
            return
        begun = self.now() - (self.clock.monotonic() - draft.begun_at)
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
            state_root=self.state_roots()[version],
            generation_s=0.0,
            is_seeded=draft.is_seeded,
        )
        kept = KeptTurn(member=member, number=number, seed=draft.seed, begun=begun, turn=group)
        self._noted.append((draft, kept))
        self.news.ring()

    async def write(self, in_flight: Container[int]) -> None:
        """Write noted turns of these groups, if the disk has room."""
        async with self.lock:
            await self._forget()
            noted, self._noted = self._noted, []
            noted = [(draft, turn) for draft, turn in noted if draft.key in in_flight]
            if not noted:
                return
            are_kept = await asyncio.to_thread(self.turns.keep, [turn for _, turn in noted])
            for draft, _ in noted if are_kept else ():
                draft.is_noted = True

    async def note_resumed(self, assignments: Collection[int]) -> None:
        """Count that groups go on; not on a full disk."""
        async with self.lock:
            with contextlib.suppress(DiskFull):
                await asyncio.to_thread(self.turns.note_resumed, assignments)

    async def forget(self, assignments: Collection[int]) -> None:
        """Delete turns of returned groups; with a full disk, later."""
        async with self.lock:
            self._given_up.update(assignments)
            await self._forget()

    async def _forget(self) -> None:
        with contextlib.suppress(DiskFull):
            if self._given_up:
                await asyncio.to_thread(self.turns.forget, tuple(self._given_up))
            self._given_up.clear()


def turns_of(left: KeptGroup, member: int) -> list[tuple[Int32Array, Completion]]:
    """A member's turns, each with the tokens given in front of it."""
    turns = []
    for kept in left.members.get(member, ()):
        (rollout,) = kept.turn.rollouts
        size = sum(span.end - span.start for span in rollout.spans if not span.is_drawn)
        turn = Completion(
            token_ids=rollout.token_ids[size:],
            logprobs=rollout.sampler_logprobs,
            finish_reason=rollout.finish_reason,
            spans=_moved([span for span in rollout.spans if span.is_drawn], -size),
        )
        turns.append((rollout.token_ids[:size], turn))
    return turns


def _moved(spans: Collection[Span], by: int) -> tuple[Span, ...]:
    return tuple(Span(version=span.version, start=span.start + by, end=span.end + by) for span in spans)


class InFlightNote:
    """The notes that a killed process leaves to the next.
    `left` are its assignments."""

    def __init__(self, state_dir: Path) -> None:
        self._path, self._held_out = state_dir / NAME, state_dir / HELD_OUT_NAME
        self.left: tuple[int, ...] = _read(self._path)
        self.held_out = _read_held_out(self._held_out)
        """Failures in a row of held-out prompts, by set and index."""
        self._lock = threading.Lock()
        self._is_over = False

    def note(self, assignments: Sequence[int]) -> None:
        """Write the assignments in the engine, oldest first. Blocking.

        The note survives the process, not the machine: it is not synced.
        """
        # On a full disk groups do not begin, so a kill counts against no row.
        self._write(self._path, [*reversed(assignments)])

    def note_held_out(self, failures: Mapping[tuple[str, int], int]) -> None:
        """Write failures in a row of held-out prompts.
        Blocking."""
        self._write(self._held_out, [[name, index, count] for (name, index), count in failures.items()])

    def clear(self) -> None:
        """Remove the notes at the process's end; late threads write none."""
        with self._lock:
            self._is_over = True
            for path in (self._path, self._held_out):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _write(self, path: Path, noted: Sequence[object]) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._is_over:
                with replacing(path, is_durable=False) as file:
                    file.write(json.dumps(noted[:MAX_NOTED]).encode("ascii"))


def _read(path: Path) -> tuple[int, ...]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ()
    if not isinstance(found, list):
        return ()
    return tuple(number for number in found[:MAX_NOTED] if type(number) is int and 0 <= number < 1 << 63)


def _read_held_out(path: Path) -> dict[tuple[str, int], int]:
    try:
        return {(str(name), int(index)): int(count) for name, index, count in json.loads(path.read_bytes())}
    except (OSError, TypeError, ValueError):
        return {}
