"""Sealed bytes are the same whichever way a group's numbers were written, and what does not agree is no group."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.process.tracing import NO_TRACE
from heterorl.common.types.rollout import (
    DropReason,
    Group,
    GroupId,
    PushOutcome,
    PushStatus,
    RewardPart,
    SealedGroup,
    Span,
)
from heterorl.common.wire.common_messages import MAX_INT64, new_message
from heterorl.common.wire.rollout_messages import outcome_from_pb, pushed_from_pb, pushes_to_pb
from heterorl.common.wire.sealed_groups import canonical, columns_of, open_group, read_sealed, seal
from heterorl.v1 import rollout_pb2
from tests.support.groups import GROUPS, group_to_bytes, group_to_pb, push_of
from tests.support.run import INCARNATION, SITE, rollout

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GROUP = Group(
    id=GroupId(site=SITE, incarnation=INCARNATION, sequence=17), assignment=5, prompt_index=7,
    prompt_token_ids=np.array([2, 300, 70_000, 2**31 - 1], np.int32), rollouts=(rollout(8), rollout(3)),
    oldest_version=3, state_root="a" * 64, generation_s=0.1, is_seeded=True, trace=TRACE,
)  # fmt: skip
_UNKNOWN = bytes([0xF2, 0x3F, 3]) + b"new"
"""Field 1022 of a newer program, three bytes of it."""


@given(GROUPS)
def test_groups_come_back_as_they_were_and_their_bytes_are_those_of_their_numbers(group):
    sealed = seal(group)

    assert sealed.data == group_to_bytes(group)
    assert seal(open_group(sealed)) == sealed == read_sealed(sealed.data)
    assert canonical(rollout_pb2.Group.FromString(sealed.data)) == sealed


@pytest.mark.parametrize(
    ("change", "opened"),
    [
        ({"traceparent": "evil"}, ("trace", NO_TRACE)),
        ({"traceparent": TRACE}, ("trace", TRACE)),
        ({"assignment": 2**64 - 1}, ("assignment", MAX_INT64)),
        ({"prompt_index": 2**63}, ("prompt_index", MAX_INT64)),
    ],
)
def test_a_peers_numbers_are_clean_in_its_bytes(change, opened):
    message = group_to_pb(GROUP)
    for name, value in change.items():
        setattr(message, name, value)

    sealed = canonical(message)

    name, value = opened
    assert getattr(sealed, name) == value
    assert seal(open_group(sealed)) == sealed


def test_token_ids_beyond_int32_stay_outside_every_vocabulary():
    message = group_to_pb(GROUP)
    message.token_ids = message.token_ids[:12] + b"\xff" * 4 + message.token_ids[16:]

    assert columns_of(message).prompt.tolist() == [2, 300, 70_000, 2**31 - 1]


def test_fields_of_a_newer_program_are_dropped():
    plain = seal(GROUP)
    message = rollout_pb2.Group.FromString(plain.data + _UNKNOWN)
    assert len(message.SerializeToString()) == len(plain.data) + len(_UNKNOWN)

    assert canonical(message) == plain


SOUND = group_to_pb(GROUP)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id_bytes": 0}, "id_bytes: 0, a token id has 1 to 4"),
        ({"id_bytes": 5}, "id_bytes: 5, a token id has 1 to 4"),
        ({"token_ids": SOUND.token_ids + b"\0"}, "token_ids: .* bytes, 4 for each id"),
        ({"token_ids": SOUND.token_ids + bytes(4)}, "token_ids: .* entries, lengths states"),
        ({"lengths": SOUND.lengths + b"\0"}, "lengths: .* bytes, 4 for each entry"),
        ({"lengths": b"\xff" * 12}, "token_ids: .* entries, lengths states 12884901885"),
        ({"logprobs": SOUND.logprobs + bytes(4)}, "logprobs: .* entries, span_lengths states"),
        ({"logprobs": SOUND.logprobs + b"\0"}, "logprobs: .* bytes, 4 for each entry"),
        ({"endings": b"\x01"}, "endings: 1 entries, lengths states 2"),
        ({"endings": b"\x01\x63"}, "endings: 99 is no FinishReason"),
        ({"endings": b"\x01\x00"}, "endings: 0 is no FinishReason"),
        ({"rewards": bytes(8)}, "rewards: 1 entries, lengths states 2"),
        ({"span_counts": bytes(4)}, "span_counts: 1 entries, lengths states 2"),
        ({"span_counts": b"\x01\0\0\0\x02\0\0\0"}, "span_lengths: 2 entries, span_counts states 3"),
        ({"span_versions": bytes(8)}, "span_versions: 1 entries, span_counts states 2"),
        ({"span_versions": bytes(7)}, "span_versions: 7 bytes, 8 for each entry"),
        ({"span_keeps": bytes(4)}, "span_keeps: 1 entries, span_counts states 2"),
        ({"span_versions": b"\xff" * 16}, "logprobs: .* entries, span_lengths states 0"),
        ({"part_counts": b"\x01\0\0\0\x02\0\0\0"}, "part_name_positions: 2 entries, part_counts states 3"),
        ({"part_counts": b"\xff" * 8}, "part_name_positions: 2 entries, part_counts states 8589934590"),
        ({"part_name_positions": b"\0\0\x01\0"}, "part_name_positions: 1, part_names has 1"),
        ({"part_values": bytes(8)}, "part_values: 1 entries, part_counts states 2"),
        ({"part_weights": bytes(8)}, "part_weights: 1 entries, part_counts states 2"),
        ({"part_signatures": bytes(64)}, "part_signatures: 64 bytes for 2 parts"),
        ({"record_lengths": bytes(4)}, "record_lengths: 1 entries, lengths states 2"),
        ({"routed_experts": b"x"}, "routed_experts: 1 entries, record_lengths states 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_columns_that_do_not_agree_are_no_group(change, problem):
    message = rollout_pb2.Group.FromString(SOUND.SerializeToString())
    for name, value in change.items():
        setattr(message, name, value)

    with pytest.raises(MalformedPayload, match=problem):
        columns_of(message)


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x7a\x05\x01"], ids=["framing", "length beyond the end"])
def test_bytes_that_are_no_message_are_said_to_be_none(data):
    with pytest.raises(MalformedPayload, match="not a group"):
        read_sealed(data)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (3, 0, 2), (0, 1, 0), (2000, 1, 0, 700)])
def test_lists_are_cut_where_they_were_joined(lengths):
    rng = np.random.default_rng(len(lengths))
    rollouts = tuple(
        rollout(
            0,
            token_ids=(2 ** rng.integers(0, 31, length) - rng.integers(0, 2, length)).astype(np.int32),
            sampler_logprobs=-rng.random(length).astype(np.float32),
            spans=(Span(version=3, start=0, end=length),),
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


@pytest.mark.parametrize(("largest", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 3), (151_935, 3), (2**24, 4)])
def test_token_ids_take_the_bytes_that_the_largest_needs(largest, width):
    group = dataclasses.replace(GROUP, prompt_token_ids=np.array([1, largest], np.int32))

    message = rollout_pb2.Group.FromString(seal(group).data)

    assert message.id_bytes == width
    assert open_group(seal(group)).prompt_token_ids.tolist() == [1, largest]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (RewardPart(name="a\nb", value=1.0), "line feed"),
        (RewardPart(name="a", value=1.0, signature=b"short"), "64 bytes"),
    ],
)
def test_parts_that_columns_cannot_hold_are_a_defect_of_this_program(part, problem):
    first, *others = GROUP.rollouts

    with pytest.raises(ValueError, match=problem):
        seal(dataclasses.replace(GROUP, rollouts=(dataclasses.replace(first, reward_parts=(part,)), *others)))


def test_negative_id_is_a_defect_of_this_program_and_never_leaves_it():
    with pytest.raises(ValueError, match="-1 is negative"):
        seal(dataclasses.replace(GROUP, prompt_token_ids=np.array([3, -1], np.int32)))


def test_what_routing_needs_is_read_without_the_tokens():
    sealed = seal(GROUP)

    assert sealed == SealedGroup(
        id=GROUP.id, data=group_to_bytes(GROUP), assignment=5, prompt_index=7, oldest_version=3, state_root="a" * 64,
        versions=(3, 8), trace=TRACE,
    )  # fmt: skip


def test_shell_of_a_group_that_is_too_large_is_the_group_without_its_numbers():
    sealed = seal(GROUP)
    (shell,) = pushed_from_pb(pushes_to_pb([sealed], limit_bytes=10)[0], limit_groups=1)

    columns = columns_of(shell)
    assert (canonical(shell).id, columns.lengths.size, columns.prompt.size) == (GROUP.id, 0, 0)
    assert shell.assignment == GROUP.assignment


@pytest.mark.parametrize(
    ("limit_groups", "groups_of_limit", "expected"),
    [(1, 99, [1] * 5), (2, 99, [2, 2, 1]), (256, 99, [5]), (256, 2, [2, 2, 1])],
)
def test_small_groups_travel_together_in_order(limit_groups, groups_of_limit, expected):
    groups = [seal(dataclasses.replace(GROUP, id=dataclasses.replace(GROUP.id, sequence=n))) for n in range(1, 6)]
    limit_bytes = groups_of_limit * (len(groups[0].data) + 4) + 16

    pushed = pushes_to_pb(groups, limit_bytes=limit_bytes, limit_groups=limit_groups)

    assert [len(message.sizes) // 4 for message in pushed] == expected
    assert all(message.ByteSize() <= limit_bytes for message in pushed)
    sent = [group for message in pushed for group in pushed_from_pb(message, limit_groups=limit_groups)]
    assert [group.SerializeToString(deterministic=True) for group in sent] == [group.data for group in groups]


def test_shell_of_a_group_that_is_too_large_travels_with_its_neighbours():
    small = seal(GROUP)
    rollout = dataclasses.replace(
        GROUP.rollouts[0], token_ids=np.full(2000, 7, np.int32), sampler_logprobs=np.zeros(2000, np.float32)
    )
    large = seal(dataclasses.replace(GROUP, rollouts=(rollout,)))

    (message,) = pushes_to_pb([small, large, small], limit_bytes=4000, limit_groups=9)

    assert [len(group.endings) for group in pushed_from_pb(message, limit_groups=9)] == [2, 0, 2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sizes": b""}, "sizes: 0 groups, a message carries 1 to 2"),
        ({"sizes": b"\x01\0\0"}, "sizes: 3 bytes, 4 for each group"),
        ({"sizes": bytes(12)}, "sizes: 3 groups, a message carries 1 to 2"),
        ({"sizes": b"\xff\xff\xff\xff"}, "groups: .* bytes, sizes states 4294967295"),
        ({"groups": b"\xff\xff", "sizes": b"\x02\0\0\0"}, "groups: not a group"),
    ],
    ids=["none", "left over", "too many", "too long", "no group"],
)
def test_pushes_that_are_no_groups_are_refused(change, problem):
    message = push_of(SOUND)
    for name, value in change.items():
        setattr(message, name, value)

    with pytest.raises(InvalidRequest, match=problem):
        pushed_from_pb(message, limit_groups=2)


def test_outcomes_of_a_message_are_those_of_its_groups_in_order():
    outcomes = [
        PushOutcome(id=dataclasses.replace(GROUP.id, sequence=1), status=PushStatus.ACCEPTED),
        PushOutcome(id=dataclasses.replace(GROUP.id, sequence=2), status=PushStatus.DROPPED,
                    reason=DropReason.INVALID, message="why"),
        PushOutcome(id=dataclasses.replace(GROUP.id, sequence=3), status=PushStatus.RETRY, retry_after_s=2.0),
    ]  # fmt: skip

    message = new_message(rollout_pb2.PushGroupsResponse, outcomes=outcomes)
    assert list(map(outcome_from_pb, message.outcomes)) == outcomes


def test_parts_travel_with_weights_and_signatures():
    (first, *others), part = GROUP.rollouts, RewardPart(name="judge", value=0.5, weight=0.0, signature=b"s" * 64)
    parts = (RewardPart(name="correct", value=1.0), part)
    group = dataclasses.replace(GROUP, rollouts=(dataclasses.replace(first, reward_parts=parts), *others))

    assert open_group(seal(group)).rollouts[0].reward_parts == parts
    assert not rollout_pb2.Group.FromString(seal(GROUP).data).part_weights
