"""Rewards computed again on the trusted side, from the prompt's number and the tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterorl.common.model.prompts import Prompter
from heterorl.common.tasks.scoring import score_group
from heterorl.common.tasks.task import Task
from heterorl.common.types.rollout import DropReason, Group, RewardPart, total_reward
from heterorl.learner.checks.judge import SOUND, Finding


def judge_rewards(group: Group, *, task: Task, prompter: Prompter, tolerance: float) -> Finding:
    """In what a group's prompt or rewards differ from the task's.

    Args:
        group: as its site sent it.
        task: the run's.
        prompter: the run's tokenizer and template.
        tolerance: largest difference of a reward.

    Raises:
        RewardError: the verifier failed; that says nothing of the site.
    """
    if not 0 <= group.prompt_index < task.num_prompts:
        return _mismatch(f"prompt_index: {group.prompt_index}, the task has {task.num_prompts} prompts")
    prompt = task.prompt(group.prompt_index)
    if not np.array_equal(prompter.encode(prompt.text), group.prompt_token_ids):
        return _mismatch(f"prompt_token_ids: not those of prompt {group.prompt_index}")
    texts = [prompter.decode(rollout.token_ids) for rollout in group.rollouts]
    for number, (rollout, parts) in enumerate(zip(group.rollouts, score_group(task, prompt, texts), strict=True)):
        computed = total_reward(parts)
        if not abs(rollout.reward - computed) <= tolerance:
            return _mismatch(f"rollouts[{number}].reward: {rollout.reward:g}, computed {computed:g}")
        problem = _parts_problem(rollout.reward_parts, parts, tolerance=tolerance)
        if problem:
            return _mismatch(f"rollouts[{number}].reward_parts: {problem}")
    return SOUND


def _parts_problem(stated: Sequence[RewardPart], computed: Sequence[RewardPart], *, tolerance: float) -> str:
    """In what parts differ, which train nothing and are shown to people; a rollout may state none."""
    if not stated:
        return ""
    if [(part.name, part.weight) for part in stated] != [(part.name, part.weight) for part in computed]:
        names = ", ".join(f"{part.weight:g} x {part.name}" for part in computed)
        return f"not {names} in this order"
    for one, other in zip(stated, computed, strict=True):
        if not abs(one.value - other.value) <= tolerance:
            return f"{one.name} is {one.value:g}, computed {other.value:g}"
    return ""


def _mismatch(detail: str) -> Finding:
    return Finding(reason=DropReason.REWARD_MISMATCH, detail=detail)
