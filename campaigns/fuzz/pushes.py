"""Target: pushed bytes as the coordinator's own reader takes them, beside the scan and protobuf's parser."""

from __future__ import annotations

import dataclasses
import random

from google.protobuf.message import DecodeError, Message

from campaigns.fuzz.messages import any_message
from campaigns.fuzz.mutate import mutated
from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.groups.intake import Arrival
from heterorl.coordinator.rpc.plain import OBJECT_BYTES, REST_BYTES, SMALL_BYTES, PlainPush, read_push
from heterorl.coordinator.rpc.scan import parse
from heterorl.coordinator.servicers.arrivals import Pushed, read_all
from heterorl.v1 import rollout_pb2
from tests.support.run import CONTRACT

END = 300
LONGEST = 12
"""Tokens of a completion in the contract; longer ones are bytes like any other until they are judged."""
ROUTED = 4
"""Bytes of a token's record of experts."""
_CONTRACT = dataclasses.replace(
    CONTRACT,
    vocab_size=1000,
    end_token_ids=(2, END),
    routed_token_bytes=ROUTED,
    sampling=dataclasses.replace(CONTRACT.sampling, max_new_tokens=LONGEST),
)
_MAX_PROMPT = 64
_FIRST, _MORE = 0x0A, 0x12
"""Tags of a push's groups."""
_NEWER = b"\xf2\x3f\x03new"
"""A field of a program that is newer."""
_LONG = SMALL_BYTES // 6
"""Tokens with which a group's lists are looked at before it is parsed."""


def _length(data: bytes) -> bytes:
    """A length in front of bytes, in its shortest form."""
    out, number = bytearray(), len(data)
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


class PushTarget:
    """read_push: nothing that the scan or the parser refuses, the fields that they find, and all that is canonical."""

    def case(self, draw: random.Random) -> bytes:
        """A push of honest groups or of any; damaged in half of the cases."""
        count = draw.choice((1, 1, 2, 3))
        groups = [_honest(draw) if draw.random() < 0.8 else _any(draw) for _ in range(count)]
        parts = [group.SerializeToString(deterministic=True) for group in groups]
        tags = [_FIRST] + [_MORE] * (count - 1)
        if draw.random() < 0.1:
            tags = [draw.choice((_FIRST, _MORE)) for _ in tags]
        if draw.random() < 0.1:
            parts[draw.randrange(count)] += _NEWER
        data = b"".join(bytes([tag]) + _length(part) + part for tag, part in zip(tags, parts, strict=True))
        return mutated(data, draw, other=data) if draw.random() < 0.5 and data else data

    def run(self, case: bytes) -> None:
        """Read it both ways."""
        plain = read_push(case)
        refusal: InvalidRequest | None = None
        message: Message = rollout_pb2.PushGroupsRequest()
        try:
            message = parse(case, rollout_pb2.PushGroupsRequest.DESCRIPTOR)
        except InvalidRequest as error:
            refusal = error
        if refusal is not None:
            assert plain is None or _refused_inside(plain), f"taken, and refused by the scan: {refusal}"
            raise refusal
        assert isinstance(message, rollout_pb2.PushGroupsRequest)
        if plain is None:
            assert not _must_be_taken(message, case), "canonical, and not taken"
            return
        groups = [message.group, *message.more]
        stated = [group.SerializeToString(deterministic=True) for group in groups]
        assert [_again(group.SerializeToString()) for group in plain.groups] == stated, "other fields than the parser's"
        assert [_again(data) for data in plain.data] == stated, "other bytes than the fields"
        assert _arrivals(plain) == _arrivals(message), "judged otherwise"


def _again(data: bytes) -> bytes:
    """A group's bytes as the parser understands them."""
    return rollout_pb2.Group.FromString(data).SerializeToString(deterministic=True)


def _refused_inside(plain: PlainPush) -> bool:
    """Whether the parser refuses one of the groups alone: what is inside lists is looked at later."""
    try:
        for data in plain.data:
            rollout_pb2.Group.FromString(data)
    except DecodeError:
        return isinstance(read_all([plain], contract=_CONTRACT, max_prompt_tokens=_MAX_PROMPT)[1], InvalidRequest)
    return False


