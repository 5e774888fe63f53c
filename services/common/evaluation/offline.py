"""Evaluates a set with an engine that has nothing else under way, in the caller's thread.

Guarantees: the engine always has a little more than it computes at once, and no more; rewards are computed beside
generation by as many processes as the task has; a reward that fails is counted and left out, and so are the completions
of a prompt that the template or the engine refuses.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from heterorl.common.errors import EngineError, PromptRefused, RewardError
from heterorl.common.evaluation.draft import PromptDraft
from heterorl.common.evaluation.draws import Block, blocks_of, request_of
from heterorl.common.generation.engine import Engine
from heterorl.common.generation.requests import Completion, Finished, Request
from heterorl.common.tasks.task import Prompt, Task, check_answer
from heterorl.common.text.prompts import Prompter
from heterorl.common.types.evaluation import EvaluationDraws, PromptResult
from heterorl.common.types.rollout import total_reward

_LOG = logging.getLogger(__name__)
_Scored = tuple[PromptDraft, int, Completion, str]


def evaluate_set(
    engine: Engine,
    *,
    task: Task,
    prompter: Prompter,
    draws: EvaluationDraws,
    indices: Sequence[int],
    on_prompt: Callable[[PromptResult], None] = lambda _: None,
) -> list[PromptResult]:
    """Draw and score held-out prompts with the weights that the engine has.

    Args:
        engine: nothing is under way in it.
        task: whose held-out prompts these are.
        prompter: from texts to tokens and back.
        draws: how they are drawn.
        indices: of the prompts.
        on_prompt: called as each prompt is done, in the order in which they are.

    Raises:
        PromptRefused: all of the prompts are refused.
        EngineError: not all of them ended.
    """
    waiting = _requests(task, prompter, draws, indices)
    num_workers = max(1, int(getattr(task, "num_workers", 1)))
    under_way: dict[int, tuple[PromptDraft, Block, int]] = {}
    scoring: dict[Future[float | None], _Scored] = {}
    results: list[PromptResult] = []
    refused: dict[int, PromptRefused] = {}
    with ThreadPoolExecutor(num_workers, thread_name_prefix="reward") as threads:
        try:
            while True:
                for draft, error in _fill(engine, waiting, under_way):
                    if draft.prompt_index not in refused:
                        _LOG.warning("held-out prompt %d cannot be drawn: %s", draft.prompt_index, error)
                        refused[draft.prompt_index] = error
                        results.append(draft.refused())
                        on_prompt(results[-1])
                if under_way:
                    for draft, number, completion in _collected(engine, under_way):
                        text = prompter.decode(completion.token_ids)
                        future = threads.submit(_reward, task, draft.prompt, text)
                        scoring[future] = (draft, number, completion, text)
                elif not scoring:
                    if refused and len(refused) == len(results):
                        raise next(iter(refused.values()))
                    return sorted(results, key=lambda result: result.prompt_index)
                done = {future for future in scoring if future.done()}
                if not done and not under_way:
                    done = wait(scoring, return_when=FIRST_COMPLETED).done
                for future in done:
                    draft, number, completion, text = scoring.pop(future)
                    draft.note(number, completion, text=text, reward=future.result())
                    if draft.is_whole:
                        results.append(draft.result())
                        on_prompt(results[-1])
        except BaseException:
            engine.cancel()
            for future in scoring:
                future.cancel()
            raise


def _requests(
    task: Task, prompter: Prompter, draws: EvaluationDraws, indices: Sequence[int]
) -> Iterator[tuple[PromptDraft, Block, Request] | tuple[PromptDraft, PromptRefused]]:
    keys = itertools.count()
    for index in indices:
        prompt = task.evaluation_prompt(index)
        draft = PromptDraft(prompt_index=index, prompt=prompt, num_samples=draws.num_samples)
        try:
            check_answer(task, prompt)
            ids = prompter.encode_prompt(prompt)
        except PromptRefused as error:
            yield draft, error
            continue
        for block in blocks_of(draws):
            yield draft, block, request_of(draws, block, key=next(keys), prompt_index=index, prompt=ids)


def _fill(
    engine: Engine,
    waiting: Iterator[tuple[PromptDraft, Block, Request] | tuple[PromptDraft, PromptRefused]],
    under_way: dict[int, tuple[PromptDraft, Block, int]],
) -> list[tuple[PromptDraft, PromptRefused]]:
    """Ask the engine for as much as it has room for; the prompts that were refused."""
    refused: list[tuple[PromptDraft, PromptRefused]] = []
    limit = engine.max_running + max(1, engine.max_running // 4)
    while sum(left for _, _, left in under_way.values()) < limit:
        following = next(waiting, None)
        if following is None:
            break
        if len(following) == 2:
            refused.append(following)
            continue
        draft, block, request = following
        try:
            engine.submit(request)
        except PromptRefused as error:
            refused.append((draft, error))
        else:
            under_way[request.key] = (draft, block, block.count)
    return refused


def _collected(
    engine: Engine, under_way: dict[int, tuple[PromptDraft, Block, int]]
) -> Iterator[tuple[PromptDraft, int, Completion]]:
    ended = engine.collect()
    if not ended:
        raise EngineError("what was being generated was given up")
    for one in ended:
        if not isinstance(one, Finished):
            raise EngineError("an engine gave up what it was generating")
        draft, block, left = under_way[one.key]
        if left == 1:
            del under_way[one.key]
        else:
            under_way[one.key] = (draft, block, left - 1)
        yield draft, block.first + one.member, one.completion


def _reward(task: Task, prompt: Prompt, text: str) -> float | None:
    try:
        return total_reward(task.score(prompt, text))
    except RewardError as error:
        _LOG.warning("held-out prompt %d could not be scored: %s", prompt.index, error)
        return None
