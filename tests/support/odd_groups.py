"""Groups of random shape under a small contract: sound ones, and ones of which one thing may be wrong."""

import dataclasses
import math
import random

import numpy as np

from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import GIVEN, FinishReason, Group, GroupId, RewardPart, Rollout, Span
from tests.support.run import CONTRACT, INCARNATION, SITE

EOS = 17_000
LONGEST = 9
MAX_PROMPT = 12


def contract_of(
    vocab_size: int,
    *ends: int,
    routed_token_bytes: int = 0,
    max_turns: int = 1,
    min_members: int = 0,
    longest: int = 60,
):
    sampling = dataclasses.replace(CONTRACT.sampling, max_new_tokens=LONGEST)
    return dataclasses.replace(
        CONTRACT, vocab_size=vocab_size, group_size=2, end_token_ids=ends, sampling=sampling,
        routed_token_bytes=routed_token_bytes, max_turns=max_turns, max_trajectory_tokens=longest, min_members=min_members,
    )  # fmt: skip


def _ids(draw: random.Random, contract, length: int) -> list[int]:
    ids = [draw.choice([0, 5, 127, 128, 300, 16_383, 16_384, draw.randrange(contract.vocab_size)])
           % contract.vocab_size for _ in range(length)]  # fmt: skip
    return [number if number not in contract.end_token_ids else 1 for number in ids]


def sound_group(draw: random.Random, contract) -> Group:
    prompt = [draw.randrange(contract.vocab_size) for _ in range(draw.randint(1, MAX_PROMPT))]

    def rollout() -> Rollout:
        ids, spans, known = [], [], len(prompt)
        for turn in range(draw.randint(1, contract.max_turns)):
            if turn:
                count, keeps = draw.randint(1, 2), draw.choice([None, None, draw.randint(0, known)])
                spans.append(Span(version=GIVEN, start=len(ids), end=len(ids) + count, keeps=keeps))
                # What is given may hold end tokens.
                ids += [draw.randrange(contract.vocab_size) for _ in range(count)]
                known = count + (known if keeps is None else keeps)
            is_eos = bool(contract.end_token_ids) and draw.random() < 0.5
            length = draw.randint(1, LONGEST) if is_eos or not contract.end_token_ids else LONGEST
            start, cut = len(ids), draw.randint(0, length - 1)
            bounds = [(3, 0, length)] if not cut else [(3, 0, cut), (4, cut, length)]
            spans += [Span(version=v, start=start + a, end=start + b) for v, a, b in bounds]
            ids += _ids(draw, contract, length)
            known += length
            if is_eos:
                ids[-1] = draw.choice(contract.end_token_ids)
        count = sum(span.end - span.start for span in spans if span.is_drawn)
        return Rollout(
            token_ids=np.array(ids, np.int32),
            sampler_logprobs=np.array([-draw.random() for _ in range(count)], np.float32),
            spans=tuple(spans),
            reward=draw.choice([0.0, 1.0]),
            reward_parts=(RewardPart(name="correct", value=1.0),),
            finish_reason=FinishReason.EOS if is_eos else FinishReason.LENGTH,
        )

    return Group(
        id=GroupId(site=SITE, incarnation=INCARNATION, sequence=1), assignment=4, prompt_index=2,
        prompt_token_ids=np.array(prompt, np.int32), rollouts=(rollout(), rollout()), oldest_version=3,
        state_root=Digest("a" * 64), generation_s=0.5,
    )  # fmt: skip


def changed_group(group: Group, draw: random.Random) -> Group:
    """One thing is wrong, or none."""
    at = draw.randrange(2)
    some = group.rollouts[at]
    part = some.reward_parts[0]
    odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, 0.5, -3.0]
    ids = some.token_ids.copy()
    ids[draw.randrange(ids.size)] = draw.choice([EOS, 39, 127, 16_384, 2**31 - 1])
    logprobs = some.sampler_logprobs.copy()
    logprobs[draw.randrange(logprobs.size)] = draw.choice(odd)
    name = draw.choice(["version", "end", "keeps"])
    number = draw.choice([-2, GIVEN, 2, 3]) if name == "version" else draw.choice([0, 1, 2, 3, 9, 40])
    chosen = draw.randrange(len(some.spans))
    spans = tuple(
        dataclasses.replace(span, **{name: max(number, span.start) if name == "end" else number})
        if place == chosen else span
        for place, span in enumerate(some.spans)
    )  # fmt: skip
    rollout_changes = [
        {},
        {"token_ids": ids},
        {"sampler_logprobs": logprobs},
        {"token_ids": some.token_ids[: draw.randrange(some.token_ids.size + 1)]},
        {"token_ids": some.token_ids[:0], "sampler_logprobs": logprobs[:0], "spans": ()},
        {"finish_reason": draw.choice(list(FinishReason))},
        {"finish_reason": FinishReason.TOOL_LOST},
        {"spans": spans},
        {"spans": (), "sampler_logprobs": logprobs[:0]},
        {"spans": spans, "sampler_logprobs": np.zeros(sum(s.end - s.start for s in spans if s.is_drawn), np.float32)},
        {"reward": draw.choice(odd)},
        {"reward_parts": (dataclasses.replace(part, value=draw.choice(odd)),)},
        {"reward_parts": (dataclasses.replace(part, weight=draw.choice(odd)),)},
        {"routed_experts": bytes(draw.choice([0, 6, 6 * (group.prompt_token_ids.size + some.token_ids.size - 1)]))},
    ]
    group_changes = [
        {"generation_s": draw.choice([-1.0, math.nan, 0.0, 3.0])},
        {"oldest_version": draw.choice([3, 2, 4, -1])},
        {"prompt_token_ids": draw.choice([group.prompt_token_ids[:0], np.full(13, 1, np.int32)])},
    ]
    change = draw.randrange(len(rollout_changes) + len(group_changes))
    if change >= len(rollout_changes):
        return dataclasses.replace(group, **group_changes[change - len(rollout_changes)])
    rollouts = list(group.rollouts)
    rollouts[at] = dataclasses.replace(some, **rollout_changes[change])
    return dataclasses.replace(group, rollouts=tuple(rollouts))
