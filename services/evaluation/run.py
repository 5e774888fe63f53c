"""Evaluates every set on every subject, with a bar for people; the outcome is rows for `view`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from heterorl.common.evaluation.summary import summarize
from heterorl.common.text.conversation import try_reward
from heterorl.common.types.evaluation import EvaluationSummary, PromptResult
from heterorl.evaluation.offline import evaluate_set
from heterorl.evaluation.sets import OpenSet
from heterorl.evaluation.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One subject on one set."""

    subject: str
    version: int
    set: OpenSet
    summary: EvaluationSummary
    seconds: float
    results: tuple[PromptResult, ...]


def evaluate_all(
    subjects: Iterable[Subject],
    sets: Sequence[OpenSet],
    *,
    on_begin: Callable[[str, OpenSet], None],
    on_prompt: Callable[[PromptResult], None],
) -> list[Row]:
    """Draw and score every set with every subject, one after another.

    Args:
        subjects: each is used before the next one is asked for.
        sets: loaded.
        on_begin: called with the subject's name and the set.
        on_prompt: called as each prompt is done.

    Raises:
        ConfigError: a reward or an environment fails here, or no prompt of a set can be drawn.
        EngineError: an engine gave up.
    """
    rows = []
    for number, subject in enumerate(subjects):
        if not number:
            sets = [one.played(subject.prompter, subject.end_token_ids) for one in sets]
            for one in sets:
                try_reward(one.task, subject.prompter)
        for one in sets:
            on_begin(subject.name, one)
            started = time.perf_counter()
            results = evaluate_set(
                subject.engine,
                of=one,
                prompter=subject.prompter,
                draws=one.draws,
                indices=range(one.draws.num_prompts),
                max_trajectory_tokens=subject.max_trajectory_tokens,
                on_prompt=on_prompt,
            )
            rows.append(
                Row(
                    subject=subject.name,
                    version=subject.version,
                    set=one,
                    summary=summarize(results, num_samples=one.draws.num_samples, pass_reward=one.draws.pass_reward),
                    seconds=time.perf_counter() - started,
                    results=tuple(results),
                )
            )
    return rows
