"""Groups under way: what of each has been generated and scored. Pure; owned by the event loop.

    begun -> completions end, one by one -> each is scored, or lost -> the last one makes the group whole
          -> too few members are left, an engine that fails: given up, its assignment is handed back

Guarantees: a completion counts once, whatever became of its group; what is given up never becomes a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from heterorl.common.generation.requests import Completion, Finished
from heterorl.common.tasks.task import Prompt
from heterorl.common.text.conversation import Conversation
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


class Drafts:
    """All groups under way, by their keys, and the requests that the engine has for them."""

    def __init__(self, *, group_size: int) -> None:
        self._group_size = group_size
        self._drafts: dict[int, Draft] = {}
        self._requests: dict[int, _Request] = {}
        self.num_running = 0
        """Completions in the engine, those of groups that were given up too."""

    def __len__(self) -> int:
        return len(self._drafts)

    def __iter__(self) -> Iterator[Draft]:
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

    def begin(self, draft: Draft) -> None:
        """Count a group whose request the engine is given, of all members, under the group's key."""
        self._drafts[draft.key] = draft
        self._begin(draft.key, _Request(draft=draft, left=self._group_size))

    def resume(self, draft: Draft) -> None:
        """Count a group of an earlier process, of which the engine has nothing yet."""
        self._drafts[draft.key] = draft

    def begin_turn(self, key: int, draft: Draft, member: int) -> None:
        """Count the request of one member's next turn."""
        self._begin(key, _Request(draft=draft, left=1, member=member))

    def take(self, finished: Finished, now: float) -> tuple[Draft, int] | None:
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

    def end(self, draft: Draft, member: int, completion: Completion) -> None:
        """Note that a member has ended."""
        draft.completions[member] = completion

    def score(self, key: int, member: int, parts: tuple[RewardPart, ...]) -> Draft | None:
        """Note a reward, none of a lost member; the group where it was the last one, which is under way no longer."""
        draft = self._drafts.get(key)
        if draft is None:
            return None
        draft.scores[member] = parts
        return self._drafts.pop(key) if len(draft.scores) == self._group_size else None

    def give_up(self, key: int) -> Draft | None:
        """Give a group up while its completions go on; None where it was before."""
        return self._drafts.pop(key, None)

    def lose(self, key: int) -> tuple[Draft, int | None] | None:
        """Forget a request that the engine has lost; its group, and the member whose turn it was, unless given up."""
        request = self._requests.pop(key, None)
        if request is None:
            return None
        self.num_running -= request.left
        return (request.draft, request.member) if request.draft.key in self._drafts else None

    def withdraw(self, draft: Draft) -> bool:
        """Take back a group that the engine did not take; False where it was given up before."""
        return self.lose(draft.key) is not None and self.give_up(draft.key) is not None

    def lose_all(self) -> list[Draft]:
        """Give up every group of which the engine still had completions; the others stay."""
        lost = [found[0] for key in list(self._requests) if (found := self.lose(key)) is not None]
        return [draft for draft in lost if self.give_up(draft.key) is not None]

    def _begin(self, key: int, request: _Request) -> None:
        self._requests[key] = request
        self.num_running += request.left


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """What the engine computes for a group: `left` completions, of one member's turn or of all members."""

    draft: Draft
    left: int
    member: int | None = None
