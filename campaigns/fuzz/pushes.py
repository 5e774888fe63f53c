"""Fuzz target: pushed bytes as the coordinator judges them; a learner can open and train on what it accepts."""

from __future__ import annotations

import dataclasses
import random
import struct

import numpy as np

from campaigns.fuzz.messages import any_message
from campaigns.fuzz.mutate import mutated
from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import Contract, Digest, SiteId
from heterorl.common.types.rollout import (
    GIVEN,
    FinishReason,
    Group,
    GroupId,
    RewardPart,
    Rollout,
    Span,
    strips_of,
    turns_of,
)
from heterorl.common.wire.rollout_messages import pushed_from_pb
from heterorl.common.wire.sealed_groups import open_group, read_sealed, seal
from heterorl.coordinator.groups.intake import Arrival, examined
from heterorl.coordinator.rpc.bounds import PUSH_GROUPS, check, parse
from heterorl.v1 import rollout_pb2
from tests.support.run import CONTRACT

END = 300
LONGEST = 12
"""Tokens of a completion in the contract."""
ROUTED = 4
"""Bytes of a token's expert record."""
_CONTRACT = dataclasses.replace(
    CONTRACT,
    vocab_size=1000,
    end_token_ids=(2, END),
    routed_token_bytes=ROUTED,
    sampling=dataclasses.replace(CONTRACT.sampling, max_new_tokens=LONGEST),
)
_TURNS = dataclasses.replace(
    _CONTRACT, routed_token_bytes=0, max_turns=3, max_trajectory_tokens=30, min_members=1
)  # fmt: skip
"""The contract for rollouts of several turns."""
_MAX_PROMPT = 64
_NEWER = b"\xf2\x3f\x03new"
"""A field of a newer program."""
_COLUMNS = [field.name for field in rollout_pb2.Group.DESCRIPTOR.fields if field.type == field.TYPE_BYTES]
_ODD = (b"\xff" * 4, bytes(4), struct.pack("<f", float("nan")), struct.pack("<d", float("inf")), b"\1")


class PushTarget:
    """From a push's bytes to arrivals: an accepted group keeps every rule when it is opened."""

    def case(self, draw: random.Random) -> bytes:
        """A push of honest groups, of groups with a changed column, or of arbitrary ones; damaged in a third of the
        cases.
        """
        parts = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            message = rollout_pb2.Group.FromString(seal(_honest(draw, has_turns=draw.random() < 0.5)).data)
            kind = draw.random()
            if kind < 0.4:
                _change(message, draw)
            elif kind < 0.5:
                message = any_message(rollout_pb2.Group, draw)  # type: ignore[assignment]
            parts.append(message.SerializeToString() + (_NEWER if draw.random() < 0.1 else b""))
        sizes = [len(part) + (draw.random() < 0.02) for part in parts]
        push = rollout_pb2.PushGroupsRequest(groups=b"".join(parts), sizes=struct.pack(f"<{len(sizes)}I", *sizes))
        data = push.SerializeToString()
        return mutated(data, draw, other=data) if draw.random() < 0.33 else data

    def run(self, case: bytes) -> None:
        message = parse(case, rollout_pb2.PushGroupsRequest.DESCRIPTOR)
        assert isinstance(message, rollout_pb2.PushGroupsRequest)
        groups = pushed_from_pb(message, limit_groups=PUSH_GROUPS)
        for group in groups:
            check(group)
        found = [examined(groups, contract, max_prompt_tokens=_MAX_PROMPT) for contract in (_CONTRACT, _TURNS)]
        problems = []
        for group, of_one_turn, of_turns in zip(groups, *found, strict=True):
            self._judge(group, of_one_turn, _CONTRACT)
            self._judge(group, of_turns, _TURNS)
            if of_one_turn.problem and of_turns.problem:
                problems.append(of_one_turn.problem)
        if problems:
            raise InvalidRequest(problems[0])

    def _judge(self, group: rollout_pb2.Group, arrived: Arrival, contract: Contract) -> None:
        (alone,) = examined([group], contract, max_prompt_tokens=_MAX_PROMPT)
        assert repr(alone) == repr(arrived), "a group is judged otherwise than alone"
        if not arrived.problem:
            assert arrived.sealed is not None
            assert read_sealed(arrived.sealed.data) == arrived.sealed, "the store reads other facts than were sealed"
            opened = open_group(arrived.sealed)
            (_must_hold if contract is _CONTRACT else _must_hold_of_turns)(opened)


def _must_hold(group: Group) -> None:
    assert 0 < group.prompt_token_ids.size <= _MAX_PROMPT
    assert len(group.rollouts) == _CONTRACT.group_size
    assert group.oldest_version == min(span.version for rollout in group.rollouts for span in rollout.spans)
    for rollout in group.rollouts:
        ids, size = rollout.token_ids, rollout.token_ids.size
        assert 0 < size <= LONGEST
        assert 0 <= ids.min() <= ids.max() < _CONTRACT.vocab_size
        assert rollout.sampler_logprobs.size == size
        assert np.isfinite(rollout.sampler_logprobs).all()
        assert rollout.sampler_logprobs.max() <= 0
        assert not np.isin(ids[:-1], _CONTRACT.end_token_ids).any()
        is_ended = ids[-1] in _CONTRACT.end_token_ids
        assert rollout.finish_reason is (FinishReason.EOS if is_ended else FinishReason.LENGTH) or (
            rollout.finish_reason is FinishReason.TURNS
        )
        assert [span.start for span in rollout.spans] == [0, *(span.end for span in rollout.spans[:-1])]
        assert rollout.spans[-1].end == size
        assert np.isfinite([rollout.reward, *(part.value * part.weight for part in rollout.reward_parts)]).all()
        assert len(rollout.routed_experts) in (0, ROUTED * (group.prompt_token_ids.size + size - 1))


