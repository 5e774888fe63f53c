"""Whether the largest group that a contract allows fits a message: pure, asked before a run can begin with it."""

from __future__ import annotations

from heterorl.common.types.common import Contract
from heterorl.coordinator.config import CoordinatorConfig

ROLLOUT_OVERHEAD_BYTES = 1024
"""For spans, reward parts and the lengths of fields; a group that needs more is refused when it comes."""
LOGPROB_BYTES = 4
MAX_GROUP_SIZE = 4096
ACTION = (
    "raise max_message_bytes at the coordinator and the learner, or lower sampling.max_new_tokens,"
    " sampling.max_trajectory_tokens or group_size at every node, or the coordinator's max_prompt_tokens"
)


def worst_bytes(contract: Contract, *, max_prompt_tokens: int) -> int:
    """Bytes of the largest group that the contract allows."""
    token_bytes = max(1, -(-max(0, contract.vocab_size - 1).bit_length() // 8))
    rollout = contract.max_rollout_tokens * (token_bytes + LOGPROB_BYTES) + ROLLOUT_OVERHEAD_BYTES
    # Every rollout has the experts of its prompt's tokens, too.
    rollout += (max_prompt_tokens + contract.max_rollout_tokens) * contract.routed_token_bytes
    return contract.group_size * rollout + max_prompt_tokens * token_bytes


def problem_of(contract: Contract, config: CoordinatorConfig) -> str:
    """Why groups of this contract may not fit; empty when all do."""
    if contract.group_size > MAX_GROUP_SIZE:
        return f"contract.group_size: {contract.group_size}, at most {MAX_GROUP_SIZE} rollouts travel as one group"
    worst = worst_bytes(contract, max_prompt_tokens=config.max_prompt_tokens)
    if worst <= config.max_group_bytes:
        return ""
    return (
        f"max_message_bytes: {config.max_message_bytes} is too small for a group of this contract,"
        f" {contract.group_size} rollouts of {contract.max_rollout_tokens} tokens and a prompt of"
        f" {config.max_prompt_tokens}, which needs up to {worst} bytes"
    )
