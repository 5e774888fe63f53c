"""Upper bounds of every field of a request, and parsing within them.

A field without a row has the bound of its type, so a new field is bounded from the start. No honest program reaches
these bounds; contract and quotas are checked later. A message's length is checked before it is parsed, its fields
before a handler runs. Do not widen a bound for one caller: it can send several messages.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from heterorl.common.errors import InvalidRequest
from heterorl.common.identity.spiffe import is_name
from heterorl.common.types.common import MAX_END_TOKENS
from heterorl.common.types.evaluation import MAX_RESULTS, MAX_SAMPLES, MAX_TEXT
from heterorl.common.weights.payload import FRAME_BYTES
from heterorl.common.wire.statement import MAX_STATEMENT_BYTES
from heterorl.v1.rollout_pb2 import Group


class Text(enum.Enum):
    """The kinds of text."""

    NAME = "name"
    """The name of a site, an incarnation or a run: letters, digits, `.`, `_` and `-`."""
    LINE = "line"
    PROSE = "prose"
    """Any text; logs and screens must make it one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Most entries of a repeated field, and the longest entry.
    `length` is in characters of a text, or bytes of a bytes field."""

    count: int = 4096
    length: int = 256
    text: Text = Text.LINE


DEFAULT = Bound()
MAX_TOKENS = 1 << 26
MANIFEST_BYTES = 64 << 20
PUSH_GROUPS = 256
_NAME = Bound(length=64, text=Text.NAME)
_DIGEST = Bound(length=64)
_PROSE = Bound(length=4096, text=Text.PROSE)
_TOKENS = Bound(count=MAX_TOKENS)
_COLUMN = Bound(length=512 << 20)
"""Bounded by the message's own length."""
_EVALUATION_TEXT = Bound(length=MAX_TEXT, text=Text.PROSE)
_TEXTS = Bound(length=MAX_TOKENS, text=Text.PROSE)
"""Prompts and completions, bounded by the message's own length."""
_OF_LEARNER = Bound(count=1 << 15)
"""Entries that only a learner sends, one for each group or step of a version."""
MAX_FIELDS = 1 << 16
"""Fields of one message, nested ones included."""
FIELDS: Mapping[str, int] = MappingProxyType({
    "PublishVersionRequest": 1 << 18, "StreamGroupsRequest": 1 << 18, "AbandonGroupsRequest": 1 << 18,
    "RejectGroupsRequest": 1 << 18, "NoteSamplesRequest": 1 << 18,
})  # fmt: skip
SMALL_BYTES = 1 << 20
"""Bytes of a request that is not in LONG. Parsed, a request of many small entries takes about 50 times its bytes."""
LONG = frozenset({
    *FIELDS, "PushGroupsRequest", "PushEvaluationRequest", "UploadPayloadRequest", "PushLearnerMetricsRequest",
    "DiagnoseRequest",
})  # fmt: skip
"""Requests that may be as long as `max_message_bytes`."""

BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        # Fields of this name in any message.
        "site": _NAME,
        "incarnation": _NAME,
        "digest": _DIGEST,
        "state_root": _DIGEST,
        "task_digest": _DIGEST,
        "reason": _PROSE,
        "prompt": _TEXTS,
        "answer": _TEXTS,
        "completion": _TEXTS,
        "manifest": Bound(length=MANIFEST_BYTES),
        "variants": Bound(count=16),
        "canary_logprobs": _OF_LEARNER,
        # Fields of one message, which go before those by name.
        "Contract.tokenizer_digest": _DIGEST,
        "Contract.chat_template_digest": _DIGEST,
        "Contract.layout_id": _DIGEST,
        "Contract.end_token_ids": Bound(count=MAX_END_TOKENS),
        "StepReport.sources": Bound(count=256),
        "SourceReport.label": _NAME,
        "LoraSettings.base_digest": _DIGEST,
        "LoraSettings.target_modules": Bound(count=256),
        "DiagnoseRequest.padding": Bound(length=512 << 20),
        "AcquireLeaseRequest.holder": _NAME,
        "AcquireLeaseRequest.statement": Bound(length=MAX_STATEMENT_BYTES),
        "UploadPayloadRequest.frame": Bound(length=FRAME_BYTES),
        "PublishVersionRequest.consumed": _OF_LEARNER,
        "MetricSeries.name": Bound(length=128),
        # A learner has the buckets of each site.
        "MetricSeries.labels": Bound(count=1 << 13, length=1024, text=Text.PROSE),
        "MetricSeries.values": Bound(count=1 << 13),
        "PlanPullRequest.have_root": _DIGEST,
        "PlanPullRequest.base_root": _DIGEST,
        "LeaseWorkRequest.sets": Bound(count=256),
        "PushGroupsRequest.groups": _COLUMN,
        "PushGroupsRequest.sizes": _COLUMN,
        **{f"Group.{field.name}": _COLUMN for field in Group.DESCRIPTOR.fields if field.type == field.TYPE_BYTES},
        "Group.part_names": Bound(length=1 << 20, text=Text.PROSE),
        "StreamGroupsRequest.held": _OF_LEARNER,
        "AbandonGroupsRequest.ids": _OF_LEARNER,
        "RejectGroupsRequest.rejections": _OF_LEARNER,
        "Rejection.detail": _PROSE,
        "HeldWork.assignments": Bound(count=1 << 16),
        "HeartbeatRequest.problem": _PROSE,
        "ReportCanaryRequest.logprobs": Bound(count=1 << 16),
        "DescribeRunRequest.facts": Bound(count=64),
        "FactsEntry.key": Bound(length=64),
        "FactsEntry.value": Bound(length=300),
        "ListSamplesRequest.kept_because": _NAME,
        "NoteSamplesRequest.notes": Bound(count=256),
        "NoteSamplesRequest.evaluations": Bound(count=256),
        "RolloutNote.reward_parts": Bound(count=256),
        "RolloutNote.log_ratios": _TOKENS,
        "RolloutNote.token_ends": _TOKENS,
        "EvaluatedRollout.reward_parts": Bound(count=256),
        "EvaluatedRollout.token_ids": _TOKENS,
        "EvaluatedRollout.logprobs": _TOKENS,
        "BackupRequest.name": _NAME,
        "EvaluationSet.name": _NAME,
        "PushEvaluationRequest.results": Bound(count=MAX_RESULTS),
        "PromptResult.samples": Bound(count=MAX_SAMPLES),
        "PromptResult.prompt": _EVALUATION_TEXT,
        "PromptResult.answer": _EVALUATION_TEXT,
        "ScoredSample.text": _EVALUATION_TEXT,
        "ListEvaluationsRequest.task_set": _NAME,
    }
)


