"""Pushed messages <-> what the intake records: a group, or what can be known of one that no value can hold."""

from __future__ import annotations

from heterorl.v1 import rollout_pb2

from services.common.errors import InvalidRequest
from services.common.types import Group
from services.common.wire import MAX_INT64, bytes_digest, group_from_pb, group_id_from_pb, received
from services.coordinator.intake import Arrival


def read(message: rollout_pb2.Group, *, max_prompt_tokens: int) -> Group | Arrival:
    """The group of a message; one that is none is recorded as invalid, so that whoever is answered is counted too."""
    try:
        _check_counts(message, max_prompt_tokens=max_prompt_tokens)
        return received(group_from_pb(message))
    except InvalidRequest as error:
        data = message.SerializeToString(deterministic=True)
        return Arrival(
            id=group_id_from_pb(message.id),
            assignment=min(message.assignment, MAX_INT64),
            oldest_version=message.oldest_version,
            num_bytes=len(data),
            digest=bytes_digest(data),
            problem=str(error),
        )


def _check_counts(group: rollout_pb2.Group, *, max_prompt_tokens: int) -> None:
    """Count before anything becomes objects: a log-prob's four bytes on the wire bound a token, which may cost one.

    Raises:
        InvalidRequest: no contract allows the group.
    """
    num_prompt = len(group.prompt_token_ids)
    if num_prompt > max_prompt_tokens:
        raise InvalidRequest(f"prompt_token_ids: {num_prompt} tokens, max_prompt_tokens is {max_prompt_tokens}")
    for number, rollout in enumerate(group.rollouts):
        num_tokens, num_logprobs = len(rollout.token_ids), len(rollout.sampler_logprobs)
        if num_logprobs != num_tokens:
            raise InvalidRequest(f"rollouts[{number}].sampler_logprobs: {num_logprobs} for {num_tokens} tokens")
        if len(rollout.spans) > num_tokens:
            raise InvalidRequest(f"rollouts[{number}].spans: {len(rollout.spans)} for {num_tokens} tokens")
