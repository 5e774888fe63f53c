"""Fuzz targets: protobuf to values, manifests to chunks, and pull plans."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from campaigns.fuzz.mutate import LONG_EDGES, mutated
from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import Digest, StepReport
from heterorl.common.types.policy import PayloadKind, PayloadRef, PublishRequest, PullPlan
from heterorl.common.types.rollout import Rejection, WorkGrant
from heterorl.common.weights.manifest import chunks_of
from heterorl.common.wire.common_messages import contract_from_pb, payload_from_pb, to_value
from heterorl.common.wire.policy_messages import grant_from_pb, manifest_from_bytes
from heterorl.common.wire.rollout_messages import outcome_from_pb
from heterorl.common.wire.run_messages import (
    commands_from_pb,
    heartbeat_from_pb,
    register_answer_from_pb,
    registration_from_pb,
    status_from_pb,
)
from heterorl.common.wire.sealed_groups import columns_of
from heterorl.common.wire.statement import TABLES, statement_from_bytes, statement_to_bytes
from heterorl.coordinator.versions.pull_plans import plan_pull
from heterorl.v1 import common_pb2, policy_pb2, rollout_pb2, run_pb2

DECODERS: list[tuple[type[Message], Callable[[Any], Any]]] = [
    (rollout_pb2.Group, columns_of),
    (common_pb2.Contract, contract_from_pb),
    (policy_pb2.PayloadRef, payload_from_pb),
    (common_pb2.StepReport, partial(to_value, StepReport)),
    (rollout_pb2.GroupOutcome, outcome_from_pb),
    (rollout_pb2.LeaseWorkResponse, partial(to_value, WorkGrant)),
    (rollout_pb2.Rejection, partial(to_value, Rejection)),
    (policy_pb2.AcquireLeaseResponse, grant_from_pb),
    (policy_pb2.PublishVersionRequest, partial(to_value, PublishRequest)),
    (policy_pb2.PlanPullResponse, partial(to_value, PullPlan)),
    (run_pb2.RegisterRequest, registration_from_pb),
    (run_pb2.RegisterResponse, register_answer_from_pb),
    (run_pb2.HeartbeatRequest, heartbeat_from_pb),
    (run_pb2.HeartbeatResponse, commands_from_pb),
    (run_pb2.GetStatusResponse, status_from_pb),
]
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def any_value(field: FieldDescriptor, draw: random.Random) -> Any:
    """A value of a scalar field's type, often at its limits."""
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return draw.choice([draw.randrange(10), low, high, draw.randint(low, high)])
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw.choice([value.number for value in field.enum_type.values] + [-1, 99])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw.choice([0.0, -0.0, 1.5, float("nan"), float("inf"), -1e30])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.choice((0, 1, 16, 40)))
    return draw.choice(
        ["", "x", "run", "0" * 64, "\0", "\u20ac" * 5, "f" * 64, "../../x", "/no-such-directory/x", "f" * 63 + "/"]
    )


