"""Sealed groups: canonical bytes made once by the sampler.

Only readers of the numbers open them.

    seal          group -> its canonical bytes        the sampler's outbox
    read_sealed   bytes of our own store              the outbox again, the coordinator's lease
    canonical     a peer's message -> its bytes       the coordinator's intake
    open_group    sealed -> group                     the learner

Canonical bytes are protobuf's deterministic ones, of fields that this program knows, with whole numbers within int64. A
group that is pushed twice has the same digest.

A group's numbers are columns: flat arrays over all rollouts. No token, log-prob, span or reward part becomes a Python
object. The columns agree: lengths and counts add up, each ending is a FinishReason, each part has a name. Memory is in
proportion to the message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from heterorl.common.errors import MalformedPayload
from heterorl.common.process.tracing import well_formed
from heterorl.common.types.common import Digest, Float32Array, Int32Array, SiteId
from heterorl.common.types.rollout import GIVEN, FinishReason, Group, GroupId, RewardPart, Rollout, SealedGroup, Span
from heterorl.common.wire.common_messages import MAX_INT32, MAX_INT64, to_message
from heterorl.v1 import rollout_pb2

GroupMessage = rollout_pb2.Group


def seal(group: Group) -> SealedGroup:
    """Make a group's canonical bytes."""
    columns = {"prompt_token_ids", "rollouts"}
    message = to_message(rollout_pb2.Group, group, without={*columns, "trace"}, traceparent=group.trace)
    write_columns(group, message)
    return _sealed(message, message.SerializeToString(deterministic=True))


def sealed(group: Group | SealedGroup) -> SealedGroup:
    """Seal a group, unless it is sealed already."""
    return group if isinstance(group, SealedGroup) else seal(group)


def read_sealed(data: bytes) -> SealedGroup:
    """Take a group's canonical bytes unchanged; raises MalformedPayload if unreadable."""
    return _sealed(group_message(data), data)


def canonical(message: rollout_pb2.Group) -> SealedGroup:
    """Clean a peer's group in place: drop unknown fields, clamp large numbers."""
    message.DiscardUnknownFields()
    message.id.sequence = min(message.id.sequence, MAX_INT64)
    message.assignment = min(message.assignment, MAX_INT64)
    message.prompt_index = min(message.prompt_index, MAX_INT64)
    message.traceparent = well_formed(message.traceparent)
    return _sealed(message, message.SerializeToString(deterministic=True))


def open_group(sealed: SealedGroup) -> Group:
    """Read a group's bytes; raises MalformedPayload if they are no group."""
    message = group_message(sealed.data)
    columns = columns_of(message)
    return Group(
        id=sealed.id,
        assignment=sealed.assignment,
        prompt_index=sealed.prompt_index,
        prompt_token_ids=columns.prompt,
        rollouts=rollouts_of(columns),
        oldest_version=sealed.oldest_version,
        state_root=sealed.state_root,
        generation_s=message.generation_s,
        is_seeded=message.is_seeded,
        trace=sealed.trace,
    )


def shell_of(sealed: SealedGroup) -> bytes:
    """A group's bytes without numbers: refused, but its sequence is counted."""
    message = group_message(sealed.data)
    shell = rollout_pb2.Group(
        id=message.id, assignment=message.assignment, oldest_version=message.oldest_version, id_bytes=1
    )
    return shell.SerializeToString(deterministic=True)


def group_message(data: bytes) -> rollout_pb2.Group:
    """The message of a group's bytes; raises MalformedPayload if unreadable."""
    try:
        return rollout_pb2.Group.FromString(data)
    except DecodeError as error:
        raise MalformedPayload(f"not a group: {error}") from error


def _sealed(message: rollout_pb2.Group, data: bytes) -> SealedGroup:
    return SealedGroup(
        id=GroupId(site=SiteId(message.id.site), incarnation=message.id.incarnation, sequence=message.id.sequence),
        data=data,
        assignment=message.assignment,
        prompt_index=message.prompt_index,
        oldest_version=message.oldest_version,
        state_root=Digest(message.state_root),
        versions=versions_of(message),
        trace=well_formed(message.traceparent),
    )


