"""Samples as a run makes them, without one: completions of arithmetic that reason, hesitate and sometimes never end."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GIVEN, DropReason, FinishReason, Group, GroupId, RewardPart, Rollout, Span
from heterorl.common.types.sample import (
    CONSUMED,
    EVALUATED,
    MAX_PREVIEW,
    Sample,
    SampleKind,
    SampleRollout,
    SampleSummary,
    beginning,
    kind_of,
)

SITES = ("eu-1", "us-east-2", "ap-3")
_REASONS = (DropReason.STALE_AT_LEASE, DropReason.REWARD_MISMATCH, DropReason.SURPLUS)
_STEPS = (
    "Let me work through this step by step.",
    "Wait, that does not look right: I should check the carry.",
    "First the ones: {a} and {b} end in {ones}.",
    "So the sum of {a} and {b} must be near {near}.",
    "Alternatively, add {a} to {tens} and then the rest.",
    "Hmm, the question asks for the sum, not for the difference.",
    "Therefore I get {sum}.",
)


def pieces_of(text: str) -> list[str]:
    """The text in tokens, as a tokenizer would cut it."""
    return re.findall(r"\n+| ?[A-Za-z]{1,6}|\d{1,3}| |.", text, re.DOTALL)


def make_rollout(
    text: str, *, seed: int, reward: float = 1.0, version: int = 40, is_noted: bool = True, **fields
) -> SampleRollout:
    """A completion of a text: its tokens, log-probs and, where a learner noted it, log-ratios."""
    numbers = np.random.default_rng(seed)
    pieces = pieces_of(text)
    count = len(pieces)
    logprobs = -numbers.gamma(0.35, 0.9, count).astype(np.float32)
    ratios = (numbers.standard_t(2.2, count) * 0.12).astype(np.float32)
    middle = count // 2
    spans = (Span(version=version, start=0, end=count),)
    if seed % 4 == 3 and middle:
        spans = (Span(version=version, start=0, end=middle), Span(version=version + 1, start=middle, end=count))
    stated = {
        "completion": text,
        "token_ids": np.array([sum(piece.encode("utf-8", "replace")) + 100 for piece in pieces], np.int32),
        "sampler_logprobs": logprobs,
        "log_ratios": ratios if is_noted else np.zeros(0, np.float32),
        "token_ends": np.cumsum([len(piece) for piece in pieces], dtype=np.int32),
        "spans": spans,
        "reward": reward,
        "reward_parts": (
            RewardPart(name="correct", value=float(reward >= 0.5)),
            RewardPart(name="format", value=reward % 0.5),
        ),
        "finish_reason": FinishReason.EOS,
    }
    return SampleRollout(**(stated | fields))


def make_sample(
    number: int, *, rollouts: int = 4, steps: int = 4, prompt: str = "", completions: tuple[str, ...] = ()
) -> Sample:
    """The `number`th sample of a run; every seventh was dropped, every ninth is an evaluation."""
    dice = random.Random(number)
    a, b = dice.randint(100, 999), dice.randint(100, 999)
    because, kind = CONSUMED, SampleKind.CONSUMED
    if number % 7 == 0:
        reason = _REASONS[number // 7 % len(_REASONS)]
        because, kind = reason.value, kind_of(reason)
    elif number % 9 == 0:
        because, kind = EVALUATED, SampleKind.EVALUATION
    version, site = 50 + number // 8, SITES[number % len(SITES)]
    made = []
    for i in range(max(rollouts, len(completions))):
        words = {"a": a, "b": b, "sum": a + b, "ones": (a + b) % 10, "near": round(a + b, -2), "tens": b // 10 * 10}
        body = "\n".join(dice.choice(_STEPS).format(**words) for _ in range(dice.randint(1, steps)))
        is_right, is_cut = dice.random() < 0.6, dice.random() < 0.1
        text = f"{body}\n\nThe answer is \\boxed{{{a + b if is_right else a + b + 10}}}."
        text = completions[i] if i < len(completions) else text[: len(text) // 2] if is_cut else text
        made.append(
            make_rollout(
                text,
                seed=number * 16 + i,
                version=version - dice.randint(3, 40),
                reward=round(0.9 * is_right * (not is_cut) + 0.1 * dice.random(), 3),
                is_noted=kind is SampleKind.CONSUMED,
                finish_reason=FinishReason.LENGTH if is_cut else FinishReason.EOS,
            )
        )
    rewards = [rollout.reward for rollout in made]
    prompt = prompt or f"What is {a} + {b}? Think first, then give the answer in \\boxed{{}}."
    is_evaluation = kind is SampleKind.EVALUATION
    summary = SampleSummary(
        id=number,
        kind=kind,
        kept_because=because,
        detail="rewards differ by 0.4 at completion 2" if because == "reward_mismatch" else "",
        site=SiteId("" if is_evaluation else site),
        group=None if is_evaluation else GroupId(site=SiteId(site), incarnation="b1946ac9", sequence=number),
        version=version,
        oldest_version=min(rollout.versions[0] for rollout in made),
        kept_time=1_795_000_000.0 + 17 * number,
        prompt_index=dice.randint(0, 9999),
        num_rollouts=len(made),
        num_truncated=sum(rollout.finish_reason is FinishReason.LENGTH for rollout in made),
        num_tokens=sum(len(rollout.token_ids) for rollout in made),
        reward_min=min(rewards),
        reward_mean=sum(rewards) / len(rewards),
        reward_max=max(rewards),
        has_texts=True,
        prompt_preview=beginning(prompt, MAX_PREVIEW),
        completion_preview=beginning(made[0].completion, MAX_PREVIEW),
    )
    return Sample(
        summary=summary,
        prompt=prompt,
        answer=prompt[:40],
        prompt_token_ids=np.arange(20, dtype=np.int32),
        rollouts=tuple(made),
    )


ASKED, ANSWERED = "<|user|>12 + 30 is 42<|assistant|>", "<|user|>the page is short<|assistant|>"
TURNS = (
    (FinishReason.EOS, 1.0, ((40, "The sum is 42."),)),
    (
        FinishReason.TURNS, 0.5,
        ((40, "Let me add.\n"), (GIVEN, ASKED), (40, "So it"), (41, " is 42."), (GIVEN, ANSWERED), (41, "Done.")),
    ),
    (
        FinishReason.LENGTH, 0.0,
        ((40, "I look."), (GIVEN, ASKED), (40, "Next."), (GIVEN, ANSWERED, 3), (41, "It is 42.")),
    ),
    (FinishReason.ENGINE_FAILED, 9.0, ()),
    (FinishReason.TOOL_LOST, 9.0, ((40, "Call it."), (GIVEN, "<|user|>half"))),
)  # fmt: skip
"""How each ended, its reward, and what it says: who drew it, the text, and what another sequence keeps.

