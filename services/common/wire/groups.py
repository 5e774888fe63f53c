"""Protobuf <-> domain values: the only border between the two. Total, lossless, validating.

`*_to_pb` never fails on a valid value; `*_from_pb` raises InvalidRequest on what no value can hold. The bytes that
`manifest_to_bytes` makes are a version's identity: whoever receives them keeps them as they are and never
serialises a manifest again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import blake3
import numpy as np
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.process.tracing import well_formed
from heterorl.common.types.digests import digest_field
from heterorl.common.types.values import (
    Contract,
    Digest,
    FinishReason,
    Float32Array,
    Group,
    GroupId,
    Int32Array,
    Manifest,
    PayloadKind,
    PayloadRef,
    RewardPart,
    Rollout,
    SiteId,
    VersionSpan,
)
from heterorl.common.wire.contract import contract_from_pb, contract_to_pb
from heterorl.v1 import common_pb2, policy_pb2, rollout_pb2

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_RUN_ID = 256

_FINISH = {
    FinishReason.EOS: rollout_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
}
_PAYLOAD = {kind: policy_pb2.PayloadKind.Value(f"PAYLOAD_KIND_{kind.name}") for kind in PayloadKind}
_FINISH_OF = {pb: value for value, pb in _FINISH.items()}
_PAYLOAD_OF = {pb: value for value, pb in _PAYLOAD.items()}


def group_id_to_pb(value: GroupId) -> common_pb2.GroupId:
    """Convert a group's identity."""
    return common_pb2.GroupId(site=value.site, incarnation=value.incarnation, sequence=value.sequence)


def group_id_from_pb(message: common_pb2.GroupId) -> GroupId:
    """Convert a group's identity."""
    return GroupId(
        site=SiteId(message.site), incarnation=message.incarnation, sequence=min(message.sequence, MAX_INT64)
    )


def _ids_from_pb(values: Sequence[int]) -> Int32Array:
    # An id beyond int32 is clamped, not wrapped: it stays outside every vocabulary and is refused as such.
    wide = np.fromiter(values, dtype=np.uint32, count=len(values))
    return np.minimum(wide, MAX_INT32).astype(np.int32)


def _rollout_to_pb(value: Rollout) -> rollout_pb2.Rollout:
    # .tolist(): protobuf takes lists three times faster than arrays.
    return rollout_pb2.Rollout(
        token_ids=value.token_ids.tolist(),
        sampler_logprobs=value.sampler_logprobs.tolist(),
        spans=[rollout_pb2.VersionSpan(version=s.version, start=s.start, end=s.end) for s in value.spans],
        reward=value.reward,
        reward_parts=[rollout_pb2.RewardPart(name=p.name, value=p.value) for p in value.reward_parts],
        finish_reason=_FINISH[value.finish_reason],
    )


def _rollout_from_pb(message: rollout_pb2.Rollout) -> Rollout:
    finish_reason = _FINISH_OF.get(message.finish_reason)
    if finish_reason is None:
        raise InvalidRequest(f"rollout.finish_reason: {message.finish_reason} is not a reason")
    num_logprobs = len(message.sampler_logprobs)
    logprobs: Float32Array = np.fromiter(message.sampler_logprobs, dtype=np.float32, count=num_logprobs)
    return Rollout(
        token_ids=_ids_from_pb(message.token_ids),
        sampler_logprobs=logprobs,
        spans=tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in message.spans),
        reward=message.reward,
        reward_parts=tuple(RewardPart(name=p.name, value=p.value) for p in message.reward_parts),
        finish_reason=finish_reason,
    )


def group_to_pb(value: Group) -> rollout_pb2.Group:
    """Convert a group."""
    return rollout_pb2.Group(
        id=group_id_to_pb(value.id),
        assignment=value.assignment,
        prompt_index=value.prompt_index,
        prompt_token_ids=value.prompt_token_ids.tolist(),
        rollouts=[_rollout_to_pb(rollout) for rollout in value.rollouts],
        oldest_version=value.oldest_version,
        state_root=value.state_root,
        generation_s=value.generation_s,
        is_seeded=value.is_seeded,
        traceparent=value.trace,
    )


