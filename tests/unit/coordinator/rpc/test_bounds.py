"""Every repeated field, text and bytes field of every request is bounded before a handler sees it."""

import contextlib
import threading
import tracemalloc
from types import SimpleNamespace

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal import encoder, wire_format

from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.rpc import call_admission
from heterorl.coordinator.rpc.bounds import (
    BOUNDS,
    FIELDS,
    LONG,
    MAX_FIELDS,
    PUSH_GROUPS,
    SMALL_BYTES,
    Text,
    bound_of,
    parse,
)
from heterorl.v1 import common_pb2, evaluation_pb2, policy_pb2, rollout_pb2, run_pb2
from tests.support.groups import push_of
from tests.support.protos import REQUESTS, bytes_field, entries, fields, is_repeated, wrapped

WAYS = [
    (request, way)
    for request in REQUESTS
    for way in fields(request)
    # Maps have a test of their own.
    if not any(field.message_type and field.message_type.GetOptions().map_entry for field in way)
]
NAMES = [f"{request.name}.{'.'.join(field.name for field in way)}" for request, way in WAYS]
PUSH = "/heterorl.v1.RolloutService/PushGroups"


@pytest.fixture
def guard():
    gate = SimpleNamespace(recheck=lambda peer: None, check_request=lambda *asked: None)
    return call_admission.CallAdmission(gate, shares=None, budget=None)


def test_the_walk_finds_fields():
    assert len(WAYS) > 70
    assert "PushEvaluationRequest.results.samples.text" in NAMES


def test_every_row_names_a_field_of_a_request():
    known = {f"{(way[-2].message_type if len(way) > 1 else request).name}.{way[-1].name}" for request, way in WAYS}
    known |= {"FactsEntry.key", "FactsEntry.value", "DescribeRunRequest.facts"}
    known |= {f"Group.{field.name}" for field in rollout_pb2.Group.DESCRIPTOR.fields}

    known |= {way[-1].name for _, way in WAYS}
    assert set(BOUNDS) <= known
    assert {request.name for request in REQUESTS} >= LONG | set(FIELDS)


@pytest.mark.parametrize(("request_type", "way"), WAYS, ids=NAMES)
def test_field_over_its_bound_is_refused_by_name_and_at_its_bound_it_is_not(request_type, way):
    field = way[-1]
    bound = bound_of(field.containing_type.name, field.name)
    path = ".".join(each.name for each in way)
    if is_repeated(field):
        too_many = wrapped(way, entries(field, bound.count + 1))
        is_short = len(too_many) <= SMALL_BYTES or request_type.name in LONG
        with pytest.raises(InvalidRequest, match=rf"^{path}: more than {bound.count} entries" if is_short else "bytes"):
            parse(too_many, request_type)
        if bound.count <= 1 << 15:
            parse(wrapped(way, entries(field, bound.count)), request_type)
    if field.type == FieldDescriptor.TYPE_STRING and bound.length < SMALL_BYTES:
        with pytest.raises(InvalidRequest, match=rf"^{path}: more than {bound.length} characters"):
            parse(wrapped(way, bytes_field(field, b"a" * (bound.length + 1))), request_type)
        parse(wrapped(way, bytes_field(field, b"a" * bound.length)), request_type)
        with pytest.raises(InvalidRequest, match=rf"^not a {request_type.name}: "):
            parse(wrapped(way, bytes_field(field, b"\xff\xff")), request_type)
        if bound.text is not Text.PROSE:
            with pytest.raises(InvalidRequest, match=rf"^{path}: not "):
                parse(wrapped(way, bytes_field(field, b"plain\n2026 CRITICAL forged")), request_type)
    if field.type == FieldDescriptor.TYPE_BYTES and bound.length < SMALL_BYTES:
        with pytest.raises(InvalidRequest, match=rf"^{path}: {bound.length + 1} bytes"):
            parse(wrapped(way, bytes_field(field, bytes(bound.length + 1))), request_type)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "eu 1", "\N{GREEK SMALL LETTER ALPHA}", "a" * 65])
