"""Sealed bytes are those that programs wrote field by field, whoever packed the group and however."""

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.process.tracing import NO_TRACE
from heterorl.common.types.rollout import DropReason, Group, GroupId, PushOutcome, PushStatus, RewardPart, SealedGroup
from heterorl.common.wire.common import MAX_INT64, bytes_digest
from heterorl.common.wire.rollout import outcomes_from_pb, outcomes_to_pb, pushes_to_pb
from heterorl.common.wire.seal import open_group, read_sealed, receive, seal
from heterorl.v1 import common_pb2, rollout_pb2
from tests.support.groups import cleaned, group_to_bytes
from tests.support.run import INCARNATION, SITE, rollout

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GROUP = Group(
    id=GroupId(site=SITE, incarnation=INCARNATION, sequence=17), assignment=5, prompt_index=7,
    prompt_token_ids=np.array([2, 300, 70_000, 2**31 - 1], np.int32), rollouts=(rollout(8), rollout(3)),
    oldest_version=3, state_root="a" * 64, generation_s=0.1, is_seeded=True, trace=TRACE,
)  # fmt: skip
_UNKNOWN = bytes([0xF2, 0x3F, 3]) + b"new"
"""Field 1022 of a newer program, three bytes of it."""

uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
texts = st.text(max_size=6)
part_messages = st.builds(
    rollout_pb2.RewardPart,
    name=texts,
    value=st.floats(),
    weight=st.none() | st.sampled_from([0.0, 0.5, 1.0, -2.0]),
    signature=st.binary(max_size=4),
)
rollout_messages = st.builds(
    rollout_pb2.Rollout,
    token_ids=st.lists(uint32, max_size=40),
    sampler_logprobs=st.lists(st.floats(width=32), max_size=40),
    spans=st.lists(
        st.builds(rollout_pb2.VersionSpan, version=st.integers(-1, 2**40), start=uint32, end=uint32), max_size=3
    ),
    reward=st.floats(),
    reward_parts=st.lists(part_messages, max_size=2),
    finish_reason=st.sampled_from([rollout_pb2.FINISH_REASON_EOS, rollout_pb2.FINISH_REASON_LENGTH]),
)
messages = st.builds(
    rollout_pb2.Group,
    id=st.builds(common_pb2.GroupId, site=texts, incarnation=texts, sequence=uint64),
    assignment=uint64,
    prompt_index=uint64,
    prompt_token_ids=st.lists(uint32, max_size=40),
    rollouts=st.lists(rollout_messages, max_size=3),
    oldest_version=st.integers(-1, 2**40),
    state_root=texts,
    generation_s=st.floats(),
    is_seeded=st.booleans(),
    traceparent=st.sampled_from(["", TRACE, "evil", TRACE.upper()]),
)


@given(messages)
def test_bytes_of_a_peers_message_are_those_that_stores_remember(message):
    expected = cleaned(message)

    sealed, group = receive(rollout_pb2.Group.FromString(message.SerializeToString()))

    # A push again from an outbox of before has the digest of its row, and the other way round.
    assert sealed.data == seal(group).data == group_to_bytes(group) == expected
    assert sealed == read_sealed(sealed.data) == seal(open_group(sealed))


@pytest.mark.parametrize(
    ("change", "opened"),
    [
        ({"traceparent": "evil"}, ("trace", NO_TRACE)),
        ({"traceparent": TRACE}, ("trace", TRACE)),
        ({"assignment": 2**64 - 1}, ("assignment", MAX_INT64)),
        ({"prompt_index": 2**63}, ("prompt_index", MAX_INT64)),
        ({"prompt_token_ids": [2**31]}, ("prompt_token_ids", [2**31 - 1])),
        ({"prompt_token_ids": [2**32 - 1]}, ("prompt_token_ids", [2**31 - 1])),
    ],
)
def test_what_is_cleaned_when_a_group_is_opened_is_clean_in_its_bytes(change, opened):
    message = rollout_pb2.Group.FromString(seal(GROUP).data)
    for name, value in change.items():
        message.ClearField(name)
        message.MergeFrom(rollout_pb2.Group(**{name: value}))

    sealed, group = receive(message)

    name, value = opened
    found = getattr(group, name)
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
    assert sealed.data == group_to_bytes(group)
    assert [r.token_ids.tolist() for r in open_group(sealed).rollouts] == [r.token_ids.tolist() for r in group.rollouts]


