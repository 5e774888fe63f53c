"""A group's numbers are judged by its columns, as the same rules asked rollout by rollout would judge them."""

import dataclasses
import math
import random

import numpy as np
import pytest

from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import (
    MAX_PART_NAME,
    MAX_REWARD_PARTS,
    FinishReason,
    Group,
    GroupId,
    RewardPart,
    Rollout,
    VersionSpan,
)
from heterorl.common.wire.columns import columns_of
from heterorl.coordinator.groups.admission import content_problem
from tests.support.groups import group_to_pb
from tests.support.run import CONTRACT, INCARNATION, SITE

EOS = 17_000
LONGEST = 9
MAX_PROMPT = 12
VOCABULARIES = (40, 128, 256, 257, 17_001, 65_537, 150_000, 2**24 + 1, 2**31)


def _contract(vocab_size: int, *ends: int, routed_token_bytes: int = 0):
    sampling = dataclasses.replace(CONTRACT.sampling, max_new_tokens=LONGEST)
    return dataclasses.replace(
        CONTRACT, vocab_size=vocab_size, group_size=2, end_token_ids=ends, sampling=sampling,
        routed_token_bytes=routed_token_bytes,
    )  # fmt: skip


def _group(draw: random.Random, contract) -> Group:
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

    prompt = [draw.randrange(contract.vocab_size) for _ in range(draw.randint(1, MAX_PROMPT))]
    return Group(
        id=GroupId(site=SITE, incarnation=INCARNATION, sequence=1), assignment=4, prompt_index=2,
        prompt_token_ids=np.array(prompt, np.int32), rollouts=(rollout(), rollout()), oldest_version=3,
        state_root=Digest("a" * 64), generation_s=0.5,
    )  # fmt: skip


def _problem(group: Group, contract) -> str:
    return content_problem(columns_of(group_to_pb(group)), contract, max_prompt_tokens=MAX_PROMPT)


def _expected(group: Group, contract) -> str:
    """The field that a reader of the rules, one rollout at a time, would name; empty where nothing is wrong."""
    ends, prompt = contract.end_token_ids, group.prompt_token_ids.tolist()
    if len(prompt) > MAX_PROMPT or not prompt or max(prompt) >= contract.vocab_size:
        return "prompt"
    if not math.isfinite(group.generation_s) or group.generation_s < 0:
        return "generation_s"
    wrong = set()
    for rollout in group.rollouts:
        ids, logprobs = rollout.token_ids.tolist(), rollout.sampler_logprobs.tolist()
        if not 0 < len(ids) <= LONGEST:
            wrong.add("lengths")
            continue
        if len(rollout.routed_experts) not in (0, contract.routed_token_bytes * (len(prompt) + len(ids) - 1)):
            wrong.add("record_lengths")
        if max(ids) >= contract.vocab_size:
            wrong.add("token_ids")
        if ends:
            if any(token in ends for token in ids[:-1]):
                wrong.add("token_ids")
            if (ids[-1] in ends) != (rollout.finish_reason is FinishReason.EOS):
                wrong.add("endings")
            if ids[-1] not in ends and len(ids) < LONGEST:
                wrong.add("unended")
        if not all(math.isfinite(number) and number <= 0 for number in logprobs):
            wrong.add("logprobs")
        values = [rollout.reward, *(part.value for part in rollout.reward_parts)]
        if not all(map(math.isfinite, values)):
            wrong.add("rewards")
        if not all(math.isfinite(part.weight) for part in rollout.reward_parts):
            wrong.add("part_weights")
        if not rollout.spans:
            wrong.add("span_counts")
        elif sum(s.end - s.start for s in rollout.spans) != len(ids) or any(s.end == s.start for s in rollout.spans):
            wrong.add("span_lengths")
    order = ("lengths", "span_counts", "record_lengths", "token_ids", "endings", "unended", "logprobs", "rewards",
             "part_weights", "span_lengths")  # fmt: skip
    for name in order:
        if name in wrong:
            return name.replace("unended", "token_ids")
    oldest = min(span.version for rollout in group.rollouts for span in rollout.spans)
    return "" if oldest == group.oldest_version else "oldest_version"


