"""A group as bytes: sealed once where it is made, opened where somebody looks into it, unopened in between.

    seal          group -> its canonical bytes        the sampler's outbox
    read_sealed   bytes that a digest vouches for     the outbox again, the coordinator's lease
    receive       a peer's message -> both forms      the coordinator's intake, the learner
    open_group    sealed -> group                     whoever has not received it

On the wire a list of packed numbers is a length with bytes, and a message inside another is, too. So the same bytes are
read here by a second description of the same messages, in which both are plain bytes: protobuf copies them in one
piece and numpy reads them at once. The description is made of the first one, so it cannot differ in anything else.

Canonical are the bytes that protobuf writes deterministically of the fields that this program knows, as this program
understands them: the same group has the same digest, whoever packed it.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.process.tracing import well_formed
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import (
    FinishReason,
    Group,
    GroupId,
    RewardPart,
    Rollout,
    SealedGroup,
    VersionSpan,
)
from heterorl.common.wire.common import MAX_INT32, MAX_INT64
from heterorl.common.wire.numbers import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from heterorl.v1 import common_pb2, rollout_pb2

_FINISH = {
    FinishReason.EOS: rollout_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
}
_FINISH_OF = {pb: value for value, pb in _FINISH.items()}
_NUMBERS = (FieldDescriptorProto.TYPE_UINT32, FieldDescriptorProto.TYPE_FLOAT)


def _as_bytes() -> DescriptorPool:
    """Describe the messages once more: lists of numbers, and a group inside another message, are bytes."""
    pool = DescriptorPool()
    for module in (common_pb2, rollout_pb2):
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        for message in file.message_type:
            for field in message.field:
                if field.label == FieldDescriptorProto.LABEL_REPEATED and field.type in _NUMBERS:
                    field.label, field.type = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.TYPE_BYTES
                elif field.type_name == f".{rollout_pb2.Group.DESCRIPTOR.full_name}":
                    field.type = FieldDescriptorProto.TYPE_BYTES
                    field.ClearField("type_name")
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _as_bytes()


def as_bytes(name: str) -> Any:
    """The class of a message of this package in which lists of numbers and a group are bytes."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{rollout_pb2.DESCRIPTOR.package}.{name}"))


_GROUP, _ROLLOUT, _ID = as_bytes("Group"), as_bytes("Rollout"), as_bytes("GroupId")
_SPAN, _PART = as_bytes("VersionSpan"), as_bytes("RewardPart")


def seal(group: Group) -> SealedGroup:
    """Make a group's canonical bytes."""
    raw = _GROUP(
        id=_ID(site=group.id.site, incarnation=group.id.incarnation, sequence=group.id.sequence),
        assignment=group.assignment,
        prompt_index=group.prompt_index,
        prompt_token_ids=pack_ids(group.prompt_token_ids),
        rollouts=[_rollout_to_raw(rollout) for rollout in group.rollouts],
        oldest_version=group.oldest_version,
        state_root=group.state_root,
        generation_s=group.generation_s,
        is_seeded=group.is_seeded,
        traceparent=group.trace,
    )
    return _sealed(raw, raw.SerializeToString(deterministic=True))


def sealed(group: Group | SealedGroup) -> SealedGroup:
    """The same, of a group that may be sealed already."""
    return group if isinstance(group, SealedGroup) else seal(group)


def read_sealed(data: bytes) -> SealedGroup:
    """Take canonical bytes as they are.

    Raises:
        MalformedPayload: they are not a group.
    """
    return _sealed(_parsed(data), data)


def sealed_of(raw: Any, data: bytes) -> SealedGroup:
    """The same, of a message (lists as bytes) that was parsed of just these bytes."""
    return _sealed(raw, data)


def receive(message: rollout_pb2.Group) -> tuple[SealedGroup, Group]:
    """Clean a peer's group and open it; fields that this program does not know are dropped, from the message too.

    Raises:
        InvalidRequest: an enum value is unknown; the message is as it was.
    """
    for rollout in message.rollouts:
        _finish_of(rollout.finish_reason)
    message.DiscardUnknownFields()
    data = message.SerializeToString(deterministic=True)
    raw = _parsed(data)
    group, is_as_stated = _group_of(raw)
    return _sealed(raw, data) if is_as_stated else seal(group), group


def open_group(sealed: SealedGroup) -> Group:
    """Make a group of its bytes.

    Raises:
        InvalidRequest: an enum value is unknown.
        MalformedPayload: the bytes are not a group.
    """
    return _group_of(_parsed(sealed.data))[0]