def _must_hold_of_turns(group: Group) -> None:
    assert group.trainable
    drawn = [span.version for rollout in group.rollouts for span in rollout.spans if span.is_drawn]
    assert group.oldest_version == min(drawn)
    for rollout in group.rollouts:
        assert rollout.token_ids.size <= _TURNS.max_trajectory_tokens
        turns = turns_of(rollout)
        assert len(turns) <= _TURNS.max_turns
        assert all(0 < end - start <= LONGEST for start, end in turns)
        assert sum(end - start for start, end in turns) == rollout.num_drawn
        strips = strips_of(group.prompt_token_ids, rollout)
        ids = [token for strip in strips for token in strip.token_ids[strip.is_drawn].tolist()]
        assert ids == [token for start, end in turns for token in rollout.token_ids[start:end].tolist()]
        longest = max((strip.token_ids.size for strip in strips), default=0)
        assert len(strips) * longest <= group.prompt_token_ids.size + _TURNS.max_trajectory_tokens
        assert np.isfinite(rollout.sampler_logprobs).all()
        if rollout.is_trainable:
            assert turns
            assert turns[-1][1] == rollout.token_ids.size


def _change(message: rollout_pb2.Group, draw: random.Random) -> None:
    """Change one column: a byte, its end, or a number in it."""
    name = draw.choice(_COLUMNS)
    column = bytearray(getattr(message, name))
    kind = draw.randrange(4)
    if kind == 0 and column:
        column[draw.randrange(len(column))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del column[draw.randrange(len(column) + 1) :]
    elif kind == 2:
        column += draw.choice(_ODD)
    else:
        odd = draw.choice(_ODD)
        at = draw.randrange(max(1, len(column) // len(odd))) * len(odd)
        column[at : at + len(odd)] = odd
    setattr(message, name, bytes(column))
    message.id_bytes = draw.choice((message.id_bytes, message.id_bytes, 0, 1, 4, 5))


def _honest(draw: random.Random, *, has_turns: bool) -> Group:
    prompt = np.array([draw.randrange(1000) for _ in range(draw.randint(1, 8))], np.int32)
    return Group(
        id=GroupId(site=SiteId("eu-1"), incarnation="b1946ac9", sequence=draw.randrange(1, 300)),
        assignment=draw.randrange(1000),
        prompt_index=draw.randrange(50),
        prompt_token_ids=prompt,
        rollouts=tuple(
            _trajectory(draw, num_prompt=prompt.size) if has_turns else _rollout(draw, num_prompt=prompt.size)
            for _ in range(_CONTRACT.group_size)
        ),
        oldest_version=3,
        state_root=Digest("a" * 64),
        generation_s=draw.choice((0.0, 1.5)),
        is_seeded=draw.random() < 0.5,
        trace=draw.choice(("", f"00-{'1' * 32}-{'2' * 16}-01")),
    )


def _rollout(draw: random.Random, *, num_prompt: int) -> Rollout:
    length = draw.randint(1, LONGEST)
    ids = [draw.choice((0, 5, 127, 128, 999)) for _ in range(length)]
    if draw.random() < 0.05:
        ids[draw.randrange(length)] = draw.choice((1000, 1001, 2, END))
    is_end = length < LONGEST or draw.random() < 0.5
    if is_end:
        ids[-1] = draw.choice((2, END))
    cut = draw.randrange(length)
    bounds = [(3, 0, length)] if not cut else [(3, 0, cut), (4, cut, length)]
    read = num_prompt + length - 1 + (draw.random() < 0.05)
    return Rollout(
        token_ids=np.array(ids, np.int32),
        sampler_logprobs=np.full(length, -draw.random(), np.float32),
        spans=tuple(Span(version=version, start=start, end=end) for version, start, end in bounds),
        reward=draw.choice((0.0, 1.0)),
        reward_parts=(RewardPart(name="correct", value=1.0),) * draw.randrange(2),
        finish_reason=FinishReason.EOS if is_end else FinishReason.LENGTH,
        routed_experts=draw.randbytes(ROUTED * read) if draw.random() < 0.3 else b"",
    )


def _trajectory(draw: random.Random, *, num_prompt: int) -> Rollout:
    """Turns of completions with given tokens between them, sometimes keeping fewer tokens than there were."""
    parts = [_rollout(draw, num_prompt=num_prompt) for _ in range(draw.randint(1, 3))]
    ids: list[int] = []
    spans: list[Span] = []
    for number, part in enumerate(parts):
        if number:
            count, keeps = draw.randint(1, 3), draw.choice((None, None, draw.randrange(num_prompt + 4)))
            spans.append(Span(version=GIVEN, start=len(ids), end=len(ids) + count, keeps=keeps))
            ids += [draw.choice((2, END, 7)) for _ in range(count)]
        spans += [dataclasses.replace(s, start=s.start + len(ids), end=s.end + len(ids)) for s in part.spans]
        ids += part.token_ids.tolist()
    lost = draw.choice((FinishReason.TOOL_LOST, FinishReason.ENVIRONMENT_FAILED))
    return dataclasses.replace(
        parts[-1],
        token_ids=np.array(ids, np.int32),
        sampler_logprobs=np.concatenate([part.sampler_logprobs for part in parts]),
        spans=tuple(spans),
        finish_reason=draw.choice((parts[-1].finish_reason, FinishReason.TURNS, lost)),
        routed_experts=b"",
    )
