"""Evaluates sets on subjects with an idle engine, by the same code as sites in a run.

The engine always has a little more than it computes at once. As many processes as the task has compute rewards during
generation. A reward that fails is counted and left out, as are completions of a refused prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from heterorl.common.evaluation.summary import summarize
from heterorl.common.generation.inference_engine import Engine
from heterorl.common.process.clock import Bell, SystemClock
from heterorl.common.text.conversation import try_reward
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.evaluation import EvaluationDraws, EvaluationSpec, EvaluationSummary, PromptResult
from heterorl.common.types.rollout import WorkAssignment
from heterorl.evaluation.subject import OpenSet, Subject
from heterorl.sampler.prompt_evaluator import PromptEvaluator, SiteSet
from heterorl.sampler.rollout.group_builder import GroupBuilder
from heterorl.sampler.rollout.in_flight_groups import EvaluationRequests


def evaluate_set(
    engine: Engine,
    *,
    of: SiteSet,
    prompter: Prompter,
    draws: EvaluationDraws,
    indices: Sequence[int],
    max_trajectory_tokens: int,
    on_prompt: Callable[[PromptResult], None] = lambda _: None,
) -> list[PromptResult]:
    """Draw and score held-out prompts with the engine's weights; nothing else may be in flight in it.

    `on_prompt` is called as each prompt ends, in that order.

    Raises:
        PromptRefused: all of the prompts are refused.
        ConfigError: the engine has no room for such completions.
        EngineError: not all completions ended.
    """
    try:
        return asyncio.run(_evaluate(engine, of, prompter, draws, indices, max_trajectory_tokens, on_prompt))
    except BaseException:
        # For requests that threads had not submitted at the failure.
        engine.cancel()
        raise


async def _evaluate(
    engine: Engine,
    of: SiteSet,
    prompter: Prompter,
    draws: EvaluationDraws,
    indices: Sequence[int],
    max_trajectory_tokens: int,
    on_prompt: Callable[[PromptResult], None],
) -> list[PromptResult]:
    news, evaluation_requests = Bell(), EvaluationRequests()
    builder = GroupBuilder(
        task=of.task, prompter=prompter, site=SiteId(""), incarnation="", group_size=1, clock=SystemClock()
    )
    evaluator = PromptEvaluator(
        engine=engine,
        evaluation_requests=evaluation_requests,
        builder=builder,
        share=1.0,
        max_trajectory_tokens=max_trajectory_tokens,
        news=news,
    )
    spec = EvaluationSpec(task_set=of.name, version=engine.version, state_root=Digest(""), draws=draws)
    places = asyncio.Semaphore(evaluator.num_rows)

    async def evaluated(index: int) -> PromptResult:
        assignment = WorkAssignment(id=0, prompt_index=index, seed=draws.seed, lease_s=0.0)
        async with places:
            result = await evaluator.result(spec, of, assignment)
        on_prompt(result)
        return result

    collecting = asyncio.ensure_future(_collect(engine, evaluation_requests, news))
    evaluating = asyncio.gather(*map(evaluated, indices))
    try:
        await asyncio.wait([collecting, evaluating], return_when=asyncio.FIRST_COMPLETED)
        results = await (collecting if collecting.done() else evaluating)
    finally:
        collecting.cancel()
        evaluating.cancel()
        # A thread that waits for the engine would delay the end of the loop.
        engine.cancel()
        evaluator.close()
    if results and len(evaluator.refused) == len(results):
        raise next(iter(evaluator.refused.values()))
    return results


async def _collect(engine: Engine, evaluation_requests: EvaluationRequests, news: Bell) -> list[PromptResult]:
    """Hand over what ends, until cancelled.

    Raises:
        EngineError: the engine failed.
    """
    while True:
        ticket = news.ticket()
        ended = await asyncio.to_thread(engine.collect) if evaluation_requests.num_running else ()
        for one in ended:
            evaluation_requests.take(one)
        if ended:
            news.ring()
        else:
            await ticket.wait()


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
    """Draw and score every set with every subject, one after another; a subject is used before the next one is taken.

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