def shell_of(sealed: SealedGroup) -> bytes:
    """The bytes of a group without its rollouts and its prompt."""
    raw = _parsed(sealed.data)
    raw.ClearField("rollouts")
    raw.ClearField("prompt_token_ids")
    return bytes(raw.SerializeToString(deterministic=True))


def _parsed(data: bytes) -> Any:
    try:
        return _GROUP.FromString(data)
    except DecodeError as error:
        raise MalformedPayload(f"not a group: {error}") from error


def _sealed(raw: Any, data: bytes) -> SealedGroup:
    return SealedGroup(
        id=_id_of(raw),
        data=data,
        assignment=min(raw.assignment, MAX_INT64),
        prompt_index=min(raw.prompt_index, MAX_INT64),
        oldest_version=raw.oldest_version,
        state_root=Digest(raw.state_root),
        versions=tuple(sorted({span.version for rollout in raw.rollouts for span in rollout.spans})),
        trace=well_formed(raw.traceparent),
    )


def _group_of(raw: Any) -> tuple[Group, bool]:
    """The group, and whether all of it is as the bytes say: nothing was clamped or emptied."""
    (prompt, *token_ids), highest = unpack_ids([raw.prompt_token_ids, *(each.token_ids for each in raw.rollouts)])
    logprobs = unpack_logprobs([each.sampler_logprobs for each in raw.rollouts])
    group = Group(
        id=_id_of(raw),
        assignment=min(raw.assignment, MAX_INT64),
        prompt_index=min(raw.prompt_index, MAX_INT64),
        prompt_token_ids=prompt,
        rollouts=tuple(
            Rollout(
                token_ids=ids,
                sampler_logprobs=values,
                spans=tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in each.spans),
                reward=each.reward,
                reward_parts=tuple(map(_part_of, each.reward_parts)),
                finish_reason=_finish_of(each.finish_reason),
                routed_experts=each.routed_experts,
            )
            for each, ids, values in zip(raw.rollouts, token_ids, logprobs, strict=True)
        ),
        oldest_version=raw.oldest_version,
        state_root=Digest(raw.state_root),
        generation_s=raw.generation_s,
        is_seeded=raw.is_seeded,
        trace=well_formed(raw.traceparent),
    )
    stated = (raw.id.sequence, raw.assignment, raw.prompt_index, raw.traceparent)
    is_as_stated = stated == (group.id.sequence, group.assignment, group.prompt_index, group.trace)
    is_as_stated = is_as_stated and not any(says_once(part) for each in raw.rollouts for part in each.reward_parts)
    return group, is_as_stated and highest <= MAX_INT32


def _id_of(raw: Any) -> GroupId:
    return GroupId(site=SiteId(raw.id.site), incarnation=raw.id.incarnation, sequence=min(raw.id.sequence, MAX_INT64))


def _finish_of(pb: int) -> FinishReason:
    reason: FinishReason | None = _FINISH_OF.get(pb)  # type: ignore[call-overload]
    if reason is None:
        raise InvalidRequest(f"rollout.finish_reason: {pb} is not a reason")
    return reason


def _rollout_to_raw(value: Rollout) -> Any:
    return _ROLLOUT(
        token_ids=pack_ids(value.token_ids),
        sampler_logprobs=pack_logprobs(value.sampler_logprobs),
        spans=[_SPAN(version=span.version, start=span.start, end=span.end) for span in value.spans],
        reward=value.reward,
        reward_parts=[_part_to_raw(part) for part in value.reward_parts],
        finish_reason=_FINISH[value.finish_reason],
        routed_experts=value.routed_experts,
    )


def says_once(raw: Any) -> bool:
    """Whether a part of a reward states the weight 1, which canonical bytes leave out."""
    return bool(raw.weight == 1.0 and raw.HasField("weight"))


def _part_to_raw(value: RewardPart) -> Any:
    raw = _PART(name=value.name, value=value.value, signature=value.signature)
    # A weight of 1 is not written: parts without weights have the bytes that they always had.
    if value.weight != 1.0:
        raw.weight = value.weight
    return raw


def _part_of(raw: Any) -> RewardPart:
    weight = raw.weight if raw.HasField("weight") else 1.0
    return RewardPart(name=raw.name, value=raw.value, weight=weight, signature=raw.signature)