def test_fields_of_a_newer_program_are_dropped():
    plain = seal(GROUP)
    message = rollout_pb2.Group.FromString(plain.data + _UNKNOWN)
    message.rollouts[0].MergeFromString(_UNKNOWN)
    message.rollouts[1].spans[0].MergeFromString(_UNKNOWN)
    assert len(message.SerializeToString()) > len(plain.data) + len(_UNKNOWN)

    assert receive(message)[0] == plain


def test_message_that_is_refused_keeps_its_bytes_so_that_it_has_the_same_digest_again():
    message = rollout_pb2.Group.FromString(seal(GROUP).data + _UNKNOWN)
    message.rollouts[1].finish_reason = 99
    before = message.SerializeToString(deterministic=True)

    with pytest.raises(InvalidRequest, match=r"finish_reason: 99"):
        receive(message)
    assert message.SerializeToString(deterministic=True) == before


def _varint(number):
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def _field(number, data):
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def test_another_packing_of_the_same_group_gives_the_same_bytes():
    """A list unpacked or in pieces, a message in two parts, a number longer than it need be: protobuf takes them all."""
    plain = seal(GROUP)
    ids = GROUP.prompt_token_ids.tolist()
    pieces = b"".join(_varint(4 << 3) + _varint(number) for number in ids[:1])
    pieces += _field(4, _varint(ids[1])) + _field(4, bytes([ids[2] & 127 | 128, ids[2] >> 7 & 127 | 128, 0x84, 0x00]))
    pieces += _field(4, _varint(ids[3]))
    message = rollout_pb2.Group.FromString(plain.data)
    message.ClearField("prompt_token_ids")
    name = message.id.site
    message.id.site = "another"
    data = pieces + message.SerializeToString() + _field(1, _field(1, name.encode()))

    other = rollout_pb2.Group.FromString(data)

    assert other.prompt_token_ids == ids
    assert receive(other)[0] == plain


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff",
        _field(4, b"\x80"),
        _field(4, b"\x81\x80\x80\x80\x80\x01"),
        _field(5, _field(1, b"\x05\x80") + b"\x30\x01"),
        _field(5, _field(2, b"\x00\x00\x00") + b"\x30\x01"),
    ],
    ids=["framing", "open number", "long number", "open number in a rollout", "three bytes of a float"],
)
def test_bytes_that_are_no_group_are_said_to_be_none(data):
    with pytest.raises(MalformedPayload):
        open_group(read_sealed(data))


def test_list_that_does_not_end_takes_nothing_from_the_next():
    data = _field(5, _field(1, b"\x05\x80") + b"\x30\x01") + _field(5, _field(1, b"\x01") + b"\x30\x01")

    with pytest.raises(MalformedPayload, match="does not end"):
        open_group(read_sealed(data))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (3, 0, 2), (0, 1, 0), (2000, 1, 0, 700)])
def test_lists_are_cut_where_they_were_joined(lengths):
    rng = np.random.default_rng(len(lengths))
    rollouts = tuple(
        rollout(
            0,
            token_ids=(2 ** rng.integers(0, 31, length) - rng.integers(0, 2, length)).astype(np.int32),
            sampler_logprobs=-rng.random(length).astype(np.float32),
        )
        for length in lengths
    )
    group = dataclasses.replace(GROUP, rollouts=rollouts)

    back = open_group(seal(group))

    assert [r.token_ids.tolist() for r in back.rollouts] == [r.token_ids.tolist() for r in rollouts]
    assert [r.sampler_logprobs.tolist() for r in back.rollouts] == [r.sampler_logprobs.tolist() for r in rollouts]
    assert all(r.token_ids.dtype == np.int32 and r.token_ids.flags.writeable for r in back.rollouts)
    assert all(r.sampler_logprobs.dtype == np.float32 and r.sampler_logprobs.flags.writeable for r in back.rollouts)
    assert seal(group).data == group_to_bytes(group)


def test_negative_id_is_a_defect_of_this_program_and_never_leaves_it():
    with pytest.raises(ValueError, match="-1 is negative"):
        seal(dataclasses.replace(GROUP, prompt_token_ids=np.array([3, -1], np.int32)))


def test_what_routing_needs_is_read_without_the_tokens():
    sealed = seal(GROUP)

    assert sealed == SealedGroup(
        id=GROUP.id, data=group_to_bytes(GROUP), assignment=5, prompt_index=7, oldest_version=3, state_root="a" * 64,
        versions=(3, 8), trace=TRACE,
    )  # fmt: skip