def _must_be_taken(message: rollout_pb2.PushGroupsRequest, data: bytes) -> bool:
    """Whether it is what our own samplers send: canonical, with few messages inside and little beside its lists; the scan allowed it."""
    known = rollout_pb2.PushGroupsRequest.FromString(data)
    known.DiscardUnknownFields()
    if not message.HasField("group") or known.SerializeToString(deterministic=True) != data:
        return False
    return all(
        (group.ByteSize() <= SMALL_BYTES or _rest(group) <= REST_BYTES)
        and _num_objects(group) * OBJECT_BYTES <= group.ByteSize()
        for group in (message.group, *message.more)
    )


def _rest(group: rollout_pb2.Group) -> int:
    """Bytes beside the lists, and some for each rollout's own frame."""
    rest = rollout_pb2.Group.FromString(group.SerializeToString())
    del rest.prompt_token_ids[:]
    for rollout in rest.rollouts:
        del rollout.token_ids[:]
        del rollout.sampler_logprobs[:]
    return rest.ByteSize() + 32 * len(rest.rollouts)


def _num_objects(group: rollout_pb2.Group) -> int:
    return sum(1 + len(rollout.spans) + len(rollout.reward_parts) for rollout in group.rollouts)


def _arrivals(push: Pushed) -> tuple[list[list[Arrival]], str]:
    arrivals, error = read_all([push], contract=_CONTRACT, max_prompt_tokens=_MAX_PROMPT)
    return arrivals, str(error or "")


def _honest(draw: random.Random) -> rollout_pb2.Group:
    length = draw.choice((_LONG, LONGEST, LONGEST)) if draw.random() < 0.1 else draw.randint(1, LONGEST)
    prompt = [draw.randrange(1000) for _ in range(draw.randint(1, 8))]
    group = rollout_pb2.Group(
        assignment=draw.randrange(1000),
        prompt_index=draw.randrange(50),
        prompt_token_ids=prompt,
        rollouts=[_rollout(draw, length, num_prompt=len(prompt)) for _ in range(2)],
        oldest_version=3,
        state_root="a" * 64,
        generation_s=draw.choice((0.0, 1.5)),
        is_seeded=draw.random() < 0.5,
        traceparent=draw.choice(("", f"00-{'1' * 32}-{'2' * 16}-01")),
    )
    group.id.site, group.id.incarnation, group.id.sequence = "eu-1", "b1946ac9", draw.randrange(1, 300)
    return group


def _rollout(draw: random.Random, length: int, *, num_prompt: int) -> rollout_pb2.Rollout:
    ids = [draw.choice((0, 5, 127, 128, 999)) for _ in range(length)]
    if draw.random() < 0.05:
        ids[draw.randrange(length)] = draw.choice((1000, 1001, 2, END))
    is_end = length < LONGEST or draw.random() < 0.5
    if is_end:
        ids[-1] = draw.choice((2, END))
    cut = draw.randrange(length)
    bounds = [(3, 0, length)] if not cut else [(3, 0, cut), (4, cut, length)]
    read = num_prompt + length - 1 + (draw.random() < 0.1)
    return rollout_pb2.Rollout(
        routed_experts=draw.randbytes(ROUTED * read) if draw.random() < 0.3 else b"",
        token_ids=ids,
        sampler_logprobs=[-draw.random()] * length,
        spans=[rollout_pb2.VersionSpan(version=version, start=start, end=end) for version, start, end in bounds],
        reward=draw.choice((0.0, 1.0)),
        reward_parts=[rollout_pb2.RewardPart(name="correct", value=1.0)] * draw.randrange(2),
        finish_reason=rollout_pb2.FINISH_REASON_EOS if is_end else rollout_pb2.FINISH_REASON_LENGTH,
    )


def _any(draw: random.Random) -> Message:
    return any_message(rollout_pb2.Group, draw)
