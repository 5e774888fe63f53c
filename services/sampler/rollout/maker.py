"""Assignments -> groups: tokenise, generate, decode, score. Blocking; called from a thread.

Guarantees: every token is stamped with the version that it was drawn from, a group with its oldest; a verifier that
fails gives no group and no zero reward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heterorl.common.errors import RewardError
from heterorl.common.generation.engine import Engine, generate_all
from heterorl.common.generation.requests import Completion
from heterorl.common.generation.seeded import group_key
from heterorl.common.model.prompts import Prompter
from heterorl.common.process.clock import Clock
from heterorl.common.process.tracing import TRACER
from heterorl.common.tasks.scoring import FailureRow, score_group
from heterorl.common.tasks.task import Task
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import Group, GroupId, RewardPart, Rollout, WorkAssignment

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups made from a batch of assignments, and the assignments that gave none."""

    groups: tuple[Group, ...]
    failed: tuple[int, ...]
    num_tokens: int
    generation_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMaker:
    """Everything that generation needs and that does not change during a run."""

    engine: Engine
    task: Task
    prompter: Prompter
    site: SiteId
    incarnation: str
    group_size: int
    clock: Clock
    is_seeded: bool = False
    """Whether the engine draws by the names of the tokens."""
    failures: FailureRow = field(default_factory=FailureRow)

    def make(self, work: Sequence[WorkAssignment], *, state_roots: Mapping[int, Digest], first_sequence: int) -> Batch:
        """Generate one group per assignment.

        Args:
            work: what to generate.
            state_roots: of every version loaded until the batch ends, by version; it may grow meanwhile.
            first_sequence: of the first group's id.
        """
        prompts = [self.task.prompt(assignment.prompt_index) for assignment in work]
        encoded = [self.prompter.encode(prompt.text) for prompt in prompts]
        started = self.clock.monotonic()
        seeds = [self._seed(assignment, state_roots) for assignment in work]
        completions = generate_all(self.engine, encoded, seeds=seeds, num_per_prompt=self.group_size)
        generation_s = self.clock.monotonic() - started
        groups: list[Group] = []
        failed: list[int] = []
        for assignment, prompt, ids, members in zip(work, prompts, encoded, completions, strict=True):
            try:
                texts = [self.prompter.decode(completion.token_ids) for completion in members]
                scores = list(score_group(self.task, prompt, texts))
            except RewardError as error:
                self.failures.failed(error)
                _LOG.warning("assignment %d gives no group: %s", assignment.id, error)
                failed.append(assignment.id)
                continue
            self.failures.passed()
            rollouts = tuple(map(_rollout, members, scores))
            oldest = min(span.version for rollout in rollouts for span in rollout.spans)
            groups.append(
                Group(
                    id=GroupId(site=self.site, incarnation=self.incarnation, sequence=first_sequence + len(groups)),
                    assignment=assignment.id,
                    prompt_index=assignment.prompt_index,
                    prompt_token_ids=ids,
                    rollouts=rollouts,
                    oldest_version=oldest,
                    state_root=state_roots[oldest],
                    generation_s=generation_s,
                    is_seeded=self.is_seeded,
                    trace=TRACER.begin(
                        "generate",
                        lasted_s=generation_s,
                        attributes={"site": self.site, "assignment": assignment.id, "version": self.engine.version},
                    ),
                )
            )
        num_tokens = sum(completion.token_ids.size for members in completions for completion in members)
        return Batch(groups=tuple(groups), failed=tuple(failed), num_tokens=num_tokens, generation_s=generation_s)

    def _seed(self, assignment: WorkAssignment, state_roots: Mapping[int, Digest]) -> int:
        if not self.is_seeded:
            return assignment.seed
        # The weights name the draws; they stay until the batch ends.
        root = state_roots[self.engine.version]
        return group_key(seed=assignment.seed, state_root=root, prompt_index=assignment.prompt_index)


def _rollout(completion: Completion, parts: tuple[RewardPart, ...]) -> Rollout:
    return Rollout(
        token_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        spans=completion.spans,
        reward=sum(part.value for part in parts),
        reward_parts=parts,
        finish_reason=completion.finish_reason,
    )
