"""Rollouts of several turns, stepped again on the trusted side: given ids and rewards must be those of the environment.

Guarantees: of a deterministic environment a site can state neither an observation nor a reward that it did not get.
What a machine may fail in is not held against its site; its group is not trained then.
"""

from __future__ import annotations

import numpy as np

from heterorl.common.errors import EpisodeError, RewardError
from heterorl.common.tasks.environments.episodes import Episode
from heterorl.common.text.conversation import Conversation
from heterorl.common.types.rollout import DropReason, FinishReason, Group, Rollout, weighted_sum
from heterorl.common.types.trajectory import turns_of
from heterorl.learner.checks.judge import SOUND, Finding

_OF_ITSELF = (FinishReason.EOS, FinishReason.LENGTH)
_BY_ENVIRONMENT = (FinishReason.ENVIRONMENT_FAILED, FinishReason.TOOL_LOST, FinishReason.REWARD_FAILED)


def judge_episodes(group: Group, conversation: Conversation, *, tolerance: float) -> Finding:
    """In what a group's rollouts differ from those of its environment.

    Args:
        group: as its site sent it; its prompt was compared.
        conversation: the environment of its prompt, which is deterministic.
        tolerance: largest difference of a reward.

    Raises:
        RewardError: the environment failed here; that says nothing of the site.
    """
    for number, rollout in enumerate(group.rollouts):
        is_lost = rollout.finish_reason in _BY_ENVIRONMENT
        if not (rollout.is_trainable or is_lost):
            continue
        try:
            with conversation.spec.open() as episode:
                problem = _problem(rollout, conversation, episode, tolerance=tolerance)
        except EpisodeError as error:
            if is_lost:
                continue
            raise RewardError(f"the environment of rollouts[{number}] failed: {error}") from error
        if is_lost:
            # Not held against the site, whose machine may be slow; and not trained, since it may hide low rewards.
            return Finding(detail=f"rollouts[{number}]: its site has lost it, and its environment goes on here")
        if problem:
            return Finding(reason=DropReason.REWARD_MISMATCH, detail=f"rollouts[{number}]: {problem}")
    return SOUND


def _problem(rollout: Rollout, conversation: Conversation, episode: Episode, *, tolerance: float) -> str:
    if any(span.keeps is not None for span in rollout.spans):
        return "its history is written anew, and its environment writes none anew"
    turns = turns_of(rollout)
    given = None
    for number, (start, end) in enumerate(turns):
        drawn = rollout.token_ids[start:end]
        given = conversation.step(episode, drawn)
        if number + 1 < len(turns):
            stated = rollout.token_ids[end : turns[number + 1][0]]
            if given is None:
                return f"turn {number + 1} ended the episode, and another one follows"
            if not np.array_equal(stated, given):
                return f"what is given behind turn {number + 1} is not the environment's"
    if turns and rollout.is_trainable and (given is None) != (rollout.finish_reason in _OF_ITSELF):
        return f"finish_reason is {rollout.finish_reason.value}, the episode {'ended' if given is None else 'goes on'}"
    parts = episode.score()
    reward = weighted_sum(parts)
    if not abs(rollout.reward - reward) <= tolerance:
        return f"reward: {rollout.reward:g}, computed {reward:g}"
    stated_parts = [(part.name, part.weight) for part in rollout.reward_parts]
    if stated_parts and stated_parts != [(part.name, part.weight) for part in parts]:
        return "reward_parts: not the environment's"
    pairs = zip(rollout.reward_parts, parts, strict=False)
    wrong = [mine.name for mine, other in pairs if not abs(mine.value - other.value) <= tolerance]
    return f"reward_parts: {wrong[0]} has another value" if wrong else ""