def group_from_pb(message: rollout_pb2.Group) -> Group:
    """Convert a group.

    Raises:
        InvalidRequest: an enum value is unknown.
    """
    return Group(
        id=group_id_from_pb(message.id),
        assignment=min(message.assignment, MAX_INT64),
        prompt_index=min(message.prompt_index, MAX_INT64),
        prompt_token_ids=_ids_from_pb(message.prompt_token_ids),
        rollouts=tuple(_rollout_from_pb(rollout) for rollout in message.rollouts),
        oldest_version=message.oldest_version,
        state_root=Digest(message.state_root),
        generation_s=message.generation_s,
        is_seeded=message.is_seeded,
        trace=well_formed(message.traceparent),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceivedGroup(Group):
    """A group with its bytes, made where that holds up nobody."""

    data: bytes


def received(value: Group) -> ReceivedGroup:
    """Serialise a group now rather than on the store's thread."""
    return ReceivedGroup(**{name.name: getattr(value, name.name) for name in fields(value)}, data=group_to_bytes(value))


def group_to_bytes(value: Group) -> bytes:
    """Serialise a group for a durable spool or queue."""
    if isinstance(value, ReceivedGroup):
        return value.data
    return group_to_pb(value).SerializeToString(deterministic=True)


def group_from_bytes(data: bytes) -> Group:
    """Read what `group_to_bytes` wrote.

    Raises:
        MalformedPayload: the bytes are not a group.
    """
    try:
        return group_from_pb(rollout_pb2.Group.FromString(data))
    except DecodeError as error:
        raise MalformedPayload(f"not a group: {error}") from error


def bytes_digest(data: bytes) -> Digest:
    """Blake3 of bytes, lower-case hex."""
    return Digest(blake3.blake3(data).hexdigest())


def contract_to_bytes(value: Contract) -> bytes:
    """Serialise a contract for the store."""
    return contract_to_pb(value).SerializeToString(deterministic=True)


def contract_from_bytes(data: bytes) -> Contract:
    """Read what `contract_to_bytes` wrote."""
    return contract_from_pb(common_pb2.Contract.FromString(data))


def payload_to_pb(value: PayloadRef) -> policy_pb2.PayloadRef:
    """Convert a payload's reference."""
    return policy_pb2.PayloadRef(
        kind=_PAYLOAD[value.kind],
        from_version=value.from_version,
        to_version=value.to_version,
        digest=value.digest,
        num_bytes=value.num_bytes,
    )


def payload_from_pb(message: policy_pb2.PayloadRef) -> PayloadRef:
    """Convert a payload's reference.

    Raises:
        InvalidRequest: the kind is not stated, the digest is none, or the size is beyond a file's.
    """
    kind = _PAYLOAD_OF.get(message.kind)
    if kind is None:
        raise InvalidRequest("payload.kind: not stated")
    if message.num_bytes > MAX_INT64:
        raise InvalidRequest(f"payload.num_bytes: {message.num_bytes} is beyond any file")
    return PayloadRef(
        kind=kind,
        from_version=message.from_version,
        to_version=message.to_version,
        # The one place where a payload's name enters: it becomes a file's name.
        digest=digest_field("payload.digest", message.digest),
        num_bytes=message.num_bytes,
    )


def manifest_to_bytes(value: Manifest) -> bytes:
    """Serialise a manifest, once, at its publisher."""
    return policy_pb2.Manifest(
        run_id=value.run_id,
        epoch=value.epoch,
        version=value.version,
        parent_version=value.parent_version,
        parent_digest=value.parent_digest,
        layout_id=value.layout_id,
        chunk_digests=list(value.chunk_digests),
        state_root=value.state_root,
        step=value.step,
        num_changed=value.num_changed,
        num_elements=value.num_elements,
        full_bytes=value.full_bytes,
        payloads=[payload_to_pb(payload) for payload in value.payloads],
        chunk_elements=value.chunk_elements,
        num_byte_elements=value.num_byte_elements,
    ).SerializeToString(deterministic=True)


def manifest_from_bytes(data: bytes) -> Manifest:
    """Read the exact bytes of a manifest.

    Raises:
        MalformedPayload: the bytes are not a manifest, or a digest in it is none.
    """
    try:
        message = policy_pb2.Manifest.FromString(data)
        payloads = tuple(payload_from_pb(payload) for payload in message.payloads)
        layout_id = digest_field("layout_id", message.layout_id)
        state_root = digest_field("state_root", message.state_root)
        parent_digest = digest_field("parent_digest", message.parent_digest) if message.parent_digest else ""
        if len(message.run_id) > MAX_RUN_ID:
            # Written down with each version that is used.
            raise InvalidRequest(f"run_id: {len(message.run_id)} characters, at most {MAX_RUN_ID}")
    except (DecodeError, InvalidRequest) as error:
        raise MalformedPayload(f"not a manifest: {error}") from error
    return Manifest(
        run_id=message.run_id,
        epoch=message.epoch,
        version=message.version,
        parent_version=message.parent_version,
        parent_digest=parent_digest,
        layout_id=layout_id,
        chunk_digests=tuple(message.chunk_digests),
        state_root=state_root,
        step=message.step,
        num_changed=message.num_changed,
        num_elements=message.num_elements,
        full_bytes=message.full_bytes,
        payloads=payloads,
        chunk_elements=message.chunk_elements,
        num_byte_elements=message.num_byte_elements,
    )


def manifest_digest(data: bytes) -> Digest:
    """Identity of a version: blake3 of the exact bytes of its manifest."""
    return bytes_digest(data)
