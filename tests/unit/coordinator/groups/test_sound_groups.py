"""Groups judged from their bytes: what is found sound there has no problem when it is opened, and is canonical."""

import dataclasses
import random
import struct

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import FinishReason, GroupId, RewardPart, Rollout, VersionSpan
from heterorl.common.types.rollout import Group as GroupValue
from heterorl.common.wire.numbers import pack_ids
from heterorl.common.wire.seal import as_bytes, open_group, receive, seal
from heterorl.coordinator.groups.admission import content_problem
from heterorl.coordinator.rpc.plain import read_push
from heterorl.coordinator.servicers.arrivals import _check_counts as check_counts
from heterorl.coordinator.servicers.content import are_sound
from heterorl.v1 import rollout_pb2
from tests.support.run import CONTRACT, INCARNATION, SITE

EOS = 17_000
LONGEST = 9
MAX_PROMPT = 12
VOCABULARIES = (40, 128, 129, 16_384, 16_385, 17_001, 150_000, 2**21, 2**31)


def _contract(vocab_size: int, *ends: int):
    sampling = dataclasses.replace(CONTRACT.sampling, max_new_tokens=LONGEST)
    return dataclasses.replace(CONTRACT, vocab_size=vocab_size, group_size=2, end_token_ids=ends, sampling=sampling)


def _group(draw: random.Random, contract) -> GroupValue:
    def rollout() -> Rollout:
        is_eos = bool(contract.end_token_ids) and draw.random() < 0.5
        length = draw.randint(1, LONGEST) if is_eos or not contract.end_token_ids else LONGEST
        ids = [draw.choice([0, 5, 127, 128, 300, 16_383, 16_384, draw.randrange(contract.vocab_size)])
               % contract.vocab_size for _ in range(length)]  # fmt: skip
        ids = [number if number not in contract.end_token_ids else 1 for number in ids]
        if is_eos:
            ids[-1] = draw.choice(contract.end_token_ids)
        cut = draw.randint(0, length - 1)
        bounds = [(3, 0, length)] if not cut else [(3, 0, cut), (4, cut, length)]
        return Rollout(
            token_ids=np.array(ids, np.int32),
            sampler_logprobs=np.array([-draw.random() for _ in ids], np.float32),
            spans=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in bounds),
            reward=draw.choice([0.0, 1.0]),
            reward_parts=(RewardPart(name="correct", value=1.0),),
            finish_reason=FinishReason.EOS if is_eos else FinishReason.LENGTH,
        )

    return GroupValue(
        id=GroupId(site=SITE, incarnation=INCARNATION, sequence=1), assignment=4, prompt_index=2,
        prompt_token_ids=np.array([draw.randrange(contract.vocab_size) for _ in range(draw.randint(1, MAX_PROMPT))],
                                  np.int32),
        rollouts=(rollout(), rollout()), oldest_version=3, state_root=Digest("a" * 64), generation_s=0.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("token_bytes", "change", "is_right"),
    [
        (6, lambda record: record, True),
        (6, lambda _: b"", True),
        (6, lambda record: record[:-1], False),
        (6, lambda record: record + record, False),
        (7, lambda record: record, False),
        # No routing is replayed in this run.
        (0, lambda record: record, False),
        (0, lambda _: b"", True),
    ],
)
def test_record_of_experts_has_the_size_that_the_contract_states(token_bytes, change, is_right):
    draw = random.Random(1)
    contract = dataclasses.replace(_contract(300), routed_token_bytes=token_bytes)
    group = _group(draw, contract)
    first = group.rollouts[0]
    record = bytes(6 * (group.prompt_token_ids.size + first.token_ids.size - 1))
    first = dataclasses.replace(first, routed_experts=change(record))
    sealed = seal(dataclasses.replace(group, rollouts=(first, *group.rollouts[1:])))

    raw = as_bytes("Group").FromString(sealed.data)
    assert are_sound([raw], contract, max_prompt_tokens=MAX_PROMPT) is is_right
    assert ("routed_experts" in _problem(sealed.data, contract)) is not is_right
    if not is_right:
        with pytest.raises(InvalidRequest, match="routed_experts"):
            check_counts(rollout_pb2.Group.FromString(sealed.data), contract=contract, max_prompt_tokens=MAX_PROMPT)


def _problem(data: bytes, contract) -> str:
    """What the opened group would be refused for; empty where it would not."""
    try:
        sealed, group = receive(rollout_pb2.Group.FromString(data))
    except (DecodeError, InvalidRequest, MalformedPayload) as error:
        return str(error)
    if sealed.data != data:
        return "not canonical"
    return content_problem(group, contract, max_prompt_tokens=MAX_PROMPT)


