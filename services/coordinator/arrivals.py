"""Pushed messages <-> what the intake records: a group, or what can be known of one that no value can hold."""

from __future__ import annotations

from heterorl.v1 import rollout_pb2

from services.common.errors import InvalidRequest
from services.common.types import Group
from services.common.wire import MAX_INT64, bytes_digest, group_from_pb, group_id_from_pb
from services.coordinator.intake import Arrival


def read(message: rollout_pb2.Group) -> Group | Arrival:
    """The group of a message; one that is none is recorded as invalid, so that whoever is answered is counted too."""
    try:
        return group_from_pb(message)
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