def test_shell_of_a_group_that_is_too_large_is_the_group_without_its_tokens():
    sealed = seal(GROUP)
    ((whole, _),) = pushes_to_pb([sealed], limit_bytes=1 << 20)
    whole = whole.SerializeToString()
    shell = rollout_pb2.PushGroupsRequest.FromString(
        pushes_to_pb([sealed], limit_bytes=10)[0][0].SerializeToString()
    ).group
    empty = dataclasses.replace(GROUP, rollouts=(), prompt_token_ids=np.zeros(0, np.int32))

    assert whole == rollout_pb2.PushGroupsRequest(group=rollout_pb2.Group.FromString(sealed.data)).SerializeToString()
    assert shell.SerializeToString(deterministic=True) == group_to_bytes(empty)
    assert bytes_digest(seal(empty).data) == bytes_digest(receive(shell)[0].data)


@pytest.mark.parametrize(
    ("limit_groups", "limit_bytes", "expected"),
    [(1, 1 << 20, [1] * 5), (2, 1 << 20, [2, 2, 1]), (256, 1 << 20, [5]), (256, 700, [2, 2, 1])],
)
def test_small_groups_travel_together_in_order(limit_groups, limit_bytes, expected):
    groups = [seal(dataclasses.replace(GROUP, id=dataclasses.replace(GROUP.id, sequence=n))) for n in range(1, 6)]
    assert 2 * len(groups[0].data) < 690 < 3 * len(groups[0].data)

    pushed = pushes_to_pb(groups, limit_bytes=limit_bytes, limit_groups=limit_groups)

    assert [count for _, count in pushed] == expected
    assert all(message.ByteSize() <= limit_bytes for message, _ in pushed)
    read = [rollout_pb2.PushGroupsRequest.FromString(message.SerializeToString()) for message, _ in pushed]
    sent = [group.SerializeToString(deterministic=True) for one in read for group in (one.group, *one.more)]
    assert sent == [group.data for group in groups]


def test_shell_of_a_group_that_is_too_large_travels_with_its_neighbours():
    small = seal(GROUP)
    rollout = dataclasses.replace(
        GROUP.rollouts[0], token_ids=np.full(2000, 7, np.int32), sampler_logprobs=np.zeros(2000, np.float32)
    )
    large = seal(dataclasses.replace(GROUP, rollouts=(rollout,)))

    ((message, count),) = pushes_to_pb([small, large, small], limit_bytes=4000, limit_groups=9)

    read = rollout_pb2.PushGroupsRequest.FromString(message.SerializeToString())
    assert count == 3
    assert [len(group.rollouts) for group in (read.group, *read.more)] == [len(GROUP.rollouts), 0, len(GROUP.rollouts)]


def test_outcomes_of_a_message_are_those_of_its_groups_in_order():
    outcomes = [
        PushOutcome(id=dataclasses.replace(GROUP.id, sequence=1), status=PushStatus.ACCEPTED),
        PushOutcome(id=dataclasses.replace(GROUP.id, sequence=2), status=PushStatus.DROPPED,
                    reason=DropReason.INVALID, message="why"),
        PushOutcome(id=dataclasses.replace(GROUP.id, sequence=3), status=PushStatus.RETRY, retry_after_s=2.0),
    ]  # fmt: skip

    assert outcomes_from_pb(outcomes_to_pb(outcomes)) == outcomes
    assert outcomes_from_pb(outcomes_to_pb(outcomes[:1])) == outcomes[:1]


def test_parts_travel_with_weights_and_signatures_and_old_ones_keep_their_bytes():
    old = seal(GROUP)
    (first, *others), part = GROUP.rollouts, RewardPart(name="judge", value=0.5, weight=0.0, signature=b"s" * 64)
    parts = (RewardPart(name="correct", value=1.0), part)
    group = dataclasses.replace(GROUP, rollouts=(dataclasses.replace(first, reward_parts=parts), *others))

    assert open_group(seal(group)).rollouts[0].reward_parts == parts
    # Written before there were weights: the bytes of a part are its name and its value.
    assert b"\x0a\x07correct\x11" + struct.pack("<d", 1.0) in old.data
    assert open_group(old).rollouts[0].reward_parts == (RewardPart(name="correct", value=1.0),)
    message = rollout_pb2.Group.FromString(old.data)
    message.rollouts[0].reward_parts[0].weight = 1.0
    assert receive(message)[0] == old
