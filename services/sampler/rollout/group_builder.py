"""Assignments -> requests -> groups: prompts, seeds, texts, rewards. Blocking; called from threads but for `group`.

Guarantees: every drawn token is stamped with the version that it was drawn from, a group with its oldest; a reward that
fails is a lost member and no zero reward; whatever a reward takes, the event loop and the engine go on; what was queued
for a group that was given up is never asked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from heterorl.common.errors import AnswerUnreadable, PromptRefused, PromptTooLong
from heterorl.common.generation.inference_engine import Completion
from heterorl.common.generation.token_sampling import group_key
from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.process.tracing import TRACER
from heterorl.common.tasks.task import FailureStreak, Prompt, Task, check_answer, score_group, source_of
from heterorl.common.text.conversation import Conversations
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import (
    Group,
    GroupId,
    ReturnReason,
    RewardPart,
    Rollout,
    WorkAssignment,
    total_reward,
)
from heterorl.sampler.outbox.turn_store import KeptGroup
from heterorl.sampler.rollout.episode_runner import EpisodeRunner, Note
from heterorl.sampler.rollout.in_flight_groups import GroupDraft

_LOG = logging.getLogger(__name__)
Refused = tuple[WorkAssignment, PromptRefused]
"""An assignment of whose prompt nothing can be generated, and why."""
NO_SEQUENCE = 0
"""Of a group that no outbox has numbered yet."""
MAX_LINES = 100
"""Rows that are named in the log; all others are counted in the metric alone."""
CURE = "correct the data, task.system_prompt or use_chat_template, or raise engine.max_model_len"
_REASONS = {PromptTooLong: ReturnReason.PROMPT_TOO_LONG, AnswerUnreadable: ReturnReason.REWARD_FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuilder:
    """Everything that a group is made with and that does not change during a run."""

    task: Task
    prompter: Prompter
    site: SiteId
    incarnation: str
    group_size: int
    clock: Clock
    is_seeded: bool = False
    """Whether the engine draws by the names of the tokens."""
    min_members: int = 0
    """Members of a group that must be trainable; 0: all."""
    max_new_tokens: int = 0
    max_trajectory_tokens: int = 0
    """The contract's, where a prompt has an environment."""
    conversations: Conversations | None = None
    """The environments of the task; None where no prompt has one."""
    keys: Iterator[int] = field(default_factory=itertools.count)
    # A tokenizer is changed by who encodes with it, and several threads decode.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(
        self, work: Sequence[WorkAssignment], *, version: int, state_root: Digest
    ) -> tuple[list[GroupDraft], list[Refused]]:
        """A draft for each assignment, begun with the version that is loaded; and the assignments that are refused."""
        now = self.clock.monotonic()
        drafts: list[GroupDraft] = []
        refused: list[Refused] = []
        for assignment in work:
            prompt = self.task.prompt(assignment.prompt_index)
            try:
                check_answer(self.task, prompt)
                conversation = self.conversations.of(prompt) if self.conversations else None
                with self.lock:
                    ids = conversation.encode(prompt) if conversation else self.prompter.encode_prompt(prompt)
            except PromptRefused as error:
                refused.append((assignment, error))
                continue
            drafts.append(
                GroupDraft(
                    key=next(self.keys),
                    assignment=assignment,
                    prompt=prompt,
                    prompt_token_ids=ids,
                    seed=self._seed(assignment, state_root),
                    version=version,
                    begun_at=now,
                    conversation=conversation,
                    source=source_of(self.task, prompt.index),
                )
            )
        return drafts, refused

    def resume(self, left: KeptGroup, *, begun_at: float) -> GroupDraft | None:
        """The draft of a group of an earlier process, which began it at `begun_at` by this one's clock.

        None where its prompt is another one now.
        """
        first = left.first.turn
        prompt = self.task.prompt(first.prompt_index) if first.prompt_index < self.task.num_prompts else None
        conversation = self.conversations.of(prompt) if self.conversations and prompt else None
        if prompt is None or conversation is None or max(left.members) >= self.group_size:
            return None
        try:
            with self.lock:
                ids = conversation.encode(prompt)
        except PromptRefused:
            return None
        if not np.array_equal(ids, first.prompt_token_ids):
            return None
        return GroupDraft(
            key=next(self.keys),
            assignment=WorkAssignment(id=first.assignment, prompt_index=first.prompt_index, seed=0, lease_s=0.0),
            prompt=prompt,
            prompt_token_ids=ids,
            seed=left.first.seed,
            version=min(kept.turn.oldest_version for kept in left.turns),
            begun_at=begun_at,
            conversation=conversation,
            source=source_of(self.task, prompt.index),
            is_noted=True,
        )

    def score_all(self, prompt: Prompt, completions: Sequence[Completion]) -> list[tuple[RewardPart, ...]]:
        """The parts of completions' rewards, in order.

        Raises:
            RewardError: one could not be computed, or is beyond what is trained on.
        """
        with self.lock:
            texts = [self.prompter.decode(completion.token_ids) for completion in completions]
        rows = list(score_group(self.task, prompt, texts))
        for parts in rows:
            total_reward(parts)
        return rows

    def group(self, draft: GroupDraft, *, state_roots: Mapping[int, Digest]) -> Group:
        """The group of a draft whose members all have their rewards; an outbox numbers it.

        `state_roots` has every version that a token of it may be of.
        """
        members = range(self.group_size)
        rollouts = tuple(_rollout(draft.completions[member], draft.scores[member]) for member in members)
        oldest = min(span.version for rollout in rollouts for span in rollout.spans if span.is_drawn)
        return Group(
            id=GroupId(site=self.site, incarnation=self.incarnation, sequence=NO_SEQUENCE),
            assignment=draft.assignment.id,
            prompt_index=draft.assignment.prompt_index,
            prompt_token_ids=draft.prompt_token_ids,
            rollouts=rollouts,
            oldest_version=oldest,
            state_root=state_roots[oldest],
            generation_s=draft.generation_s,
            # A turn's draws are named by its context, which no learner repeats yet.
            is_seeded=self.is_seeded and draft.conversation is None,
            trace=TRACER.begin(
                "generate",
                lasted_s=draft.generation_s,
                attributes={"site": self.site, "assignment": draft.assignment.id, "version": oldest},
            ),
        )

    def runner(self, note: Note) -> EpisodeRunner | None:
        """What leads members through their environments, and notes their turns; None where no prompt has one."""
        if self.conversations is None:
            return None
        return EpisodeRunner(
            max_live=self.conversations.max_live, max_new_tokens=self.max_new_tokens,
            max_trajectory_tokens=self.max_trajectory_tokens, clock=self.clock, note=note,
        )  # fmt: skip

    def _seed(self, assignment: WorkAssignment, state_root: Digest) -> int:
        if not self.is_seeded:
            return assignment.seed
        # The weights name the draws; they stay until everything under way ended.
        return group_key(seed=assignment.seed, state_root=state_root, prompt_index=assignment.prompt_index)


