"""Pushed messages -> what the intake records: a group that was examined, or what is known of one nobody can read."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import Contract
from heterorl.common.wire.common import MAX_INT64, bytes_digest
from heterorl.common.wire.rollout import group_id_from_pb
from heterorl.common.wire.seal import receive, sealed_of
from heterorl.coordinator.groups.admission import record_problem
from heterorl.coordinator.groups.intake import Arrival, examined, sound
from heterorl.coordinator.rpc.plain import PlainPush
from heterorl.coordinator.servicers.content import are_sound
from heterorl.v1 import rollout_pb2

Pushed = PlainPush | rollout_pb2.PushGroupsRequest
"""A push as the door has it."""


def read_all(
    pushes: Sequence[Pushed], *, contract: Contract, max_prompt_tokens: int
) -> tuple[list[list[Arrival]], InvalidRequest | None]:
    """The groups of messages, in order, up to one that is no message at all, which is the call's end.

    Plain ones are looked at together, and one by one where something is wrong.
    """
    plain = [group for push in pushes if isinstance(push, PlainPush) for group in push.groups]
    all_sound = bool(plain) and are_sound(plain, contract, max_prompt_tokens=max_prompt_tokens)
    arrivals: list[list[Arrival]] = []
    for push in pushes:
        if isinstance(push, PlainPush):
            found: list[Arrival] = []
            for group, data in zip(push.groups, push.data, strict=True):
                if all_sound or are_sound([group], contract, max_prompt_tokens=max_prompt_tokens):
                    found.append(sound(sealed_of(group, data)))
                    continue
                try:
                    message = _message(data)
                except InvalidRequest as error:
                    return arrivals, error
                found.append(read(message, contract=contract, max_prompt_tokens=max_prompt_tokens))
        else:
            found = [
                read(group, contract=contract, max_prompt_tokens=max_prompt_tokens)
                for group in (push.group, *push.more)
            ]
        arrivals.append(found)
    return arrivals, None


def _message(data: bytes) -> rollout_pb2.Group:
    try:
        return rollout_pb2.Group.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"not a Group: {error}") from error


def read(message: rollout_pb2.Group, *, contract: Contract, max_prompt_tokens: int) -> Arrival:
    """The group of a message; one that is none is recorded as invalid, so that whoever is answered is counted too."""
    try:
        _check_counts(message, contract=contract, max_prompt_tokens=max_prompt_tokens)
        return examined(*receive(message), contract, max_prompt_tokens=max_prompt_tokens)
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


def _check_counts(group: rollout_pb2.Group, *, contract: Contract, max_prompt_tokens: int) -> None:
    """Count before anything becomes objects: making an array of a message's numbers holds up every other thread.

    Raises:
        InvalidRequest: no contract allows the group.
    """
    num_prompt = len(group.prompt_token_ids)
    if num_prompt > max_prompt_tokens:
        raise InvalidRequest(f"prompt_token_ids: {num_prompt} tokens, max_prompt_tokens is {max_prompt_tokens}")
    if len(group.rollouts) != contract.group_size:
        raise InvalidRequest(f"rollouts: {len(group.rollouts)}, the group size is {contract.group_size}")
    for number, rollout in enumerate(group.rollouts):
        num_tokens, num_logprobs = len(rollout.token_ids), len(rollout.sampler_logprobs)
        if num_tokens > contract.sampling.max_new_tokens:
            allowed = f"allowed are 1..{contract.sampling.max_new_tokens}"
            raise InvalidRequest(f"rollouts[{number}].token_ids: {num_tokens} tokens, {allowed}")
        if num_logprobs != num_tokens:
            raise InvalidRequest(f"rollouts[{number}].sampler_logprobs: {num_logprobs} for {num_tokens} tokens")
        problem = record_problem(len(rollout.routed_experts), contract, num_read=num_prompt + num_tokens - 1)
        if problem:
            raise InvalidRequest(f"rollouts[{number}].{problem}")
        if len(rollout.spans) > num_tokens:
            raise InvalidRequest(f"rollouts[{number}].spans: {len(rollout.spans)} for {num_tokens} tokens")
