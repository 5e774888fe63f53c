"""Protobuf <-> evaluations: draws of held-out prompts, results, a version's evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import SiteId
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
from heterorl.common.wire.common_messages import MAX_INT64, to_message, to_value
from heterorl.v1 import evaluation_pb2

_STATE = {state: evaluation_pb2.EvaluationState.Value(f"EVALUATION_STATE_{state.name}") for state in EvaluationState}
_STATE_OF = {pb: value for value, pb in _STATE.items()}


def draws_to_pb(value: EvaluationDraws) -> evaluation_pb2.EvaluationDraws:
    return to_message(evaluation_pb2.EvaluationDraws, value)


def draws_from_pb(message: evaluation_pb2.EvaluationDraws) -> EvaluationDraws:
    """Convert draws; raises InvalidRequest if a number is out of bounds."""
    value = to_value(EvaluationDraws, message)
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
    return [to_message(evaluation_pb2.EvaluationSet, each) for each in values]


def sets_from_pb(messages: Sequence[evaluation_pb2.EvaluationSet]) -> tuple[EvaluationSet, ...]:
    return tuple(to_value(EvaluationSet, each) for each in messages)


def spec_to_pb(value: EvaluationSpec) -> evaluation_pb2.EvaluationSpec:
    return to_message(evaluation_pb2.EvaluationSpec, value, draws=draws_to_pb(value.draws))


def spec_from_pb(message: evaluation_pb2.EvaluationSpec) -> EvaluationSpec:
    """Convert the spec of held-out prompts; raises InvalidRequest if the draws are invalid."""
    return to_value(EvaluationSpec, message, draws=draws_from_pb(message.draws))


def results_to_pb(values: Sequence[PromptResult]) -> list[evaluation_pb2.PromptResult]:
    """Convert results; texts are cut to MAX_TEXT."""
    return [
        to_message(
            evaluation_pb2.PromptResult,
            value,
            samples=[
                to_message(evaluation_pb2.ScoredSample, sample, text=_cut(sample.text)) for sample in value.samples
            ],
            prompt=_cut(value.prompt),
            answer=_cut(value.answer),
        )
        for value in values
    ]


def results_from_pb(messages: Sequence[evaluation_pb2.PromptResult]) -> tuple[PromptResult, ...]:
    """Convert results; raises InvalidRequest if a reward is not a number."""
    return tuple(
        to_value(
            PromptResult,
            message,
            samples=tuple(_sample(message.prompt_index, sample) for sample in message.samples),
            assignment=min(message.assignment, MAX_INT64),
        )
        for message in messages
    )


def evaluation_to_pb(value: Evaluation) -> evaluation_pb2.Evaluation:
    summary = value.summary
    message = to_message(
        evaluation_pb2.Evaluation,
        value,
        without={"summary"},
        state=_STATE[value.state],
        draws=draws_to_pb(value.draws),
        average=None if summary.average is None else to_message(evaluation_pb2.Estimate, summary.average),
        passes=[
            evaluation_pb2.PassEstimate(k=entry.k, estimate=to_message(evaluation_pb2.Estimate, entry.estimate))
            for entry in summary.passes
        ],
        sites=[evaluation_pb2.SiteShare(site=site, num_prompts=count) for site, count in value.sites],
    )
    message.MergeFrom(to_message(evaluation_pb2.Evaluation, summary, without={"average", "passes"}))
    return message


def evaluation_from_pb(message: evaluation_pb2.Evaluation) -> Evaluation:
    """Convert an evaluation; raises InvalidRequest if its state is not stated, or its draws are invalid."""
    state = _STATE_OF.get(message.state)
    if state is None:
        raise InvalidRequest("evaluation.state: not stated")
    summary = to_value(
        EvaluationSummary,
        message,
        average=to_value(Estimate, message.average) if message.HasField("average") else None,
        passes=tuple(PassEstimate(k=entry.k, estimate=to_value(Estimate, entry.estimate)) for entry in message.passes),
    )
    return to_value(
        Evaluation,
        message,
        state=state,
        draws=draws_from_pb(message.draws),
        summary=summary,
        sites=tuple((SiteId(share.site), share.num_prompts) for share in message.sites),
    )


def _cut(text: str) -> str:
    # A tokenizer may decode to a lone surrogate, which has no UTF-8.
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


def _sample(index: int, message: evaluation_pb2.ScoredSample) -> ScoredSample:
    sample = to_value(ScoredSample, message)
    if sample.reward is not None and not abs(sample.reward) <= MAX_REWARD:
        raise InvalidRequest(f"results: a reward of prompt {index} is not a number of at most {MAX_REWARD:g}")
    return sample