def _rollout(completion: Completion, parts: tuple[RewardPart, ...]) -> Rollout:
    return Rollout(
        token_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        spans=completion.spans,
        reward=total_reward(parts),
        reward_parts=parts,
        finish_reason=completion.finish_reason,
        routed_experts=completion.routed_experts,
    )


class Scorer:
    """Asks for rewards, as many at once as the task has processes."""

    def __init__(self, builder: GroupBuilder) -> None:
        self._builder = builder
        # A plain task is a function: the lab computes it at once, in no virtual time.
        num_workers = int(getattr(builder.task, "num_workers", 0))
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward") if num_workers else None
        self._by_group = bool(getattr(builder.task, "by_group", False))
        self.failures = FailureStreak()

    def ready(self, draft: GroupDraft, member: int) -> tuple[int, ...]:
        """The members that can be scored now that one has ended: itself, or all where they are scored together."""
        if not self._by_group:
            return (member,)
        is_whole = len(draft.completions) == self._builder.group_size
        return tuple(range(self._builder.group_size)) if is_whole else ()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[tuple[RewardPart, ...]]:
        """The parts of completions' rewards, in order; RewardError where one could not be computed."""
        if self._threads is None:
            return self._builder.score_all(prompt, completions)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._builder.score_all, prompt, completions
        )

    def close(self) -> None:
        """Ask for nothing more; what is being asked ends with the task's processes."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class Refusals(FailureStreak):
    """Prompts of which nothing can be generated: counted, logged once a row, and loudly where no other is left."""

    missing: str = "PROMPT"
    cure: str = CURE
    _named: set[int] = field(default_factory=set)

    def note(self, assignment: WorkAssignment, error: PromptRefused) -> ReturnReason:
        """Count a prompt that was refused; the reason for its return."""
        reason = _REASONS.get(type(error), ReturnReason.PROMPT_REFUSED)
        metrics.REFUSED_PROMPTS.labels(reason.value).inc()
        self.failed(error)
        index = assignment.prompt_index
        if index not in self._named and len(self._named) < MAX_LINES:
            self._named.add(index)
            _LOG.warning("prompt %d gives no group (assignment %d): %s", index, assignment.id, error)
            if len(self._named) == MAX_LINES:
                _LOG.warning("%d prompts are refused; further ones are not named", MAX_LINES)
        return reason