An ordinary completion, three turns, two sequences, a member lost without a token and one lost with some.
"""


def make_turns(number: int) -> Sample:
    """A sample of TURNS."""
    sample = make_sample(1, completions=tuple("x" for _ in TURNS))
    rollouts = []
    for (ending, reward, said), base in zip(TURNS, sample.rollouts, strict=True):
        pieces = [pieces_of(text) for _, text, *_ in said]
        ends = np.cumsum([0, *map(len, pieces)]).tolist()
        spans = tuple(
            Span(version=version, start=start, end=end, keeps=keeps[0] if keeps else None)
            for (version, _, *keeps), start, end in zip(said, ends, ends[1:], strict=False)
        )
        drawn = sum(span.end - span.start for span in spans if span.version != GIVEN)
        rollouts.append(
            dataclasses.replace(
                base,
                completion="".join(text for _, text, *_ in said),
                token_ids=np.arange(100, 100 + ends[-1], dtype=np.int32),
                token_ends=np.cumsum([len(piece) for some in pieces for piece in some], dtype=np.int32),
                sampler_logprobs=-np.arange(1, drawn + 1, dtype=np.float32) / 16,
                log_ratios=np.arange(1, (ending.is_trainable and drawn) + 1, dtype=np.float32) / 8,
                spans=spans, reward=reward, reward_parts=(), finish_reason=ending,
            )
        )  # fmt: skip
    kept = [rollout for rollout in rollouts if not rollout.is_lost]
    summary = dataclasses.replace(
        sample.summary,
        id=number, version=43, oldest_version=40, num_rollouts=5, num_truncated=1, num_lost=2,
        num_tokens=sum(len(rollout.sampler_logprobs) for rollout in rollouts),
        reward_min=0.0, reward_mean=sum(rollout.reward for rollout in kept) / 3, reward_max=1.0,
        completion_preview=rollouts[0].completion,
    )  # fmt: skip
    return dataclasses.replace(sample, summary=summary, rollouts=tuple(rollouts))


def group_of_turns() -> Group:
    """The group that `make_turns` is a sample of."""
    sample = make_turns(1)
    return Group(
        id=sample.summary.group, assignment=1, prompt_index=3, prompt_token_ids=sample.prompt_token_ids,
        rollouts=tuple(
            Rollout(
                token_ids=one.token_ids, sampler_logprobs=one.sampler_logprobs, spans=one.spans, reward=one.reward,
                reward_parts=(), finish_reason=one.finish_reason,
            )
            for one in sample.rollouts
        ),
        oldest_version=40, state_root="0" * 64, generation_s=1.0,
    )  # fmt: skip
