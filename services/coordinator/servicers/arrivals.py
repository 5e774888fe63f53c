"""Pushed groups -> arrivals that the intake records: examined ones, and those whose numbers cannot be read."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.errors import MalformedPayload
from heterorl.common.types.common import Contract
from heterorl.common.wire.columns import columns_of
from heterorl.common.wire.common import MAX_INT64, bytes_digest
from heterorl.common.wire.rollout import group_id_from_pb
from heterorl.common.wire.seal import canonical
from heterorl.coordinator.groups.intake import Arrival, examined
from heterorl.v1 import rollout_pb2


def read_all(
    pushes: Sequence[Sequence[rollout_pb2.Group]], *, contract: Contract, max_prompt_tokens: int
) -> list[list[Arrival]]:
    """The groups of messages, in order."""
    return [[read(group, contract=contract, max_prompt_tokens=max_prompt_tokens) for group in push] for push in pushes]


def read(message: rollout_pb2.Group, *, contract: Contract, max_prompt_tokens: int) -> Arrival:
    """The group of a message; one whose columns disagree is recorded as invalid, so that its assignment is counted."""
    try:
        columns = columns_of(message)
        return examined(canonical(message), columns, contract, max_prompt_tokens=max_prompt_tokens)
    except MalformedPayload as error:
        data = message.SerializeToString(deterministic=True)
        return Arrival(
            id=group_id_from_pb(message.id),
            assignment=min(message.assignment, MAX_INT64),
            oldest_version=message.oldest_version,
            num_bytes=len(data),
            digest=bytes_digest(data),
            problem=str(error),
        )
