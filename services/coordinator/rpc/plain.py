"""Pushed groups read without a scan: canonical bytes, known as such before anything is made of them.

The scan asks every field before the parser runs, in Python. Nearly all pushes need no such question: they are groups in
canonical form, in which lists of numbers are bytes for the parser (heterorl.common.wire.seal), and little else is in
them. Such a push is read here by protobuf alone. Any other one is left to the scan, which says what is wrong with it.

Guarantees: of what is taken here, the scan would pass each group, and the group's bytes are its canonical ones; a push
is left to the scan after some milliseconds, whatever is in it; what the parser makes of it takes a few times its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from heterorl.common.wire.seal import as_bytes
from heterorl.coordinator.rpc.bounds import DEFAULT, PUSH_GROUPS, bound_of, text_problem

SMALL_BYTES = 1 << 16
"""Whatever a group of this size consists of, its objects are some megabytes."""
REST_BYTES = 1 << 16
"""What a longer one may have beside its lists of numbers."""
OBJECT_BYTES = 32
"""Least bytes of a group for each message inside it: fewer would become many times their size."""
MAX_OBJECTS = 1 << 14
"""Messages inside all groups of a push, which the event loop makes in some milliseconds."""
_MAX_ROLLOUTS = 4096
_GROUP = as_bytes("Group")
_FIRST, _MORE, _ROLLOUTS, _PROMPT = 0x0A, 0x12, 0x2A, 0x22
"""Tags: the first group of a push and the others, a rollout and the prompt of a group."""
_LISTS = (0x0A, 0x12)
"""Tags of a rollout's token ids and log-probs, which canonical bytes begin with."""
_NAME, _ROOT, _TRACE, _PART = (
    bound_of("GroupId", "site"), bound_of("Group", "state_root"), bound_of("Group", "traceparent"),
    bound_of("RewardPart", "name"),
)  # fmt: skip
_MAX_PARTS = bound_of("Rollout", "reward_parts").count
_SIGNATURE = bound_of("RewardPart", "signature").length


@dataclass(frozen=True, slots=True, eq=False)
class PlainPush:
    """A push in canonical form: its groups as messages with lists as bytes, and the canonical bytes of each."""

    group: Any
    more: Sequence[Any]
    data: Sequence[bytes]

    @property
    def groups(self) -> Sequence[Any]:
        """All of them, in order."""
        return [self.group, *self.more]


def read_push(data: bytes) -> PlainPush | None:
    """The groups of a push; None where it is not plain, which says nothing about whether it is allowed."""
    parts: list[bytes] = []
    groups: list[Any] = []
    position, left = 0, MAX_OBJECTS
    while position < len(data):
        if data[position] != (_MORE if parts else _FIRST) or len(parts) == PUSH_GROUPS:
            return None
        length, start = _varint(data, position + 1)
        position = start + length
        if length < 0 or position > len(data):
            return None
        if length > SMALL_BYTES and not _has_little_rest(data, start, position):
            return None
        part = data[start:position]
        # Each before the next is looked at: the first that is not plain ends it all.
        group = _group_of(part)
        if group is None:
            return None
        left -= _num_objects(group)
        if left < 0:
            return None
        parts.append(part)
        groups.append(group)
    if not groups:
        return None
    return PlainPush(groups[0], groups[1:], parts)


def _num_objects(group: Any) -> int:
    rollouts = group.rollouts
    return len(rollouts) + sum(len(rollout.spans) + len(rollout.reward_parts) for rollout in rollouts)


def _group_of(data: bytes) -> Any:
    """The message of a group's canonical bytes; None where they are not."""
    try:
        group = _GROUP.FromString(data)
    except DecodeError:
        return None
    group.DiscardUnknownFields()
    # Whoever wrote it, it is what we would have written, but for what is inside the lists.
    if not _is_within_bounds(group, len(data)) or group.SerializeToString(deterministic=True) != data:
        return None
    return group


def _is_within_bounds(group: Any, num_bytes: int) -> bool:
    rollouts = group.rollouts
    if len(rollouts) > _MAX_ROLLOUTS or _num_objects(group) * OBJECT_BYTES > num_bytes:
        return False
    texts = [(group.id.site, _NAME), (group.id.incarnation, _NAME), (group.state_root, _ROOT)]
    if group.traceparent:
        texts.append((group.traceparent, _TRACE))
    for rollout in rollouts:
        if len(rollout.spans) > DEFAULT.count or len(rollout.reward_parts) > _MAX_PARTS:
            return False
        texts += [(part.name, _PART) for part in rollout.reward_parts]
        if any(len(part.signature) > _SIGNATURE for part in rollout.reward_parts):
            return False
    # Most rollouts name the same parts.
    return not any(text_problem(text, bound) for text, bound in set(texts))


def _has_little_rest(data: bytes, position: int, end: int) -> bool:
    """Whether a long group consists of lists of numbers but for a small rest; looks at no more than those lists."""
    rest, num_rollouts, last = 0, 0, 0
    while position < end:
        tag = data[position]
        if tag < last or (tag == last and tag != _ROLLOUTS):
            # Canonical bytes have their fields in order, and none of them again.
            return False
        last = tag
        if tag not in (_ROLLOUTS, _PROMPT):
            # One byte at a time: whatever it is, it counts as the rest until the next list.
            stop = _skip(data, position, end)
            if stop < 0:
                return False
            rest += stop - position
            position = stop
        else:
            length, start = _varint(data, position + 1)
            stop = start + length
            if length < 0 or stop > end:
                return False
            if tag == _ROLLOUTS:
                num_rollouts += 1
                rest += length - _lists_bytes(data, start, stop) + 8
            position = stop
        if rest > REST_BYTES or num_rollouts > _MAX_ROLLOUTS:
            return False
    return True


def _lists_bytes(data: bytes, start: int, stop: int) -> int:
    """Bytes of the lists that a rollout in [start, stop) begins with."""
    position = start
    for tag in _LISTS:
        if position < stop and data[position] == tag:
            length, begin = _varint(data, position + 1)
            if length < 0 or begin + length > stop:
                break
            position = begin + length
    return position - start


def _skip(data: bytes, position: int, end: int) -> int:
    """Where the field at a position ends; -1 where that is not plain."""
    wire = data[position] & 7
    if data[position] > 127:
        return -1
    if wire == 2:
        length, start = _varint(data, position + 1)
        stop = start + length if length >= 0 else -1
    elif wire == 0:
        stop = _varint(data, position + 1)[1]
    elif wire in (1, 5):
        stop = position + (9 if wire == 1 else 5)
    else:
        stop = -1
    return stop if stop <= end else -1


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(a number, where it ends); (-1, -1) where it does not end."""
    value = shift = 0
    for place in range(position, min(position + 10, len(data))):
        byte = data[place]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place + 1
        shift += 7
    return -1, -1
