"""Whether this learner can train on a leased group: pure, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from heterorl.common.model.router_replay import RoutingShape
from heterorl.common.types.common import peer_words
from heterorl.common.types.rollout import MAX_PART_VALUE, MAX_REWARD, Group, Rollout
from heterorl.common.types.trajectory import is_drawn, strips_of
from heterorl.learner.checks.findings import SOUND, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this learner can hold.

    `max_sequence_tokens` bounds prompt plus completion; 0 is no bound. `has_unit_rewards`: the advantage needs rewards
    in [0, 1].
    """

    group_size: int
    min_members: int = 0
    """Rollouts that must be trainable; 0: all."""
    vocab_size: int
    max_sequence_tokens: int
    has_unit_rewards: bool = False
    routing: RoutingShape | None = None
    """Of the model, where routing is replayed."""


def judge(group: Group, limits: Limits) -> Finding:
    """Why the group can never be trained on, if so.

    A group without any advantage is sound: it takes part in a step and pulls nothing.
    """
    if len(group.rollouts) != limits.group_size:
        return Finding(detail=f"{len(group.rollouts)} rollouts, the group size is {limits.group_size}")
    if group.prompt_token_ids.size == 0:
        return Finding(detail="the prompt has no token")
    absurd = [rollout.reward for rollout in group.rollouts if not abs(rollout.reward) <= MAX_REWARD]
    if absurd:
        return Finding(detail=f"a reward of {absurd[0]:g}; at most {MAX_REWARD:g} either way is trained on")
    parts = [part for rollout in group.rollouts for part in rollout.reward_parts]
    absurd_parts = [part for part in parts if not abs(part.value) <= MAX_PART_VALUE]
    if absurd_parts:
        # Also of weight 0: its mean is reported with the step.
        name, value = peer_words(absurd_parts[0].name), absurd_parts[0].value
        return Finding(detail=f"a value of {value:g} of the reward's part {name}; at most {MAX_PART_VALUE:g} is taken")
    if limits.has_unit_rewards and not all(0 <= rollout.reward <= 1 for rollout in group.rollouts):
        return Finding(detail="a reward outside [0, 1], which loss.advantage = beta is not defined for")
    if any(rollout.num_drawn != _drawn_by_spans(rollout) for rollout in group.rollouts):
        return Finding(detail="a rollout has not one log-prob per token")
    if any(rollout.finish_reason.is_trainable and not rollout.is_trainable for rollout in group.rollouts):
        return Finding(detail="a rollout has no token")
    if len(group.trainable) < (limits.min_members or limits.group_size):
        return Finding(detail=f"{len(group.trainable)} rollouts can be trained; min_members is {limits.min_members}")
    strips = [strip for rollout in group.rollouts for strip in strips_of(group.prompt_token_ids, rollout)]
    total = max(strip.token_ids.size for strip in strips)
    if limits.max_sequence_tokens and total > limits.max_sequence_tokens:
        return Finding(detail=f"a sequence of {total} tokens; max_sequence_tokens is {limits.max_sequence_tokens}")
    ids = [group.prompt_token_ids, *(rollout.token_ids for rollout in group.rollouts if rollout.token_ids.size)]
    if any(part.min() < 0 or part.max() >= limits.vocab_size for part in ids):
        return Finding(detail=f"a token is outside the vocabulary of {limits.vocab_size}")
    problem = _record_problem(group, limits.routing)
    return Finding(detail=problem) if problem else SOUND


def _drawn_by_spans(rollout: Rollout) -> int:
    return int(is_drawn(rollout.spans, rollout.token_ids.size).sum())


def _record_problem(group: Group, routing: RoutingShape | None) -> str:
    for rollout in group.rollouts:
        if routing is None and rollout.routed_experts:
            return "routed_experts: a record of experts, and no routing is replayed"
        num_read = group.prompt_token_ids.size + rollout.token_ids.size - 1
        if routing is not None and (problem := routing.problem(rollout.routed_experts, num_read)):
            return problem
    return ""