SIGNATURE_BYTES = 64
MAX_ID_BYTES = 4
_NO_SIGNATURE = bytes(SIGNATURE_BYTES)
FINISH = {reason: getattr(rollout_pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
FIRST_LOST = 16
"""First value of lost members."""
assert all((pb < FIRST_LOST) == value.is_trainable for value, pb in FINISH.items())
FINISH_OF: dict[int, FinishReason] = {pb: value for value, pb in FINISH.items()}
_U1, _U2, _U4, _I8, _F4, _F8 = (np.dtype(name) for name in ("u1", "<u2", "<u4", "<i8", "<f4", "<f8"))
Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The numbers of one group, or of several.

    B groups have G rollouts, T tokens, S spans and N reward parts together.
    """

    oldest_versions: Int64Array
    """[B]."""
    generation_s: Float64Array
    """[B]."""
    prompt: Int32Array
    """Tokens of all prompts."""
    prompt_lengths: Int64Array
    """[B]."""
    token_ids: Int32Array
    """[T]."""
    logprobs: Float32Array
    """[D]: of the drawn tokens."""
    lengths: Int64Array
    """[G]: tokens of each rollout."""
    endings: NDArray[np.uint8]
    """[G]: values of the message's FinishReason."""
    span_counts: Int64Array
    """[G]."""
    span_versions: Int64Array
    """[S]: GIVEN for tokens that no policy drew."""
    span_lengths: Int64Array
    """[S]."""
    span_keeps: Int64Array
    """[S]: see Span; -1 continues."""
    rewards: Float64Array
    """[G]."""
    part_counts: Int64Array
    """[G]."""
    names: tuple[str, ...]
    """Names of parts, each once."""
    part_names: NDArray[np.uint16]
    """[N]: positions in `names`."""
    part_values: Float64Array
    """[N]."""
    part_weights: Float64Array
    """[N]."""
    signatures: bytes
    """SIGNATURE_BYTES for each part, or empty."""
    record_lengths: Int64Array
    """[G]: bytes of each record of experts."""
    routed_experts: bytes


_COLUMNS = {
    "endings": (_U1, "lengths"),
    "rewards": (_F8, "lengths"),
    "span_counts": (_U4, "lengths"),
    "part_counts": (_U4, "lengths"),
    "record_lengths": (_U4, "lengths"),
    "span_lengths": (_U4, "span_counts"),
    "span_versions": (_I8, "span_counts"),
    "span_keeps": (_U4, "span_counts"),
    "part_name_positions": (_U2, "part_counts"),
    "part_values": (_F8, "part_counts"),
    "part_weights": (_F8, "part_counts"),
}
"""Each column's type on the wire, and the counts that its length agrees with; a made one follows one that agreed."""
_ABSENT = {"record_lengths": 0, "span_keeps": 0, "part_weights": 1}
"""Columns that a message may leave out, and what all their entries then are."""


def shape_of(message: rollout_pb2.Group) -> tuple[object, ...]:
    """Properties that groups share if one read takes them all."""
    absent = (len(message.span_keeps), len(message.part_weights), len(message.record_lengths))
    return message.id_bytes, len(message.lengths), message.part_names, *map(bool, absent)


def columns_of(*messages: rollout_pb2.Group) -> Columns:
    """Read the columns of groups of one shape.
    Raises MalformedPayload: one group's columns do not agree."""
    lengths, counts = _column(messages, "lengths", _U4)
    table = lengths.reshape(len(messages), counts[0])
    prompt_lengths = table[:, :1].sum(axis=1)
    prompt, token_ids = _read_ids(messages, table.sum(axis=1).tolist(), prompt_lengths.tolist())
    logprobs, num_logprobs = _column(messages, "logprobs", _F4)
    # The sum of each group's counts.
    stated = {"lengths": [max(0, count - 1) for count in counts]}
    found: dict[str, NDArray[Any]] = {}
    for name, (kind, of) in _COLUMNS.items():
        column, entries = _column(messages, name, kind)
        if name in _ABSENT and not column.size:
            column, entries = np.full(sum(stated[of]), _ABSENT[name], column.dtype), stated[of]
        _agree(name, entries, of, stated[of])
        found[name] = column
        if kind is _U4 and of == "lengths":
            stated[name] = column.reshape(len(messages), -1).sum(axis=1).tolist()
    _check_columns(messages, found, stated)
    drawn = _num_drawn(found["span_versions"], found["span_lengths"], found["span_counts"])
    _agree("logprobs", num_logprobs, "span_lengths", drawn.reshape(len(messages), -1).sum(axis=1).tolist())
    # On the wire a place is one more, and 0 continues.
    found["span_keeps"] = found["span_keeps"] - 1
    return Columns(
        oldest_versions=np.array([message.oldest_version for message in messages], np.int64),
        generation_s=np.array([message.generation_s for message in messages], np.float64),
        prompt=prompt,
        prompt_lengths=prompt_lengths,
        token_ids=token_ids,
        logprobs=logprobs,
        lengths=table[:, 1:].ravel(),
        names=tuple(messages[0].part_names.split("\n")) if any(stated["part_counts"]) else (),
        part_names=found.pop("part_name_positions"),
        signatures=b"".join(message.part_signatures for message in messages),
        routed_experts=b"".join(message.routed_experts for message in messages),
        **found,
    )


def _check_columns(
    messages: Sequence[rollout_pb2.Group], found: dict[str, NDArray[Any]], stated: dict[str, list[int]]
) -> None:
    unknown = set(found["endings"].tobytes()) - FINISH_OF.keys()
    if unknown:
        raise MalformedPayload(f"endings: {min(unknown)} is no FinishReason")
    positions, num_names = found["part_name_positions"], messages[0].part_names.count("\n") + 1
    if positions.size and int(positions.max()) >= num_names:
        raise MalformedPayload(f"part_name_positions: {positions.max()}, part_names has {num_names}")
    for message, num_parts in zip(messages, stated["part_counts"], strict=True):
        if len(message.part_signatures) not in (0, SIGNATURE_BYTES * num_parts):
            raise MalformedPayload(f"part_signatures: {len(message.part_signatures)} bytes for {num_parts} parts")
    num_bytes = [len(message.routed_experts) for message in messages]
    _agree("routed_experts", num_bytes, "record_lengths", stated["record_lengths"])


def versions_of(message: rollout_pb2.Group) -> tuple[int, ...]:
    """Policy versions of drawn spans, each once, ascending; reads one column."""
    return tuple(sorted(set(_column([message], "span_versions", _I8)[0].tolist()) - {GIVEN}))


def write_columns(group: Group, message: rollout_pb2.Group) -> None:
    rollouts = group.rollouts
    parts = [part for rollout in rollouts for part in rollout.reward_parts]
    spans = [span for rollout in rollouts for span in rollout.spans]
    ids = np.concatenate([group.prompt_token_ids, *(rollout.token_ids for rollout in rollouts)])
    message.id_bytes, message.token_ids = _write_ids(ids)
    message.lengths = _bytes([group.prompt_token_ids.size, *(r.token_ids.size for r in rollouts)], _U4)
    message.logprobs = b"".join(r.sampler_logprobs.astype("<f4", copy=False).tobytes() for r in rollouts)
    message.endings = bytes(FINISH[rollout.finish_reason] for rollout in rollouts)
    message.span_counts = _bytes([len(rollout.spans) for rollout in rollouts], _U4)
    message.span_versions = _bytes([span.version for span in spans], _I8)
    message.span_lengths = _bytes([span.end - span.start for span in spans], _U4)
    if any(span.keeps is not None for span in spans):
        message.span_keeps = _bytes([0 if span.keeps is None else span.keeps + 1 for span in spans], _U4)
    message.rewards = _bytes([rollout.reward for rollout in rollouts], _F8)
    message.part_counts = _bytes([len(rollout.reward_parts) for rollout in rollouts], _U4)
    if parts:
        _write_parts(parts, message)
    if any(rollout.routed_experts for rollout in rollouts):
        message.record_lengths = _bytes([len(rollout.routed_experts) for rollout in rollouts], _U4)
        message.routed_experts = b"".join(rollout.routed_experts for rollout in rollouts)


def _write_parts(parts: list[RewardPart], message: rollout_pb2.Group) -> None:
    names = {name: position for position, name in enumerate(dict.fromkeys(part.name for part in parts))}
    if any("\n" in name for name in names):
        raise ValueError("a part of a reward has a line feed in its name")
    message.part_names = "\n".join(names)
    message.part_name_positions = _bytes([names[part.name] for part in parts], _U2)
    message.part_values = _bytes([part.value for part in parts], _F8)
    if any(part.weight != 1.0 for part in parts):
        message.part_weights = _bytes([part.weight for part in parts], _F8)
    if any(part.signature for part in parts):
        signatures = [part.signature or _NO_SIGNATURE for part in parts]
        if any(len(signature) != SIGNATURE_BYTES for signature in signatures):
            raise ValueError(f"a signature of a reward has not {SIGNATURE_BYTES} bytes")
        message.part_signatures = b"".join(signatures)


def rollouts_of(columns: Columns) -> tuple[Rollout, ...]:
    spans, parts = _spans_of(columns), _parts_of(columns)
    # Copied, because readers may write to their arrays.
    drawn = iter(np.split(columns.logprobs.copy(), np.cumsum(num_drawn(columns))[:-1]))
    rollouts = []
    token = span = part = record = 0
    for number, length in enumerate(columns.lengths.tolist()):
        next_token, next_record = token + length, record + int(columns.record_lengths[number])
        next_span, next_part = span + int(columns.span_counts[number]), part + int(columns.part_counts[number])
        rollouts.append(
            Rollout(
                token_ids=columns.token_ids[token:next_token],
                sampler_logprobs=next(drawn),
                spans=spans[span:next_span],
                reward=float(columns.rewards[number]),
                reward_parts=parts[part:next_part],
                finish_reason=FINISH_OF[int(columns.endings[number])],
                routed_experts=columns.routed_experts[record:next_record],
            )
        )
        token, span, part, record = next_token, next_span, next_part, next_record
    return tuple(rollouts)


def num_drawn(columns: Columns) -> Int64Array:
    """Drawn tokens of each rollout, [G]."""
    return _num_drawn(columns.span_versions, columns.span_lengths, columns.span_counts)


def _num_drawn(versions: Int64Array, lengths: Int64Array, counts: Int64Array) -> Int64Array:
    drawn = np.where(versions != GIVEN, lengths, 0)
    ends = np.concatenate([[0], np.cumsum(drawn)])[np.concatenate([[0], np.cumsum(counts)])]
    found: Int64Array = np.diff(ends)
    return found


def _spans_of(columns: Columns) -> tuple[Span, ...]:
    ends = np.cumsum(columns.span_lengths)
    starts = ends - columns.span_lengths
    # Positions count from the beginning of each rollout.
    starts_of_rollouts = np.repeat(np.cumsum(columns.lengths) - columns.lengths, columns.span_counts)
    rows = zip(
        columns.span_versions.tolist(),
        (starts - starts_of_rollouts).tolist(),
        (ends - starts_of_rollouts).tolist(),
        columns.span_keeps.tolist(),
        strict=True,
    )
    return tuple(
        Span(version=version, start=start, end=end, keeps=None if keeps < 0 else keeps)
        for version, start, end, keeps in rows
    )


def _parts_of(columns: Columns) -> tuple[RewardPart, ...]:
    rows = zip(columns.part_names.tolist(), columns.part_values.tolist(), columns.part_weights.tolist(), strict=True)
    signatures = columns.signatures
    return tuple(
        RewardPart(
            name=columns.names[name], value=value, weight=weight, signature=b"" if data == _NO_SIGNATURE else data
        )
        for at, (name, value, weight) in enumerate(rows)
        for data in [signatures[SIGNATURE_BYTES * at : SIGNATURE_BYTES * (at + 1)]]
    )


def _write_ids(ids: Int32Array) -> tuple[int, bytes]:
    """Token ids in as few bytes each as the largest needs."""
    if ids.size and ids.min() < 0:
        raise ValueError(f"token id {ids.min()} is negative")
    width = max(1, -(-int(ids.max()).bit_length() // 8)) if ids.size else 1
    digits = np.ascontiguousarray(ids.astype("<u4")).view(np.uint8).reshape(-1, MAX_ID_BYTES)
    return width, digits[:, :width].tobytes()


def _read_ids(
    messages: Sequence[rollout_pb2.Group], lengths: list[int], prompt_lengths: list[int]
) -> tuple[Int32Array, Int32Array]:
    width = messages[0].id_bytes
    if not 1 <= width <= MAX_ID_BYTES:
        raise MalformedPayload(f"id_bytes: {width}, a token id has 1 to {MAX_ID_BYTES}")
    parts = [message.token_ids for message in messages]
    for part in parts:
        if len(part) % width:
            raise MalformedPayload(f"token_ids: {len(part)} bytes, {width} for each id")
    _agree("token_ids", [len(part) // width for part in parts], "lengths", lengths)
    pairs = [(memoryview(part), width * length) for part, length in zip(parts, prompt_lengths, strict=True)]
    return _ids_of([part[:cut] for part, cut in pairs], width), _ids_of([part[cut:] for part, cut in pairs], width)


def _ids_of(parts: list[memoryview], width: int) -> Int32Array:
    # Each id is read as four bytes, of which the last ones are the next id's.
    data = b"".join([*parts, bytes(MAX_ID_BYTES - width)])
    read = np.ndarray((sum(map(len, parts)) // width,), "<u4", data, strides=(width,))
    wide = read & np.uint32(2 ** (8 * width) - 1)
    if width == MAX_ID_BYTES:
        # Beyond int32 an id is clamped: it stays outside every vocabulary.
        np.minimum(wide, MAX_INT32, out=wide)
    return wide.view(np.int32)


def _column(messages: Sequence[rollout_pb2.Group], name: str, kind: np.dtype[Any]) -> tuple[NDArray[Any], list[int]]:
    """A column's entries, and each group's number of them.
    Counts and lengths are int64, whose sums fit."""
    parts = [getattr(message, name) for message in messages]
    for part in parts:
        if len(part) % kind.itemsize:
            raise MalformedPayload(f"{name}: {len(part)} bytes, {kind.itemsize} for each entry")
    numbers = np.frombuffer(b"".join(parts), kind)
    return numbers.astype(np.int64) if kind is _U4 else numbers, [len(part) // kind.itemsize for part in parts]


def _bytes(numbers: list[int] | list[float], kind: np.dtype[Any]) -> bytes:
    return np.array(numbers, kind).tobytes()


def _agree(name: str, found: list[int], other: str, stated: list[int]) -> None:
    for entries, expected in zip(found, stated, strict=True):
        if entries != expected:
            raise MalformedPayload(f"{name}: {entries} entries, {other} states {expected}")
