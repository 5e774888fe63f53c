"""Every repeated field, text and bytes field of every request is bounded before anything is made of its bytes."""

import threading
from types import SimpleNamespace

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal import encoder, wire_format

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.rollout import MAX_REWARD_PARTS
from heterorl.coordinator.rpc import door, scan
from heterorl.coordinator.rpc.bounds import BOUNDS, MAX_TAGS, TAGS, Text, bound_of, tags_of
from heterorl.coordinator.rpc.scan import MAX_SAME, MAX_UNKNOWN_BYTES, SOON_TAGS, parse, parse_soon
from heterorl.v1 import common_pb2, policy_pb2, rollout_pb2, run_pb2
from tests.support.protos import REQUESTS, bytes_field, entries, fields, is_repeated, wrapped

WAYS = [(request, way) for request in REQUESTS for way in fields(request)]
_WIRES = {
    FieldDescriptor.TYPE_DOUBLE: wire_format.WIRETYPE_FIXED64,
    FieldDescriptor.TYPE_FIXED64: wire_format.WIRETYPE_FIXED64,
    FieldDescriptor.TYPE_FLOAT: wire_format.WIRETYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED32: wire_format.WIRETYPE_FIXED32,
    FieldDescriptor.TYPE_STRING: wire_format.WIRETYPE_LENGTH_DELIMITED,
    FieldDescriptor.TYPE_BYTES: wire_format.WIRETYPE_LENGTH_DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: wire_format.WIRETYPE_LENGTH_DELIMITED,
}
_WIDTHS = {wire_format.WIRETYPE_FIXED64: 8, wire_format.WIRETYPE_FIXED32: 4}
NAMES = [f"{request.name}.{'.'.join(field.name for field in way)}" for request, way in WAYS]


def test_the_walk_finds_fields():
    assert len(WAYS) > 70
    assert "PushGroupsRequest.group.rollouts.reward_parts.name" in NAMES


def test_every_row_names_a_field_of_a_request():
    known = {f"{(way[-2].message_type if len(way) > 1 else request).name}.{way[-1].name}" for request, way in WAYS}

    assert set(BOUNDS) <= known


@pytest.mark.parametrize(("request_type", "way"), WAYS, ids=NAMES)
def test_field_over_its_bound_is_refused_by_name_and_at_its_bound_it_is_not(request_type, way):
    field = way[-1]
    bound = bound_of(field.containing_type.name, field.name)
    path = ".".join(each.name for each in way)
    if is_repeated(field):
        with pytest.raises(InvalidRequest, match=rf"^{path}: more than {bound.count} entries"):
            parse(wrapped(way, entries(field, bound.count + 1)), request_type)
        if bound.count <= 1 << 15:
            parse(wrapped(way, entries(field, bound.count)), request_type)
    if field.type == FieldDescriptor.TYPE_STRING:
        with pytest.raises(InvalidRequest, match=rf"^{path}: more than {bound.length} characters"):
            parse(wrapped(way, bytes_field(field, b"a" * (bound.length + 1))), request_type)
        parse(wrapped(way, bytes_field(field, b"a" * bound.length)), request_type)
        with pytest.raises(InvalidRequest, match=rf"^{path}: not UTF-8"):
            parse(wrapped(way, bytes_field(field, b"\xff\xff")), request_type)
        if bound.text is not Text.PROSE:
            with pytest.raises(InvalidRequest, match=rf"^{path}: not "):
                parse(wrapped(way, bytes_field(field, b"plain\n2026 CRITICAL forged")), request_type)
    if field.type == FieldDescriptor.TYPE_BYTES and bound.length <= 1 << 20:
        with pytest.raises(InvalidRequest, match=rf"^{path}: {bound.length + 1} bytes"):
            parse(wrapped(way, bytes_field(field, bytes(bound.length + 1))), request_type)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "eu 1", "\N{GREEK SMALL LETTER ALPHA}", "a" * 65])
def test_names_of_peers_are_names(name):
    data = run_pb2.RegisterRequest(site="eu-1", incarnation=name).SerializeToString()

    with pytest.raises(InvalidRequest, match=r"^incarnation: "):
        parse(data, run_pb2.RegisterRequest.DESCRIPTOR)


def test_numbers_that_are_not_packed_are_counted_too():
    field = rollout_pb2.AbandonWorkRequest.DESCRIPTOR.fields_by_name["assignments"]
    one = encoder.TagBytes(field.number, wire_format.WIRETYPE_VARINT) + b"\x01"
    assert list(parse(one * 3, rollout_pb2.AbandonWorkRequest.DESCRIPTOR).assignments) == [1, 1, 1]

    with pytest.raises(InvalidRequest, match=r"^assignments: more than 4096"):
        parse(one * 4097, rollout_pb2.AbandonWorkRequest.DESCRIPTOR)


def test_messages_that_the_parser_merges_are_counted_as_one():
    group = rollout_pb2.Group(rollouts=[rollout_pb2.Rollout()] * 3000)
    twice = rollout_pb2.PushGroupsRequest(group=group).SerializeToString() * 2
    assert len(rollout_pb2.PushGroupsRequest.FromString(twice).group.rollouts) == 6000

    with pytest.raises(InvalidRequest, match=r"^group.rollouts: more than 4096"):
        parse(twice, rollout_pb2.PushGroupsRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x0a",
        b"\x0a\x05a",
        b"\x0b",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x00\x00",
    ],
)
def test_bytes_that_are_no_message_are_an_invalid_request(data):
    with pytest.raises(InvalidRequest):
        parse(data, run_pb2.HeartbeatRequest.DESCRIPTOR)


