"""Rewards computed again on the trusted side, from the prompt's number and the tokens alone."""

from __future__ import annotations

import numpy as np

from heterorl.common.model.prompts import Prompter
from heterorl.common.tasks.scoring import score_group
from heterorl.common.tasks.task import Task
from heterorl.common.types.rollout import DropReason, Group
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
    if not np.array_equal(prompter.encode_prompt(prompt), group.prompt_token_ids):
        return _mismatch(f"prompt_token_ids: not those of prompt {group.prompt_index}")
    texts = [prompter.decode(rollout.token_ids) for rollout in group.rollouts]
    for number, (rollout, parts) in enumerate(zip(group.rollouts, score_group(task, prompt, texts), strict=True)):
        computed = sum(part.value for part in parts)
        if not abs(rollout.reward - computed) <= tolerance:
            return _mismatch(f"rollouts[{number}].reward: {rollout.reward:g}, computed {computed:g}")
    return SOUND


def _mismatch(detail: str) -> Finding:
    return Finding(reason=DropReason.REWARD_MISMATCH, detail=detail)