def _damaged(data: bytes, draw: random.Random) -> bytes:
    """One thing is wrong, or none."""
    raw = as_bytes("Group").FromString(data)
    some = draw.choice(list(raw.rollouts))
    name = draw.choice(("token_ids", "sampler_logprobs"))
    kind = draw.randrange(12)
    if kind == 0:
        lists = bytearray(getattr(some, name))
        if lists:
            lists[draw.randrange(len(lists))] ^= 1 << draw.randrange(8)
        setattr(some, name, bytes(lists))
    elif kind == 1:
        prompt = bytearray(raw.prompt_token_ids)
        prompt[draw.randrange(len(prompt))] ^= 1 << draw.randrange(8)
        raw.prompt_token_ids = bytes(prompt)
    elif kind == 2:
        value = draw.choice([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 0.5, -3.0])
        some.sampler_logprobs = struct.pack("<f", value) + some.sampler_logprobs[4:]
    elif kind == 3:
        setattr(some, name, getattr(some, name)[: draw.randrange(12)])
    elif kind == 4:
        some.finish_reason = draw.choice([0, 1, 2, 7])
    elif kind == 5:
        span = draw.choice(list(some.spans))
        setattr(span, draw.choice(["version", "start", "end"]), draw.choice([0, 1, 2, 3, 9, 2**31]))
    elif kind == 6:
        some.reward = draw.choice([float("nan"), float("inf"), 2.0])
        some.reward_parts[0].value = draw.choice([1.0, float("-inf")])
        some.reward_parts[0].weight = draw.choice([0.5, 1.0, 0.0, float("nan")])
    elif kind == 7:
        raw.generation_s = draw.choice([-1.0, float("nan"), 0.0, 3.0])
        raw.oldest_version = draw.choice([3, 3, 2, 4, -1])
    elif kind == 8:
        field = draw.choice(["assignment", "prompt_index"])
        setattr(raw, field, draw.choice([0, 2**63 - 1, 2**63, 2**64 - 1]))
    elif kind == 9:
        ids = pack_ids(np.array([draw.choice([1, EOS, 39, 127, 16_384, 2**31 - 1])], np.int32))
        some.token_ids = draw.choice([ids + some.token_ids, some.token_ids + ids, b"\x80\x00" + some.token_ids])
    elif kind == 10:
        raw.traceparent = draw.choice(["", "nothing", f"00-{'1' * 32}-{'2' * 16}-01"])
    return bytes(raw.SerializeToString(deterministic=True))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("ends", [(), (2,), (39,), (128,), (EOS,), (2, 128), (39, 300, EOS)])
def test_what_is_sound_by_its_bytes_has_no_problem_and_the_other_way_round(vocabulary, ends):
    draw = random.Random(vocabulary * 100 + sum(ends))
    contract = _contract(vocabulary, *[token for token in ends if token < vocabulary])
    seen = {True: 0, False: 0}
    for _ in range(120):
        data = _damaged(seal(_group(draw, contract)).data, draw)
        message = as_bytes("Group").FromString(data)

        is_sound = are_sound([message], contract, max_prompt_tokens=MAX_PROMPT)

        problem = _problem(data, contract)
        assert is_sound == (problem == ""), f"{problem!r}\n{message}"
        seen[is_sound] += 1
    assert min(seen.values()) > 10


def test_many_groups_are_sound_where_each_is():
    draw = random.Random(1)
    contract = _contract(150_000, EOS)
    good = [as_bytes("Group").FromString(seal(_group(draw, contract)).data) for _ in range(5)]
    bad = as_bytes("Group").FromString(seal(_group(draw, contract)).data)
    bad.rollouts[1].token_ids = pack_ids(np.array([EOS], np.int32)) + bad.rollouts[1].token_ids

    assert are_sound(good, contract, max_prompt_tokens=MAX_PROMPT)
    assert not are_sound([], contract, max_prompt_tokens=MAX_PROMPT)
    for place in range(len(good) + 1):
        some = [*good[:place], bad, *good[place:]]
        assert not are_sound(some, contract, max_prompt_tokens=MAX_PROMPT)


def test_bytes_of_a_sound_push_are_those_that_open_to_the_group():
    group = _group(random.Random(2), _contract(150_000, EOS))
    sealed = seal(group)
    push = read_push(rollout_pb2.PushGroupsRequest(group=rollout_pb2.Group.FromString(sealed.data)).SerializeToString())

    assert push is not None
    assert list(push.data) == [sealed.data]
    assert open_group(dataclasses.replace(sealed, data=push.data[0])).id == group.id
