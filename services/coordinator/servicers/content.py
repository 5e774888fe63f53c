"""What groups say, judged from their bytes in one pass over many: whether nothing at all is wrong with them.

Lists of numbers stay as protobuf packs them. A vectorised look at the bytes answers what admission asks: that numbers
are in their shortest form and below the vocabulary, as many ids as log-probs, end tokens nowhere but at the end.
Which rule a group breaks, nobody learns here: `admission.content_problem` says that of the opened group.

Guarantees: what is sound here has no `content_problem`, and its bytes are canonical inside its lists too. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterorl.common.process.tracing import well_formed
from heterorl.common.types.common import Contract
from heterorl.common.types.rollout import MAX_PART_NAME, MAX_REWARD_PARTS
from heterorl.common.wire.common import MAX_INT64
from heterorl.v1 import rollout_pb2

_Bytes = NDArray[np.uint8]
_EOS, _LENGTH = rollout_pb2.FINISH_REASON_EOS, rollout_pb2.FINISH_REASON_LENGTH
_MAX_VOCABULARY = 1 << 31


def are_sound(groups: Sequence[Any], contract: Contract, *, max_prompt_tokens: int) -> bool:
    """Whether none of these messages (lists as bytes) has anything wrong inside."""
    prompts, ids, logprobs, lengths, finish, records = [], [], [], [], [], []
    for group in groups:
        rollouts = group.rollouts
        if len(rollouts) != contract.group_size or not _is_shell_sound(group):
            return False
        prompt = group.prompt_token_ids
        if not prompt or prompt[-1] > 127:
            return False
        prompts.append(prompt)
        oldest = MAX_INT64
        for rollout in rollouts:
            some_ids, values = rollout.token_ids, rollout.sampler_logprobs
            num_tokens = len(values) >> 2
            records.append(len(rollout.routed_experts))
            if not some_ids or some_ids[-1] > 127 or not values or len(values) & 3 or not _are_parts_sound(rollout):
                return False
            position = 0
            for span in rollout.spans:
                if span.start != position or span.end <= position:
                    return False
                position = span.end
                oldest = min(oldest, span.version)
            if position != num_tokens:
                return False
            ids.append(some_ids)
            logprobs.append(values)
            lengths.append(num_tokens)
            finish.append(rollout.finish_reason)
        if oldest != group.oldest_version:
            return False
    if not groups or max(lengths) > contract.sampling.max_new_tokens or not 0 < contract.vocab_size <= _MAX_VOCABULARY:
        return False
    values = np.frombuffer(b"".join(logprobs), "<f4")
    # A NaN is in both, and fails both.
    if not (values.max() <= 0 and values.min() > -np.inf):
        return False
    num_prompt_bytes = sum(map(len, prompts))
    data = np.frombuffer(b"".join(prompts + ids), np.uint8)
    is_stop = data < 128
    counts = _count(is_stop, [*map(len, prompts), *map(len, ids)])
    if max(counts[: len(prompts)]) > max_prompt_tokens or counts[len(prompts) :] != lengths:
        return False
    if any(records) and not _are_records_sound(records, counts[: len(prompts)], lengths, contract):
        return False
    if not _are_ids_sound(data, is_stop, vocab_size=contract.vocab_size):
        return False
    ends = np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids))) - 1
    return _do_ends_agree(data[num_prompt_bytes:], is_stop[num_prompt_bytes:], ends, lengths, finish, contract)


def _is_shell_sound(group: Any) -> bool:
    """Whether the group's own fields are as they will be read: nothing in them is clamped or emptied."""
    is_in_range = max(group.id.sequence, group.assignment, group.prompt_index) <= MAX_INT64
    duration = group.generation_s
    # Reading empties a trace that is none.
    is_trace = well_formed(group.traceparent) == group.traceparent
    return is_in_range and is_trace and math.isfinite(duration) and duration >= 0


def _are_parts_sound(rollout: Any) -> bool:
    parts = rollout.reward_parts
    if len(parts) > MAX_REWARD_PARTS or not math.isfinite(rollout.reward):
        return False
    # Reading leaves a weight of 1 out.
    return all(
        math.isfinite(part.value) and math.isfinite(part.weight) and part.weight != 1.0
        and len(part.name) <= MAX_PART_NAME
        for part in parts
    )  # fmt: skip


def _are_records_sound(
    records: Sequence[int], prompt_lengths: Sequence[int], lengths: Sequence[int], contract: Contract
) -> bool:
    prompts = np.repeat(prompt_lengths, contract.group_size)
    expected = (prompts + np.array(lengths) - 1) * contract.routed_token_bytes
    sizes = np.array(records)
    return bool(((sizes == 0) | (sizes == expected)).all())


def _count(is_stop: NDArray[np.bool_], sizes: Sequence[int]) -> list[int]:
    """How many numbers each list has."""
    starts = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], out=starts[1:])
    counts: list[int] = np.add.reduceat(is_stop, starts, dtype=np.int32).tolist()
    return counts


def _are_ids_sound(data: _Bytes, is_stop: NDArray[np.bool_], *, vocab_size: int) -> bool:
    """Whether every number is in its shortest form and below the vocabulary; each list ends with a number's end."""
    highest = vocab_size - 1
    width = max(1, -(-highest.bit_length() // 7))
    # Bytes in front of which `width - 1` bytes of the same number stand: ends of numbers of the full width.
    goes_on = ~is_stop
    is_full = np.ones(data.size, np.bool_)
    for place in range(1, width):
        is_full[place:] &= goes_on[:-place]
        is_full[:place] = False
    if (goes_on & is_full).any():
        return False
    if width > 1 and ((data[1:] == 0) & goes_on[:-1]).any():
        return False
    top = highest >> (7 * (width - 1))
    tops = np.flatnonzero(is_full & (data >= top))
    if not tops.size:
        return True
    numbers = np.zeros(tops.size, np.int64)
    for place in range(width):
        numbers |= (data[tops - place].astype(np.int64) & 127) << (7 * (width - 1 - place))
    return bool(numbers.max() <= highest)


def _do_ends_agree(
    data: _Bytes, is_stop: NDArray[np.bool_], ends: NDArray[np.int64], lengths: Sequence[int], finish: Sequence[int],
    contract: Contract,
) -> bool:  # fmt: skip
    """Whether each completion ends as it says, and has no end token before; `ends` are the last bytes of the lists."""
    if any(reason not in (_EOS, _LENGTH) for reason in finish):
        return False
    if not contract.end_token_ids:
        return True
    is_end = np.zeros(data.size, np.bool_)
    for number in contract.end_token_ids:
        is_end |= _stands(data, is_stop, number)
    longest = contract.sampling.max_new_tokens
    expected = [end for end, reason in zip(ends.tolist(), finish, strict=True) if reason == _EOS]
    if np.flatnonzero(is_end).tolist() != expected:
        return False
    return all(reason == _EOS or length == longest for reason, length in zip(finish, lengths, strict=True))


def _stands(data: _Bytes, is_stop: NDArray[np.bool_], number: int) -> NDArray[np.bool_]:
    """Where a number's last byte is."""
    packed = _packed(number)
    is_here: NDArray[np.bool_] = data == packed[-1]
    for place in range(1, len(packed)):
        is_here[place:] &= data[:-place] == packed[-1 - place]
        is_here[:place] = False
    # In front of it another number ends, or the first list begins.
    is_here[len(packed) :] &= is_stop[: -len(packed)]
    return is_here


def _packed(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
