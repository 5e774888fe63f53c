"""Protobuf <-> evaluations: what held-out prompts are drawn with, what came of them, what is known of versions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.evaluation import (
    MAX_TEXT,
    Estimate,
    Evaluation,
    EvaluationDraws,
    EvaluationSet,
    EvaluationSpec,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
    PromptResult,
    ScoredSample,
)
from heterorl.common.types.rollout import MAX_REWARD
from heterorl.common.wire.common import MAX_INT64
from heterorl.v1 import evaluation_pb2

_STATE = {state: evaluation_pb2.EvaluationState.Value(f"EVALUATION_STATE_{state.name}") for state in EvaluationState}
_STATE_OF = {pb: value for value, pb in _STATE.items()}


def draws_to_pb(value: EvaluationDraws) -> evaluation_pb2.EvaluationDraws:
    return evaluation_pb2.EvaluationDraws(**{name: getattr(value, name) for name in EvaluationDraws.__slots__})


def draws_from_pb(message: evaluation_pb2.EvaluationDraws) -> EvaluationDraws:
    """Convert draws.

    Raises:
        InvalidRequest: they cannot be drawn.
    """
    value = EvaluationDraws(**{name: getattr(message, name) for name in EvaluationDraws.__slots__})
    is_sound = (
        0 <= value.temperature < math.inf
        and 0 < value.top_p <= 1
        and value.num_samples
        and value.max_new_tokens
        and math.isfinite(value.pass_reward)
    )
    if not is_sound:
        raise InvalidRequest(f"draws: {value} cannot be drawn")
    return value


def sets_to_pb(values: Sequence[EvaluationSet]) -> list[evaluation_pb2.EvaluationSet]:
    return [
        evaluation_pb2.EvaluationSet(name=each.name, task_digest=each.task_digest, num_prompts=each.num_prompts)
        for each in values
    ]


def sets_from_pb(messages: Sequence[evaluation_pb2.EvaluationSet]) -> tuple[EvaluationSet, ...]:
    return tuple(
        EvaluationSet(name=each.name, task_digest=Digest(each.task_digest), num_prompts=each.num_prompts)
        for each in messages
    )


def spec_to_pb(value: EvaluationSpec) -> evaluation_pb2.EvaluationSpec:
    return evaluation_pb2.EvaluationSpec(
        task_set=value.task_set, version=value.version, state_root=value.state_root, draws=draws_to_pb(value.draws)
    )


def spec_from_pb(message: evaluation_pb2.EvaluationSpec) -> EvaluationSpec:
    """Convert what held-out prompts are drawn with.

    Raises:
        InvalidRequest: they cannot be drawn.
    """
    return EvaluationSpec(
        task_set=message.task_set,
        version=message.version,
        state_root=Digest(message.state_root),
        draws=draws_from_pb(message.draws),
    )


def results_to_pb(values: Sequence[PromptResult]) -> list[evaluation_pb2.PromptResult]:
    """Convert results; texts are cut."""
    return [
        evaluation_pb2.PromptResult(
            prompt_index=value.prompt_index,
            samples=[
                evaluation_pb2.ScoredSample(
                    reward=sample.reward,
                    num_tokens=sample.num_tokens,
                    is_truncated=sample.is_truncated,
                    text=_cut(sample.text),
                )
                for sample in value.samples
            ],
            prompt=_cut(value.prompt),
            answer=_cut(value.answer),
            assignment=value.assignment,
        )
        for value in values
    ]


def results_from_pb(messages: Sequence[evaluation_pb2.PromptResult]) -> tuple[PromptResult, ...]:
    """Convert results.

    Raises:
        InvalidRequest: a reward is not a number.
    """
    return tuple(
        PromptResult(
            prompt_index=message.prompt_index,
            samples=tuple(_sample(message.prompt_index, sample) for sample in message.samples),
            prompt=message.prompt,
            answer=message.answer,
            assignment=min(message.assignment, MAX_INT64),
        )
        for message in messages
    )


def evaluation_to_pb(value: Evaluation) -> evaluation_pb2.Evaluation:
    summary = value.summary
    return evaluation_pb2.Evaluation(
        version=value.version,
        task_set=value.task_set,
        state=_STATE[value.state],
        num_wanted=value.num_wanted,
        num_prompts=summary.num_prompts,
        draws=draws_to_pb(value.draws),
        task_digest=value.task_digest,
        num_samples=summary.num_samples,
        num_errors=summary.num_errors,
        num_truncated=summary.num_truncated,
        mean_tokens=summary.mean_tokens,
        average=None if summary.average is None else _estimate_to_pb(summary.average),
        passes=[
            evaluation_pb2.PassEstimate(k=entry.k, estimate=_estimate_to_pb(entry.estimate)) for entry in summary.passes
        ],
        sites=[evaluation_pb2.SiteShare(site=site, num_prompts=count) for site, count in value.sites],
        planned_time=value.planned_time,
        ended_time=value.ended_time,
    )


def evaluation_from_pb(message: evaluation_pb2.Evaluation) -> Evaluation:
    """Convert an evaluation.

    Raises:
        InvalidRequest: its state is not stated, or its draws cannot be.
    """
    state = _STATE_OF.get(message.state)
    if state is None:
        raise InvalidRequest("evaluation.state: not stated")
    summary = EvaluationSummary(
        num_prompts=message.num_prompts,
        num_samples=message.num_samples,
        num_errors=message.num_errors,
        num_truncated=message.num_truncated,
        mean_tokens=message.mean_tokens,
        average=_estimate_from_pb(message.average) if message.HasField("average") else None,
        passes=tuple(PassEstimate(k=entry.k, estimate=_estimate_from_pb(entry.estimate)) for entry in message.passes),
    )
    return Evaluation(
        version=message.version,
        task_set=message.task_set,
        state=state,
        num_wanted=message.num_wanted,
        draws=draws_from_pb(message.draws),
        task_digest=message.task_digest,
        summary=summary,
        sites=tuple((SiteId(share.site), share.num_prompts) for share in message.sites),
        planned_time=message.planned_time,
        ended_time=message.ended_time,
    )


def _cut(text: str) -> str:
    # Half a surrogate pair, which a tokenizer may decode to, is no text on the wire.
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


def _sample(index: int, message: evaluation_pb2.ScoredSample) -> ScoredSample:
    reward = message.reward if message.HasField("reward") else None
    if reward is not None and not abs(reward) <= MAX_REWARD:
        raise InvalidRequest(f"results: a reward of prompt {index} is not a number of at most {MAX_REWARD:g}")
    return ScoredSample(
        reward=reward, num_tokens=message.num_tokens, is_truncated=message.is_truncated, text=message.text
    )


def _estimate_to_pb(value: Estimate) -> evaluation_pb2.Estimate:
    return evaluation_pb2.Estimate(**{name: getattr(value, name) for name in Estimate.__slots__})


def _estimate_from_pb(message: evaluation_pb2.Estimate) -> Estimate:
    return Estimate(**{name: getattr(message, name) for name in Estimate.__slots__})