def any_message(kind: type[Message], draw: random.Random, *, depth: int = 3) -> Message:
    """A message with some fields set to arbitrary values."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.2:
            continue
        is_repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        if field.message_type is not None:
            inner = field.message_type._concrete_class
            if field.message_type.GetOptions().map_entry or depth == 0:
                continue
            for _ in range(draw.randrange(3) if is_repeated else 1):
                value = any_message(inner, draw, depth=depth - 1)
                target = getattr(message, field.name)
                target.add().CopyFrom(value) if is_repeated else target.CopyFrom(value)
        elif is_repeated:
            getattr(message, field.name).extend(any_value(field, draw) for _ in range(draw.randrange(4)))
        else:
            setattr(message, field.name, any_value(field, draw))
    return message


class MessageTarget:
    """*_from_pb of what gRPC accepts: a value or a typed error."""

    def case(self, draw: random.Random) -> tuple[int, bytes]:
        """A decoder and serialised bytes, damaged in half of the cases."""
        number = draw.randrange(len(DECODERS))
        data = any_message(DECODERS[number][0], draw).SerializeToString()
        if draw.random() < 0.5 and data:
            data = mutated(data, draw, other=data)
        return number, data

    def run(self, case: tuple[int, bytes]) -> None:
        kind, decode = DECODERS[case[0]]
        try:
            message = kind.FromString(case[1])
        except DecodeError as error:
            # gRPC refuses these before any handler sees them.
            raise InvalidRequest(str(error)) from error
        decode(message)


class StatementTarget:
    """statement_from_bytes: settings with known keys that survive a round trip, or a typed error."""

    def case(self, draw: random.Random) -> bytes:
        """A statement with arbitrary values, damaged in some cases."""
        table: dict[str, Any] = {"contract": draw.choice(("", "f" * 64)), "group_size": draw.randrange(9)}
        table["use_chat_template"] = draw.random() < 0.5
        for key in TABLES:
            table[key] = {draw.choice("abc"): any_json(draw, draw.randrange(16))}
        if draw.random() < 0.3:
            table[draw.choice((*TABLES, "group_size", "more"))] = any_json(draw, 2)
        data = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=draw.random() < 0.5)
        return mutated(data.encode(), draw, other=data.encode()) if draw.random() < 0.5 else data.encode()

    def run(self, case: bytes) -> None:
        assert statement_to_bytes(statement_from_bytes(case)) == case, "another form"


def any_json(draw: random.Random, depth: int) -> Any:
    """A value of JSON, or nearly."""
    if depth and draw.random() < 0.8:
        inner = any_json(draw, depth - 1)
        return [inner] if draw.random() < 0.5 else {draw.choice(("", "k", "\u20ac")): inner}
    return draw.choice((None, True, 0, -1, 2**70, 1.5, 1e300, float("nan"), float("inf"), "", "\u20ac", "../x"))


class ManifestTarget:
    """manifest_from_bytes and chunks_of: as many chunks as digests, or a typed error."""

    def case(self, draw: random.Random) -> bytes:
        """A manifest's bytes; sizes often nearly fit."""
        message = any_message(policy_pb2.Manifest, draw)
        assert isinstance(message, policy_pb2.Manifest)
        if draw.random() < 0.5:
            lengths = [draw.randrange(200) for _ in "abc"]
            message.layout_id = message.state_root = "f" * 64
            message.parent_digest = ""
            for payload in message.payloads:
                payload.kind, payload.digest, payload.num_bytes = policy_pb2.PAYLOAD_KIND_DELTA, "0" * 64, 7
            message.num_byte_elements, message.num_elements = lengths[0], sum(lengths)
            message.full_bytes = lengths[0] + 2 * lengths[1] + 4 * lengths[2]
            message.chunk_elements = draw.choice((1, 7, 50, 1000))
            del message.chunk_digests[:]
            message.chunk_digests.extend([bytes(16)] * draw.choice((1, 3, 6)))
        if draw.random() < 0.3:
            name = draw.choice(("num_elements", "full_bytes", "chunk_elements", "num_byte_elements"))
            setattr(message, name, draw.choice(LONG_EDGES))
        data = message.SerializeToString()
        return mutated(data, draw, other=data) if draw.random() < 0.4 and data else data

    def run(self, case: bytes) -> None:
        manifest = manifest_from_bytes(case)
        chunks = chunks_of(manifest)
        assert len(chunks) == len(manifest.chunk_digests), "chunks and digests disagree"
        assert sum(chunk.num_bytes for chunk in chunks) == manifest.full_bytes, "chunks and bytes disagree"


class PlanTarget:
    """plan_pull over arbitrary payloads: a path to the goal, or a typed error."""

    def case(self, draw: random.Random) -> tuple[list[PayloadRef], int, int]:
        """Payloads of random versions, the held version and the wanted one."""
        payloads = [
            PayloadRef(
                kind=draw.choice(list(PayloadKind)),
                from_version=draw.randrange(-1, 8),
                to_version=draw.randrange(9),
                digest=Digest(f"{number:064x}"),
                num_bytes=draw.choice((0, 1, 10, 2**62)),
            )
            for number in range(draw.randrange(14))
        ]
        return payloads, draw.randrange(-1, 9), draw.randrange(9)

    def run(self, case: tuple[list[PayloadRef], int, int]) -> None:
        """Plan, and walk the plan."""
        payloads, have, want = case
        _, path, _ = plan_pull(
            lambda version: [p for p in payloads if p.to_version == version], have_version=have, want_version=want
        )
        at = have
        for payload in path:
            if payload.kind is not PayloadKind.SNAPSHOT:
                assert payload.from_version == at, "the path is broken"
            at = payload.to_version
        assert at == want, "the path ends elsewhere"
