"""Evaluates a set with an engine that has nothing else under way, as sites evaluate it in a run.

    evaluated  waits for its place among those under way, then for its completions and their rewards
    collect    waits for a completion that ends; unblocked by the engine

Guarantees: the engine always has a little more than it computes at once, and no more; rewards are computed beside
generation by as many processes as the task has; a reward that fails is counted and left out, and so are the completions
of a prompt that the template or the engine refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from heterorl.common.generation.engine import Engine
from heterorl.common.process.clock import Bell, SystemClock
from heterorl.common.text.prompts import Prompter
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.evaluation import EvaluationDraws, EvaluationSpec, PromptResult
from heterorl.common.types.rollout import WorkAssignment
from heterorl.sampler.evaluation.drawing import Drawing
from heterorl.sampler.evaluation.sets import SiteSet
from heterorl.sampler.rollout.held_out import HeldOut
from heterorl.sampler.rollout.maker import RolloutMaker


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
    """Draw and score held-out prompts with the weights that the engine has.

    Args:
        engine: nothing is under way in it.
        of: the set whose held-out prompts these are.
        prompter: from texts to tokens and back.
        draws: how they are drawn.
        indices: of the prompts.
        max_trajectory_tokens: of a completion of several turns, drawn and given.
        on_prompt: called as each prompt is done, in the order in which they are.

    Raises:
        PromptRefused: all of the prompts are refused.
        ConfigError: the engine has no room for such completions.
        EngineError: not all of them ended.
    """
    try:
        return asyncio.run(_evaluate(engine, of, prompter, draws, indices, max_trajectory_tokens, on_prompt))
    except BaseException:
        # What threads had not submitted yet when it failed.
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
    news, held_out = Bell(), HeldOut()
    maker = RolloutMaker(
        task=of.task, prompter=prompter, site=SiteId(""), incarnation="", group_size=1, clock=SystemClock()
    )
    drawing = Drawing(
        engine=engine, held_out=held_out, maker=maker, share=1.0, max_trajectory_tokens=max_trajectory_tokens, news=news
    )
    spec = EvaluationSpec(task_set=of.name, version=engine.version, state_root=Digest(""), draws=draws)
    places = asyncio.Semaphore(drawing.num_rows)

    async def evaluated(index: int) -> PromptResult:
        assignment = WorkAssignment(id=0, prompt_index=index, seed=draws.seed, lease_s=0.0)
        async with places:
            result = await drawing.result(spec, of, assignment)
        on_prompt(result)
        return result

    collecting = asyncio.ensure_future(_collect(engine, held_out, news))
    evaluating = asyncio.gather(*map(evaluated, indices))
    try:
        await asyncio.wait([collecting, evaluating], return_when=asyncio.FIRST_COMPLETED)
        results = await (collecting if collecting.done() else evaluating)
    finally:
        collecting.cancel()
        evaluating.cancel()
        # A thread that waits for the engine would hold the end of the loop.
        engine.cancel()
        drawing.close()
    if results and len(drawing.refused) == len(results):
        raise next(iter(drawing.refused.values()))
    return results


async def _collect(engine: Engine, held_out: HeldOut, news: Bell) -> list[PromptResult]:
    """Hand over what ends, until cancelled.

    Raises:
        EngineError: everything under way is given up.
    """
    while True:
        ticket = news.ticket()
        ended = await asyncio.to_thread(engine.collect) if held_out.num_running else ()
        for one in ended:
            held_out.take(one)
        if ended:
            news.ring()
        else:
            await ticket.wait()