def bound_of(message: str, field: str) -> Bound:
    """The bound of a field; `message` is named without its package."""
    return BOUNDS.get(f"{message}.{field}") or BOUNDS.get(field, DEFAULT)


def text_problem(text: str | bytes, bound: Bound) -> str:
    """The problem with a text or bytes, or empty."""
    if isinstance(text, bytes):
        return f"{len(text)} bytes, at most {bound.length} are taken" if len(text) > bound.length else ""
    if len(text) > bound.length:
        return f"more than {bound.length} characters"
    if bound.text is Text.NAME and text and not is_name(text):
        return "not a name of letters, digits, '.', '_' and '-'"
    if bound.text is Text.LINE and not text.isprintable():
        return "not one line of printable characters"
    return ""


def parse(data: bytes, descriptor: Descriptor) -> Message:
    """Parse a message and check it. Raises InvalidRequest: names the field."""
    name = descriptor.name
    if len(data) > SMALL_BYTES and name not in LONG:
        raise InvalidRequest(f"{name}: {len(data)} bytes, at most {SMALL_BYTES} are taken")
    try:
        message: Message = GetMessageClass(descriptor).FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"not a {name}: {error}") from error
    check(message)
    return message


def check(message: Message) -> None:
    """Check a message against the bounds. Raises InvalidRequest: names the field."""
    left = FIELDS.get(message.DESCRIPTOR.name, MAX_FIELDS)
    if _count(message, left, "") > left:
        raise InvalidRequest(f"{message.DESCRIPTOR.name}: more than {left} fields in one message")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    bound: Bound
    is_repeated: bool
    is_message: bool
    is_text: bool
    of_map: tuple[Bound, Bound] | None


@functools.cache
def _fields(descriptor: Descriptor) -> tuple[_Field, ...]:
    found = []
    for field in descriptor.fields:
        entry = field.message_type
        is_map = entry is not None and entry.GetOptions().map_entry
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if is_repeated(field) or is_text or entry is not None:
            of_map = (bound_of(entry.name, "key"), bound_of(entry.name, "value")) if entry and is_map else None
            bound = bound_of(descriptor.name, field.name)
            if bound is _COLUMN:
                # The message's own length bounds it.
                continue
            is_message = entry is not None and not is_map
            found.append(_Field(field.name, bound, is_repeated(field), is_message, is_text, of_map))
    return tuple(found)


def _count(message: Message, left: int, path: str) -> int:
    """Check a message's fields; returns their number, or more than `left`."""
    number = 1
    for field in _fields(message.DESCRIPTOR):
        value = getattr(message, field.name)
        if field.is_repeated:
            if len(value) > field.bound.count:
                raise InvalidRequest(f"{path}{field.name}: more than {field.bound.count} entries")
            entries = value
        elif field.is_message:
            entries = (value,) if message.HasField(field.name) else ()
        else:
            entries = (value,)
        if field.is_message:
            for entry in entries:
                number += _count(entry, left - number, f"{path}{field.name}.")
                if number > left:
                    return number
        elif field.is_text:
            number += len(entries)
            for entry in entries:
                if problem := text_problem(entry, field.bound):
                    raise InvalidRequest(f"{path}{field.name}: {problem}")
        elif field.of_map is not None:
            number += len(entries)
            for key, text in value.items():
                problem = text_problem(key, field.of_map[0]) or text_problem(text, field.of_map[1])
                if problem:
                    raise InvalidRequest(f"{path}{field.name}: {problem}")
    return number


def is_repeated(field: FieldDescriptor) -> bool:
    """Whether a field is repeated.
    Protobuf 6.31 warns of `label`; earlier ones have only that."""
    known = getattr(field, "is_repeated", None)
    return bool(getattr(field, "label", 0) == FieldDescriptor.LABEL_REPEATED) if known is None else bool(known)