def test_names_of_peers_are_names(name):
    data = run_pb2.RegisterRequest(site="eu-1", incarnation=name).SerializeToString()

    with pytest.raises(InvalidRequest, match=r"^incarnation: "):
        parse(data, run_pb2.RegisterRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    "facts", [{"a\nb": "c"}, {"a": "b\nc"}, {"a" * 65: "c"}, {"a": "c" * 301}, dict.fromkeys(map(str, range(65)), "")]
)
def test_entries_keys_and_values_of_a_map_are_bounded(facts):
    data = run_pb2.DescribeRunRequest(facts=facts).SerializeToString()

    with pytest.raises(InvalidRequest, match=r"^facts: "):
        parse(data, run_pb2.DescribeRunRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({"id": {"site": "a/b"}}, "id.site: not a name"),
        ({"id": {"incarnation": "a" * 65}}, "id.incarnation: more than 64"),
        ({"state_root": "a" * 65}, "state_root: more than 64"),
        ({"state_root": "line\nline"}, "state_root: not one line"),
        ({"traceparent": "x" * 257}, "traceparent: more than 256"),
    ],
)
async def test_texts_of_pushed_groups_are_bounded_too(guard, group, problem):
    data = push_of(rollout_pb2.Group(), rollout_pb2.Group(**group)).SerializeToString()

    with pytest.raises(InvalidRequest, match=problem):
        await guard.message(PUSH, None, data)


def test_numbers_that_are_not_packed_are_counted_too():
    field = rollout_pb2.AbandonWorkRequest.DESCRIPTOR.fields_by_name["assignments"]
    one = encoder.TagBytes(field.number, wire_format.WIRETYPE_VARINT) + b"\x01"
    assert list(parse(one * 3, rollout_pb2.AbandonWorkRequest.DESCRIPTOR).assignments) == [1, 1, 1]

    with pytest.raises(InvalidRequest, match=r"^assignments: more than 4096"):
        parse(one * 4097, rollout_pb2.AbandonWorkRequest.DESCRIPTOR)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x0a", b"\x0a\x05a", b"\x00\x00"])
def test_bytes_that_are_no_message_are_an_invalid_request(data):
    with pytest.raises(InvalidRequest, match="^not a HeartbeatRequest: "):
        parse(data, run_pb2.HeartbeatRequest.DESCRIPTOR)


def test_unknown_fields_of_a_newer_program_pass():
    newer = encoder.TagBytes(900, wire_format.WIRETYPE_VARINT) + b"\x01"

    assert parse(b"\x0a\x02eu" + newer * 10, run_pb2.HeartbeatRequest.DESCRIPTOR).site == "eu"


@pytest.mark.parametrize("request_type", REQUESTS, ids=[request.name for request in REQUESTS])
def test_request_that_needs_no_length_is_refused_before_it_is_parsed(request_type):
    data = b"\xff" * (SMALL_BYTES + 1)
    expected = "^not a" if request_type.name in LONG else f"^{request_type.name}: {len(data)} bytes, at most"

    with pytest.raises(InvalidRequest, match=expected):
        parse(data, request_type)


def test_fields_of_all_kinds_together_are_bounded():
    result = evaluation_pb2.PromptResult(samples=[evaluation_pb2.ScoredSample()] * 1024)
    data = evaluation_pb2.PushEvaluationRequest(results=[result] * 64).SerializeToString()

    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
        parse(data, evaluation_pb2.PushEvaluationRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        (b"", bytes(16 << 20)),
        (bytes(16 << 20), b""),
        (b"\x0a\x00" * (4 << 20), (8 << 20).to_bytes(4, "little")),
        (encoder.TagBytes(900, 0) * (1 << 20), (3 << 20).to_bytes(4, "little")),
    ],
    ids=["sizes", "groups", "one field again and again", "unknown fields"],
)
async def test_push_of_any_bytes_takes_memory_like_its_length(guard, groups, sizes):
    data = rollout_pb2.PushGroupsRequest(groups=groups, sizes=sizes).SerializeToString()
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidRequest):
            await guard.message(PUSH, None, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 * len(data)


async def test_event_loop_never_reads_a_long_message(guard, monkeypatch):
    """With a few such calls at a time one caller stopped the lease's renewals and the watchdog."""
    threads = []
    real = call_admission.parse
    monkeypatch.setattr(
        call_admission, "parse", lambda *args, **more: threads.append(threading.get_ident()) or real(*args, **more)
    )
    newer = encoder.TagBytes(900, wire_format.WIRETYPE_VARINT) + b"\x01"

    for count in (1, call_admission.INLINE_BYTES):
        await guard.message("/heterorl.v1.RolloutService/LeaseWork", None, newer * count)

    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()


async def test_push_becomes_its_groups(guard):
    groups = [rollout_pb2.Group(assignment=number) for number in range(PUSH_GROUPS)]

    assert await guard.message(PUSH, None, push_of(*groups).SerializeToString()) == groups
    with pytest.raises(InvalidRequest, match=f"a message carries 1 to {PUSH_GROUPS}"):
        await guard.message(PUSH, None, push_of(*groups, rollout_pb2.Group()).SerializeToString())


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
