"""Whether a pushed group may be trained on: pure, with the reason and a sentence that names the field.

What is inside is judged of the opened group, before its commit begins; its surroundings of the sealed one, within it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from heterorl.common.types.common import Contract
from heterorl.common.types.rollout import (
    MAX_PART_NAME,
    MAX_REWARD_PARTS,
    DropReason,
    FinishReason,
    Group,
    Rollout,
    SealedGroup,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the store knows about a group's surroundings.

    `state_root` is that of the group's oldest version (None: no such version); `assignment_prompt` is the prompt of
    its assignment (None: not this site's, or never given out); `is_answered` when the assignment has its group;
    `quarantine` is why the learner's checks put its site into quarantine (empty: they did not); `abandoned_version` is
    one of its spans' versions that was abandoned (None: none was); `policy_age_s` counts from the next version on.
    """

    head_version: int
    max_staleness_versions: int
    max_policy_age_s: float
    policy_age_s: float
    state_root: str | None
    assignment_prompt: int | None
    is_answered: bool
    quarantine: str = ""
    abandoned_version: int | None = None


def judge(group: SealedGroup, facts: Facts) -> tuple[DropReason | None, str]:
    """Accept (None) or name the reason; what is inside was judged before, so that bad senders are seen."""
    if facts.quarantine:
        return DropReason.QUARANTINED, f"the site is in quarantine: {facts.quarantine}"
    if group.oldest_version < 0 or facts.state_root is None:
        return DropReason.UNKNOWN_VERSION, f"oldest_version: {group.oldest_version} does not exist"
    newest = max(group.versions)
    if newest > facts.head_version:
        return DropReason.UNKNOWN_VERSION, f"spans: version {newest} is newer than the head, {facts.head_version}"
    if facts.abandoned_version is not None:
        return DropReason.UNKNOWN_VERSION, f"spans: version {facts.abandoned_version} was abandoned"
    if group.state_root != facts.state_root:
        return DropReason.WRONG_DIGEST, f"state_root: not that of version {group.oldest_version}"
    if facts.is_answered:
        return DropReason.SURPLUS, f"assignment {group.assignment} has its group already"
    if facts.assignment_prompt is None:
        return DropReason.INVALID, f"assignment: {group.assignment} was not given to this site, or was given back"
    if facts.assignment_prompt != group.prompt_index:
        return DropReason.INVALID, f"prompt_index: {group.prompt_index}, assigned was {facts.assignment_prompt}"
    staleness = facts.head_version - group.oldest_version
    if staleness > facts.max_staleness_versions:
        return DropReason.STALE_AT_INGEST, f"{staleness} versions old; the bound is {facts.max_staleness_versions}"
    if facts.policy_age_s > facts.max_policy_age_s:
        text = f"a newer version came {facts.policy_age_s:.0f} s ago; max_policy_age_s is {facts.max_policy_age_s:.0f}"
        return DropReason.STALE_AT_INGEST, text
    return None, ""


def size_problem(num_bytes: int, max_group_bytes: int) -> str:
    """What is wrong with a group's size; empty when nothing is."""
    if num_bytes <= max_group_bytes:
        return ""
    # It came in, and would not fit the message that takes it to the learner.
    return f"group: {num_bytes} bytes, at most {max_group_bytes} fit max_message_bytes"


def content_problem(group: Group, contract: Contract, *, max_prompt_tokens: int) -> str:
    """What is wrong with what a group says, whatever surrounds it; empty when nothing is."""
    if group.prompt_token_ids.size > max_prompt_tokens:
        return f"prompt_token_ids: {group.prompt_token_ids.size} tokens, max_prompt_tokens is {max_prompt_tokens}"
    if len(group.rollouts) != contract.group_size:
        return f"rollouts: {len(group.rollouts)}, the group size is {contract.group_size}"
    prompt = group.prompt_token_ids
    if prompt.size == 0 or prompt.min() < 0 or prompt.max() >= contract.vocab_size:
        return f"prompt_token_ids: empty or outside 0..{contract.vocab_size - 1}"
    if not math.isfinite(group.generation_s) or group.generation_s < 0:
        return "generation_s: not a duration"
    for number, rollout in enumerate(group.rollouts):
        problem = _rollout_problem(rollout, contract) or record_problem(
            len(rollout.routed_experts), contract, num_read=prompt.size + rollout.token_ids.size - 1
        )
        if problem:
            return f"rollouts[{number}].{problem}"
    oldest = min(span.version for rollout in group.rollouts for span in rollout.spans)
    if oldest != group.oldest_version:
        return f"oldest_version: {group.oldest_version}, the spans say {oldest}"
    return ""


def record_problem(num_bytes: int, contract: Contract, *, num_read: int) -> str:
    """What is wrong with the size of a record of experts, where `num_read` tokens were read; none is always right.

    Which experts a model has, the learner knows.
    """
    expected = num_read * contract.routed_token_bytes
    return "" if num_bytes in (0, expected) else f"routed_experts: {num_bytes} bytes; empty or {expected} is right"


def _rollout_problem(rollout: Rollout, contract: Contract) -> str:
    length, logprobs = rollout.token_ids.size, rollout.sampler_logprobs
    if not 0 < length <= contract.sampling.max_new_tokens:
        return f"token_ids: {length} tokens, allowed are 1..{contract.sampling.max_new_tokens}"
    if logprobs.size != length:
        return f"sampler_logprobs: {logprobs.size} for {length} tokens"
    if rollout.token_ids.min() < 0 or rollout.token_ids.max() >= contract.vocab_size:
        return f"token_ids: outside 0..{contract.vocab_size - 1}"
    problem = ending_problem(rollout, contract)
    if problem:
        return problem
    if not np.isfinite(logprobs).all() or logprobs.max() > 0:
        return "sampler_logprobs: not all finite and at most 0"
    parts = rollout.reward_parts
    if not math.isfinite(rollout.reward) or not all(
        math.isfinite(part.value) and math.isfinite(part.weight) for part in parts
    ):
        return "reward: not finite"
    if len(parts) > MAX_REWARD_PARTS or any(len(part.name) > MAX_PART_NAME for part in parts):
        return "reward_parts: too many or too long names"
    position = 0
    for span in rollout.spans:
        if span.start != position or span.end <= span.start:
            return "spans: do not cover the tokens in order"
        position = span.end
    return "" if position == length else "spans: do not cover the tokens in order"


def ending_problem(rollout: Rollout, contract: Contract) -> str:
    """A completion ends with an end token or at the longest length, and has no end token before its end."""
    ends = contract.end_token_ids
    if not ends:
        return ""
    is_end = np.isin(rollout.token_ids, ends)
    if is_end[:-1].any():
        return f"token_ids: the end token {rollout.token_ids[int(is_end.argmax())]} stands before the end"
    if bool(is_end[-1]) != (rollout.finish_reason is FinishReason.EOS):
        return f"finish_reason: {rollout.finish_reason.value}, the last token is {rollout.token_ids[-1]}"
    if not is_end[-1] and rollout.token_ids.size < contract.sampling.max_new_tokens:
        return f"token_ids: {rollout.token_ids.size} tokens without the end token {' or '.join(map(str, ends))}"
    return ""