def _changed(group: Group, draw: random.Random) -> Group:
    """One thing is wrong, or none."""
    at = draw.randrange(2)
    some = group.rollouts[at]
    part = some.reward_parts[0]
    odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, 0.5, -3.0]
    places = [draw.choice([EOS, 39, 127, 16_384, 2**31 - 1]), draw.randrange(some.token_ids.size)]
    ids = some.token_ids.copy()
    ids[places[1]] = places[0]
    logprobs = some.sampler_logprobs.copy()
    logprobs[places[1]] = draw.choice(odd)
    shorter = draw.randrange(some.token_ids.size + 1)
    name, number = draw.choice(["version", "end"]), draw.choice([1, 2, 3, 9])
    spans = tuple(
        dataclasses.replace(span, **{name: max(number, span.start) if name == "end" else number}) for span in some.spans
    )
    rollout_changes = [
        {},
        {"token_ids": ids},
        {"sampler_logprobs": logprobs},
        {"token_ids": some.token_ids[:shorter], "sampler_logprobs": logprobs[:shorter]},
        {"finish_reason": draw.choice(list(FinishReason))},
        {"spans": spans},
        {"spans": ()},
        {"reward": draw.choice(odd)},
        {"reward_parts": (dataclasses.replace(part, value=draw.choice(odd)),)},
        {"reward_parts": (dataclasses.replace(part, weight=draw.choice(odd)),)},
        {"routed_experts": bytes(draw.choice([0, 6, 6 * (group.prompt_token_ids.size + some.token_ids.size - 1)]))},
    ]
    group_changes = [
        {"generation_s": draw.choice([-1.0, math.nan, 0.0, 3.0])},
        {"oldest_version": draw.choice([3, 2, 4, -1])},
        {"prompt_token_ids": draw.choice([group.prompt_token_ids[:0], np.full(13, 1, np.int32), ids])},
    ]
    change = draw.randrange(len(rollout_changes) + len(group_changes))
    if change >= len(rollout_changes):
        return dataclasses.replace(group, **group_changes[change - len(rollout_changes)])
    rollouts = list(group.rollouts)
    rollouts[at] = dataclasses.replace(some, **rollout_changes[change])
    return dataclasses.replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("ends", [(), (2,), (39,), (128,), (EOS,), (2, 128), (39, 300, EOS)])
def test_columns_are_judged_as_rollouts_one_by_one_would_be(vocabulary, ends):
    draw = random.Random(vocabulary * 100 + sum(ends))
    contract = _contract(vocabulary, *[token for token in ends if token < vocabulary], routed_token_bytes=6)
    seen = {True: 0, False: 0}
    for _ in range(120):
        group = _changed(_group(draw, contract), draw)

        problem, expected = _problem(group, contract), _expected(group, contract)

        assert problem.startswith(expected), f"{problem!r}, {expected!r}\n{group}"
        assert bool(problem) == bool(expected), f"{problem!r}, {expected!r}\n{group}"
        seen[not problem] += 1
    assert min(seen.values()) > 10


@pytest.mark.parametrize(
    ("part_changes", "count", "problem"),
    [
        ({"name": "a" * (MAX_PART_NAME + 1)}, 1, "part_names: a name has at most"),
        ({"name": "a\x07b"}, 1, "part_names: a name has at most"),
        ({}, MAX_REWARD_PARTS + 1, f"part_counts: rollout 1 has {MAX_REWARD_PARTS + 1} parts"),
        ({"name": "a" * MAX_PART_NAME}, MAX_REWARD_PARTS, ""),
    ],
)
def test_parts_of_rewards_are_bounded(part_changes, count, problem):
    contract = _contract(300)
    group = _group(random.Random(3), contract)
    first, second = group.rollouts
    parts = (dataclasses.replace(first.reward_parts[0], **part_changes),) * count
    group = dataclasses.replace(group, rollouts=(first, dataclasses.replace(second, reward_parts=parts)))

    assert _problem(group, contract).startswith(problem)
    assert bool(_problem(group, contract)) == bool(problem)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_group_has_the_size_of_the_contract(count):
    contract = _contract(300)
    group = _group(random.Random(4), contract)

    assert _problem(dataclasses.replace(group, rollouts=group.rollouts[:1] * count), contract) == (
        f"lengths: {count} rollouts, the group size is 2"
    )


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
    contract = _contract(300, routed_token_bytes=token_bytes)
    group = _group(random.Random(1), contract)
    first = group.rollouts[0]
    record = bytes(6 * (group.prompt_token_ids.size + first.token_ids.size - 1))
    first = dataclasses.replace(first, routed_experts=change(record))

    problem = _problem(dataclasses.replace(group, rollouts=(first, *group.rollouts[1:])), contract)

    assert problem == "" if is_right else problem.startswith("record_lengths: rollout 0 has")
