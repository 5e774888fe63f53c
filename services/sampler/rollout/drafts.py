"""Groups under way: what of each has been generated and scored. Pure; owned by the event loop.

    begun -> completions end, one by one -> each is scored -> the last score makes the group whole
          -> a reward that fails, an engine that fails: given up, its assignment is handed back

Guarantees: a completion counts once, whatever became of its group; what is given up never becomes a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from heterorl.common.generation.requests import Completion, Finished
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import RewardPart, WorkAssignment


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """A group that is being made."""

    key: int
    assignment: WorkAssignment
    prompt: Prompt
    prompt_token_ids: Int32Array
    seed: int
    version: int
    """Loaded when it was begun: none of its tokens is of an older one."""
    begun_at: float
    ended_at: float = 0.0
    """Of its last completion; both by the monotonic clock."""
    completions: dict[int, Completion] = field(default_factory=dict)
    scores: dict[int, tuple[RewardPart, ...]] = field(default_factory=dict)

    @property
    def generation_s(self) -> float:
        """Seconds from its beginning to its last completion."""
        return self.ended_at - self.begun_at


class Drafts:
    """All groups under way, by the keys of their requests."""

    def __init__(self, *, group_size: int) -> None:
        self._group_size = group_size
        self._drafts: dict[int, Draft] = {}
        self._running: dict[int, int] = {}
        self.num_running = 0
        """Completions in the engine, those of groups that were given up too."""

    def __len__(self) -> int:
        return len(self._drafts)

    def __iter__(self) -> Iterator[Draft]:
        return iter(self._drafts.values())

    @property
    def num_unscored(self) -> int:
        """Completions that ended and wait for their reward."""
        return sum(len(draft.completions) - len(draft.scores) for draft in self)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that any of them may name; None where nothing is under way."""
        return min((draft.version for draft in self), default=None)

    def begin(self, draft: Draft) -> None:
        """Count a group whose request the engine is given."""
        self._drafts[draft.key] = draft
        self._running[draft.key] = self._group_size
        self.num_running += self._group_size

    def take(self, finished: Finished, now: float) -> Draft | None:
        """Count a completion that ended; its group, unless that was given up."""
        left = self._running.get(finished.key, 0)
        if not left:
            return None
        self.num_running -= 1
        self._running[finished.key] = left - 1
        if left == 1:
            del self._running[finished.key]
        draft = self._drafts.get(finished.key)
        if draft is not None:
            draft.completions[finished.member] = finished.completion
            draft.ended_at = now
        return draft

    def score(self, key: int, member: int, parts: tuple[RewardPart, ...]) -> Draft | None:
        """Note a reward; the group where it was the last one, which is under way no longer."""
        draft = self._drafts.get(key)
        if draft is None:
            return None
        draft.scores[member] = parts
        return self._drafts.pop(key) if len(draft.scores) == self._group_size else None

    def give_up(self, key: int) -> Draft | None:
        """Give a group up while its completions go on; None where it was before."""
        return self._drafts.pop(key, None)

    def lose(self, key: int) -> Draft | None:
        """Give a group up whose completions the engine has lost."""
        self.num_running -= self._running.pop(key, 0)
        return self.give_up(key)

    def lose_all(self) -> list[Draft]:
        """Give up every group of which the engine still had completions; what waits for rewards alone stays."""
        keys = list(self._running)
        return [draft for key in keys if (draft := self.lose(key)) is not None]
