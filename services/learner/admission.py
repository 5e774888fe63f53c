"""Whether a leased group can be trained on by this learner: pure, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this learner can hold. `max_sequence_tokens` bounds prompt plus completion; 0 is no bound."""

    group_size: int
    vocab_size: int
    max_sequence_tokens: int


def judge(group: Group, limits: Limits) -> str:
    """Why the group can never be trained on; empty when it can.

    A group without any advantage is fine: it takes part in a step and pulls nothing.
    """
    if len(group.rollouts) != limits.group_size:
        return f"{len(group.rollouts)} rollouts, the group size is {limits.group_size}"
    longest = max(rollout.token_ids.size for rollout in group.rollouts)
    if longest == 0:
        return "no rollout has a token"
    total = group.prompt_token_ids.size + longest
    if limits.max_sequence_tokens and total > limits.max_sequence_tokens:
        return f"a sequence of {total} tokens; max_sequence_tokens is {limits.max_sequence_tokens}"
    ids = [group.prompt_token_ids, *(rollout.token_ids for rollout in group.rollouts)]
    if any(part.size and (part.min() < 0 or part.max() >= limits.vocab_size) for part in ids):
        return f"a token is outside the vocabulary of {limits.vocab_size}"
    return ""