def test_unknown_fields_of_a_newer_program_pass_and_a_flood_of_them_does_not():
    newer = encoder.TagBytes(900, wire_format.WIRETYPE_VARINT) + b"\x01"
    assert parse(b"\x0a\x02eu" + newer * 10, run_pb2.HeartbeatRequest.DESCRIPTOR).site == "eu"

    with pytest.raises(InvalidRequest, match="unknown fields"):
        parse(newer * MAX_UNKNOWN_BYTES, run_pb2.HeartbeatRequest.DESCRIPTOR)


def test_of_millions_of_empty_entries_no_more_are_read_than_the_bound(monkeypatch):
    scans = []

    class Recorded(scan._Scan):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            scans.append(self)

    monkeypatch.setattr(scan, "_Scan", Recorded)
    rollouts = b"\x1a\x00" * 8_000_000
    group = rollout_pb2.PushGroupsRequest.DESCRIPTOR.fields_by_name["group"]
    spans = rollout_pb2.Group.DESCRIPTOR.fields_by_name["rollouts"]
    data = bytes_field(group, bytes_field(spans, rollouts))

    with pytest.raises(InvalidRequest, match=r"^group.rollouts.spans: more than 4096"):
        parse(data, rollout_pb2.PushGroupsRequest.DESCRIPTOR)
    # The group, its rollout, and one entry more than pass.
    assert [each._num_tags for each in scans] == [2 + 4097]


def test_fields_of_all_kinds_together_are_bounded():
    ids = rollout_pb2.Rollout(spans=[rollout_pb2.VersionSpan()] * 4096)
    data = rollout_pb2.PushGroupsRequest(group=rollout_pb2.Group(rollouts=[ids] * 80)).SerializeToString()

    with pytest.raises(InvalidRequest, match=f"more than {MAX_TAGS} fields"):
        parse(data, rollout_pb2.PushGroupsRequest.DESCRIPTOR)


@pytest.mark.parametrize("request_type", REQUESTS, ids=[request.name for request in REQUESTS])
def test_field_that_is_said_again_and_again_is_refused_before_the_next(request_type):
    """The parser takes the last one, so that a small message could be scanned for seconds."""
    for field in request_type.fields:
        if is_repeated(field):
            continue
        wire = _WIRES.get(field.type, wire_format.WIRETYPE_VARINT)
        one = encoder.TagBytes(field.number, wire) + b"\x00" * _WIDTHS.get(wire, 1)
        parse(one * MAX_SAME, request_type)
        with pytest.raises(InvalidRequest, match=rf"^{field.name}: more than {MAX_SAME} times"):
            parse(one * (MAX_SAME + 1), request_type)


def test_field_said_again_in_messages_that_the_parser_merges_is_counted_as_one():
    group = rollout_pb2.PushGroupsRequest(group=rollout_pb2.Group(prompt_index=1)).SerializeToString()

    parse(group * MAX_SAME, rollout_pb2.PushGroupsRequest.DESCRIPTOR)
    with pytest.raises(InvalidRequest, match=rf"^group: more than {MAX_SAME} times"):
        parse(group * (MAX_SAME + 1), rollout_pb2.PushGroupsRequest.DESCRIPTOR)


def test_message_of_many_fields_is_not_parsed_soon():
    request = rollout_pb2.LeaseWorkRequest.DESCRIPTOR
    newer = encoder.TagBytes(900, wire_format.WIRETYPE_VARINT) + b"\x01"

    assert parse_soon(newer * SOON_TAGS, request) == parse(newer * SOON_TAGS, request)
    assert parse_soon(newer * (SOON_TAGS + 1), request) is None
    with pytest.raises(InvalidRequest, match="malformed"):
        parse_soon(newer * SOON_TAGS + b"\x0a\x05a", request) or parse_soon(b"\x0a\x05a", request)


async def test_event_loop_never_reads_a_message_of_many_fields(monkeypatch):
    """Whatever its kind: with a few such calls at a time one caller stopped the lease's renewals and the watchdog."""
    gate = SimpleNamespace(recheck=lambda peer: None, check_request=lambda *asked: None)
    threads = []
    real = door.parse
    monkeypatch.setattr(door, "parse", lambda *args: threads.append(threading.get_ident()) or real(*args))
    newer = encoder.TagBytes(900, wire_format.WIRETYPE_VARINT) + b"\x01"
    guard = door.Door(gate, shares=None, budget=None)

    for count in (1, SOON_TAGS + 1):
        await guard.message("/heterorl.v1.RolloutService/LeaseWork", None, newer * count)

    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_only_a_learner_needs_many_fields():
    for request in REQUESTS:
        has_more = tags_of(request.name) > MAX_TAGS
        assert has_more == (request.name in TAGS)
    largest = rollout_pb2.Rollout(
        spans=[rollout_pb2.VersionSpan(version=1, start=1, end=2)] * 8,
        reward_parts=[rollout_pb2.RewardPart(name="part", value=1.0)] * MAX_REWARD_PARTS,
    )
    group = rollout_pb2.Group(rollouts=[largest] * 256)
    parse(rollout_pb2.PushGroupsRequest(group=group).SerializeToString(), rollout_pb2.PushGroupsRequest.DESCRIPTOR)


def test_what_passes_is_what_was_sent():
    message = policy_pb2.PublishVersionRequest(
        epoch=3, request_id="step-1", manifest=b"\x00\xff" * 500, canary_logprobs=[-0.5, -1.0],
        consumed=[common_pb2.GroupId(site="eu-1", incarnation="i", sequence=2**63)],
        reports=[common_pb2.StepReport(step=1, loss=-1.5, evaluation_accuracy=0.5)],
    )  # fmt: skip

    assert parse(message.SerializeToString(), type(message).DESCRIPTOR) == message
    for request in REQUESTS:
        empty = message_factory.GetMessageClass(request)()
        assert parse(b"", request) == empty
