"""Sealing of groups: canonical bytes made once by the sampler, opened only by readers of its numbers.

    seal          group -> its canonical bytes        the sampler's outbox
    read_sealed   bytes of our own store              the outbox again, the coordinator's lease
    canonical     a peer's message -> its bytes       the coordinator's intake
    open_group    sealed -> group                     the learner

Canonical bytes are protobuf's deterministic ones, of fields that this program knows, with whole numbers within int64. A
group that is pushed twice has the same digest.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from heterorl.common.errors import MalformedPayload
from heterorl.common.process.tracing import well_formed
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import Group, GroupId, SealedGroup
from heterorl.common.wire.columns import columns_of, rollouts_of, versions_of, write_columns
from heterorl.common.wire.common_messages import MAX_INT64
from heterorl.v1 import rollout_pb2

GroupMessage = rollout_pb2.Group
"""A group as protobuf has it."""


def seal(group: Group) -> SealedGroup:
    """Make a group's canonical bytes."""
    message = rollout_pb2.Group(
        assignment=group.assignment,
        prompt_index=group.prompt_index,
        oldest_version=group.oldest_version,
        state_root=group.state_root,
        generation_s=group.generation_s,
        is_seeded=group.is_seeded,
        traceparent=group.trace,
    )
    message.id.site, message.id.incarnation, message.id.sequence = (
        group.id.site,
        group.id.incarnation,
        group.id.sequence,
    )
    write_columns(group, message)
    return _sealed(message, message.SerializeToString(deterministic=True))


def sealed(group: Group | SealedGroup) -> SealedGroup:
    """Seal a group, unless it is sealed already."""
    return group if isinstance(group, SealedGroup) else seal(group)


def read_sealed(data: bytes) -> SealedGroup:
    """Take canonical bytes as they are; raises MalformedPayload if they are not a group."""
    return _sealed(group_message(data), data)


def canonical(message: rollout_pb2.Group) -> SealedGroup:
    """Clean a peer's group: unknown fields are dropped, numbers beyond int64 clamped, also in the message."""
    message.DiscardUnknownFields()
    message.id.sequence = min(message.id.sequence, MAX_INT64)
    message.assignment = min(message.assignment, MAX_INT64)
    message.prompt_index = min(message.prompt_index, MAX_INT64)
    message.traceparent = well_formed(message.traceparent)
    return _sealed(message, message.SerializeToString(deterministic=True))


def open_group(sealed: SealedGroup) -> Group:
    """Read a group from its bytes; raises MalformedPayload if the bytes are not a group."""
    message = group_message(sealed.data)
    columns = columns_of(message)
    return Group(
        id=sealed.id,
        assignment=sealed.assignment,
        prompt_index=sealed.prompt_index,
        prompt_token_ids=columns.prompt,
        rollouts=rollouts_of(columns),
        oldest_version=sealed.oldest_version,
        state_root=sealed.state_root,
        generation_s=columns.generation_s,
        is_seeded=message.is_seeded,
        trace=sealed.trace,
    )


def shell_of(sealed: SealedGroup) -> bytes:
    """The bytes of a group without its numbers: the coordinator refuses it and counts its sequence."""
    message = group_message(sealed.data)
    shell = rollout_pb2.Group(
        id=message.id, assignment=message.assignment, oldest_version=message.oldest_version, id_bytes=1
    )
    return shell.SerializeToString(deterministic=True)


def group_message(data: bytes) -> rollout_pb2.Group:
    """The message of a group's bytes; raises MalformedPayload if they are not a group."""
    try:
        return rollout_pb2.Group.FromString(data)
    except DecodeError as error:
        raise MalformedPayload(f"not a group: {error}") from error


def _sealed(message: rollout_pb2.Group, data: bytes) -> SealedGroup:
    return SealedGroup(
        id=GroupId(site=SiteId(message.id.site), incarnation=message.id.incarnation, sequence=message.id.sequence),
        data=data,
        assignment=message.assignment,
        prompt_index=message.prompt_index,
        oldest_version=message.oldest_version,
        state_root=Digest(message.state_root),
        versions=versions_of(message),
        trace=well_formed(message.traceparent),
    )
