"""Builder of groups from assignments: prompts, seeds, texts, rewards.

Every drawn token carries its version, a group its oldest one. A reward that fails is a lost member, not a zero reward.
All methods except `group` block and run in threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heterorl.common.errors import AnswerUnreadable, PromptRefused, PromptTooLong
from heterorl.common.generation.inference_engine import Completion
from heterorl.common.model.logprobs import group_key
from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.process.threads import in_order
from heterorl.common.process.tracing import TRACER
from heterorl.common.tasks.task import FailureStreak, Prompt, Task, check_answer
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
from heterorl.sampler.rollout.in_flight_groups import GroupDraft

_LOG = logging.getLogger(__name__)
Refused = tuple[WorkAssignment, PromptRefused]
"""An assignment whose prompt was refused, and why."""
NO_SEQUENCE = 0
"""Sequence of a group that the outbox has not numbered."""
MAX_LINES = 100
"""Rows named in the log; the metric counts the others."""
CURE = "correct the data, task.system_prompt or use_chat_template, or raise engine.max_model_len"
_REASONS = {PromptTooLong: ReturnReason.PROMPT_TOO_LONG, AnswerUnreadable: ReturnReason.REWARD_FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuilder:
    """The constants of a run that every group is built with."""

    task: Task
    prompter: Prompter
    site: SiteId
    incarnation: str
    group_size: int
    clock: Clock
    is_seeded: bool = False
    """See `seeded_sampling`."""
    min_members: int = 0
    """Members of a group that must be trainable; 0: all."""
    max_new_tokens: int = 0
    max_trajectory_tokens: int = 0
    """From the contract, for prompts with an environment."""
    conversations: Conversations | None = None
    """Environments of the task; None if no prompt has one."""
    keys: Iterator[int] = field(default_factory=itertools.count)
    # Encoding changes a tokenizer, and several threads decode.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, work: Sequence[WorkAssignment]) -> tuple[list[GroupDraft], list[Refused]]:
        """Drafts without version and beginning, and the refused assignments."""
        drafts: list[GroupDraft] = []
        refused: list[Refused] = []
        # A prompt of an environment may begin an episode, for seconds.
        threads = min(len(work), self.conversations.max_live) if self.conversations else 1
        prompts = in_order(self.task.prompt, [one.prompt_index for one in work], threads=max(threads, 1))
        for assignment, prompt in zip(work, prompts, strict=True):
            try:
                check_answer(self.task, prompt)
                draft = self.draft(
                    prompt, self.conversations, assignment, seed=self._seed(assignment), is_seeded=self.is_seeded,
                    source=self.task.source_of(prompt.index),
                )  # fmt: skip
            except PromptRefused as error:
                refused.append((assignment, error))
            else:
                drafts.append(draft)
        return drafts, refused

    def draft(
        self, prompt: Prompt, conversations: Conversations | None, assignment: WorkAssignment, **others: Any
    ) -> GroupDraft:
        """Draft of an encoded prompt, with `others` of its fields; raises PromptRefused."""
        conversation = conversations.of(prompt) if conversations else None
        with self.lock:
            ids = conversation.encode(prompt) if conversation else self.prompter.encode_prompt(prompt)
        return GroupDraft(
            key=next(self.keys), assignment=assignment, prompt=prompt, prompt_token_ids=ids, conversation=conversation,
            **others,
        )  # fmt: skip

    def resume(self, left: KeptGroup, *, begun_at: float) -> GroupDraft | None:
        """Draft of an earlier process's group; None if its prompt changed."""
        first = left.first.turn
        prompt = self.task.prompt(first.prompt_index) if first.prompt_index < self.task.num_prompts else None
        if prompt is None or self.conversations is None or max(left.members) >= self.group_size:
            return None
        try:
            draft = self.draft(
                prompt,
                self.conversations,
                WorkAssignment(id=first.assignment, prompt_index=first.prompt_index, seed=0, lease_s=0.0),
                seed=left.first.seed,
                version=min(kept.turn.oldest_version for kept in left.turns),
                begun_at=begun_at,
                is_seeded=self.is_seeded and all(kept.turn.is_seeded for kept in left.turns),
                source=self.task.source_of(prompt.index),
                is_noted=True,
            )
        except PromptRefused:
            return None
        is_same = draft.conversation is not None and np.array_equal(draft.prompt_token_ids, first.prompt_token_ids)
        return draft if is_same else None

    def score_all(self, prompt: Prompt, completions: Sequence[Completion]) -> list[tuple[RewardPart, ...]]:
        """Reward parts of each completion; raises RewardError if one is unusable."""
        with self.lock:
            texts = [self.prompter.completion(completion.token_ids, prompt) for completion in completions]
        rows = list(self.task.score_all(prompt, texts))
        for parts in rows:
            total_reward(parts)
        return rows

    def group(self, draft: GroupDraft, *, state_roots: Mapping[int, Digest]) -> Group:
        """The group of a scored draft; `state_roots` has its tokens' versions."""
        members = range(self.group_size)
        rollouts = tuple(_rollout(draft.completions[member], draft.scores[member]) for member in members)
        oldest = min(span.version for rollout in rollouts for span in rollout.spans if span.is_drawn)
        attributes: dict[str, str | int] = {"site": self.site, "assignment": draft.assignment.id, "version": oldest}
        return Group(
            id=GroupId(site=self.site, incarnation=self.incarnation, sequence=NO_SEQUENCE),
            assignment=draft.assignment.id,
            prompt_index=draft.assignment.prompt_index,
            prompt_token_ids=draft.prompt_token_ids,
            rollouts=rollouts,
            oldest_version=oldest,
            state_root=state_roots[oldest],
            generation_s=draft.generation_s,
            is_seeded=draft.is_seeded,
            trace=TRACER.begin("generate", lasted_s=draft.generation_s, attributes=attributes),
        )

    def _seed(self, assignment: WorkAssignment) -> int:
        if not self.is_seeded:
            return assignment.seed
        return group_key(seed=assignment.seed, prompt_index=assignment.prompt_index)


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
    """Computes rewards in as many threads as the task has processes."""

    def __init__(self, builder: GroupBuilder) -> None:
        self._builder = builder
        # A plain task is a function: research computes it in no virtual time.
        num_workers = builder.task.num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward") if num_workers else None
        self._by_group = builder.task.by_group
        self.failures = FailureStreak()

    def ready(self, draft: GroupDraft, member: int) -> tuple[int, ...]:
        """Members that can be scored after one ended: itself, or all together."""
        if not self._by_group:
            return (member,)
        is_whole = len(draft.completions) == self._builder.group_size
        return tuple(range(self._builder.group_size)) if is_whole else ()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[tuple[RewardPart, ...]]:
        if self._threads is None:
            return self._builder.score_all(prompt, completions)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._builder.score_all, prompt, completions
        )

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class Refusals(FailureStreak):
    """Refused prompts: counted, logged once a row; an error if all are."""

    missing: str = "PROMPT"
    cure: str = CURE
    _named: set[int] = field(default_factory=set)

    def note(self, assignment: WorkAssignment, error: PromptRefused, *, source: str) -> ReturnReason:
        reason = _REASONS.get(type(error), ReturnReason.PROMPT_REFUSED)
        metrics.REFUSED_PROMPTS.labels(source, reason.value).inc()
        self.failed(error)
        index = assignment.prompt_index
        if index not in self._named and len(self._named) < MAX_LINES:
            self._named.add(index)
            _LOG.warning("prompt %d gives no group (assignment %d is returned): %s", index, assignment.id, error)
            if len(self._named) == MAX_LINES:
                _LOG.warning("%d prompts are refused; this log names no further ones", MAX_LINES)
        return reason
