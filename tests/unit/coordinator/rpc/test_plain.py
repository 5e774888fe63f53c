"""Pushes that are read without the scan: canonical ones alone, and nothing that the scan would refuse."""

import random
import tracemalloc

import numpy as np
import pytest

from campaigns.fuzz.mutate import mutated
from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.rpc.plain import SMALL_BYTES, read_push
from heterorl.coordinator.rpc.scan import parse
from heterorl.v1 import rollout_pb2


def _group(sequence=1, *, num_tokens=4, **changes):
    rollout = rollout_pb2.Rollout(
        token_ids=np.arange(num_tokens).tolist(), sampler_logprobs=[-1.0] * num_tokens, reward=1.0, finish_reason=1,
        spans=[rollout_pb2.VersionSpan(version=3, start=0, end=num_tokens)],
        reward_parts=[rollout_pb2.RewardPart(name="correct", value=1.0)],
    )  # fmt: skip
    fields = {
        "assignment": 3, "prompt_index": 4, "prompt_token_ids": [1, 2], "rollouts": [rollout] * 2, "oldest_version": 3,
        "state_root": "a" * 64, "generation_s": 1.5,
    }  # fmt: skip
    group = rollout_pb2.Group(**fields | changes)
    group.id.site, group.id.incarnation, group.id.sequence = "eu-1", "b1946ac9", sequence
    return group


def _push(*groups):
    return rollout_pb2.PushGroupsRequest(group=groups[0], more=groups[1:]).SerializeToString(deterministic=True)


@pytest.mark.parametrize("num_tokens", [4, 5000], ids=["small", "long"])
@pytest.mark.parametrize("count", [1, 3, 256])
def test_canonical_groups_are_plain(num_tokens, count):
    groups = [_group(number, num_tokens=num_tokens if number < 4 else 4) for number in range(1, count + 1)]
    push = read_push(_push(*groups))

    assert push is not None
    assert list(push.data) == [group.SerializeToString(deterministic=True) for group in groups]
    assert push.group.id.site == "eu-1"
    assert [group.id.sequence for group in push.groups] == list(range(1, count + 1))
    assert (num_tokens > 4) == (len(push.data[0]) > SMALL_BYTES // 2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x0a",
        b"\x0a\x05abc",
        _push(_group()) + b"\x01",
        _push(_group()) * 2,
        _push(_group(), *[_group()] * 256),
        _push(_group(state_root="a" * 257)),
        _push(_group(state_root="line\nline")),
        _push(_group(traceparent="x" * 257)),
        _push(_group(rollouts=[rollout_pb2.Rollout()] * 4097)),
        _push(_group(rollouts=[rollout_pb2.Rollout()] * 100)),
        _push(_group(rollouts=[rollout_pb2.Rollout(spans=[rollout_pb2.VersionSpan()] * 4097)])),
        _push(_group(rollouts=[rollout_pb2.Rollout(reward_parts=[rollout_pb2.RewardPart()] * 257)])),
        _push(
            _group(rollouts=[rollout_pb2.Rollout(reward_parts=[rollout_pb2.RewardPart(name="x", signature=b"s" * 65)])])
        ),
        # More groups in front of the first one; a field that nobody knows; the same field twice.
        _push(_group(), _group())[len(_push(_group())) :] + _push(_group()),
        rollout_pb2.PushGroupsRequest(
            group=rollout_pb2.Group.FromString(_group().SerializeToString() + bytes([0xF2, 0x3F, 3]) + b"new")
        ).SerializeToString(),
        rollout_pb2.PushGroupsRequest().SerializeToString() + b"\x0a\x04\x10\x05\x10\x06",
    ],
)
def test_what_is_not_is_left_to_the_scan(data):
    assert read_push(data) is None


@pytest.mark.parametrize("rest", [b"\x10\x00", b"\x22\x00", b"\x78\x00"], ids=["number", "list", "unknown"])
def test_a_long_group_that_says_a_field_again_is_left_at_once(rest, monkeypatch):
    skipped = []
    monkeypatch.setattr("heterorl.coordinator.rpc.plain._skip", lambda data, at, end: skipped.append(at) or at + 2)
    data = rest * SMALL_BYTES
    length = len(data)
    prefix = bytes([0x0A, length & 127 | 128, length >> 7 & 127 | 128, length >> 14])

    assert read_push(prefix + data) is None
    assert len(skipped) <= 1


def test_the_first_group_that_is_not_plain_ends_the_reading(monkeypatch):
    made = []
    monkeypatch.setattr("heterorl.coordinator.rpc.plain._group_of", lambda data: made.append(data))

    assert read_push(_push(*[_group(number) for number in range(1, 60)])) is None
    assert len(made) == 1


def test_a_push_of_too_many_messages_is_left_to_the_scan():
    rollout = rollout_pb2.Rollout(token_ids=[1] * 64, sampler_logprobs=[-1.0] * 64)
    groups = [_group(number, rollouts=[rollout] * 1000) for number in range(1, 18)]

    assert read_push(_push(*groups[:16])) is not None
    assert read_push(_push(*groups)) is None


def _refusal(data):
    try:
        parse(data, rollout_pb2.PushGroupsRequest.DESCRIPTOR)
    except InvalidRequest as error:
        return str(error)
    return ""


def test_nothing_that_the_scan_refuses_is_plain():
    draw = random.Random(5)
    whole = [_push(_group()), _push(_group(), _group(2)), _push(_group(num_tokens=9000))]
    plain = refused = 0
    for _ in range(3000):
        data = mutated(draw.choice(whole), draw, other=draw.choice(whole))
        push = read_push(data)
        problem = _refusal(data)
        refused += bool(problem)
        # Inside its lists alone a plain push may be none: whoever looks at them finds that.
        assert not problem or push is None or "not a PushGroupsRequest" in problem, data
        plain += push is not None
    assert plain > 50
    assert refused > 50


def test_long_push_of_many_small_messages_takes_no_memory():
    group = _group(rollouts=[rollout_pb2.Rollout(spans=[rollout_pb2.VersionSpan()] * 4000)] * 400)
    data = _push(group)
    assert len(data) > 3_000_000
    tracemalloc.start()
    try:
        assert read_push(data) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
