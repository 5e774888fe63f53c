"""An evaluation of a version as a coordinator lists it."""

from __future__ import annotations

from heterorl.common.types.evaluation import (
    Estimate,
    Evaluation,
    EvaluationDraws,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
)

OPEN, RUNNING, DONE = EvaluationState.OPEN, EvaluationState.RUNNING, EvaluationState.DONE
DRAWS = EvaluationDraws(num_prompts=2, num_samples=4, temperature=0.6, max_new_tokens=8)


def evaluation(
    version: int, state: EvaluationState = DONE, task_set: str = "math", average: Estimate | None = None
) -> Evaluation:
    """Two prompts, each drawn four times."""
    passes = () if average is None else (PassEstimate(k=4, estimate=average),)
    summary = EvaluationSummary(
        num_prompts=2, num_samples=8, num_errors=1, num_truncated=2, mean_tokens=3.5, average=average, passes=passes
    )
    return Evaluation(
        version=version, task_set=task_set, state=state, num_wanted=2, draws=DRAWS, task_digest="d" * 64,
        summary=summary, sites=(), planned_time=1.0, ended_time=0.0 if state in (OPEN, RUNNING) else 2.0,
    )  # fmt: skip
