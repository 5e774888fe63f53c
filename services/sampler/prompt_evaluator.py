"""Evaluation of held-out prompts in a share of the engine's rows.

Rollouts go on meanwhile. A completion of another version than the evaluated one is never scored. A request that the
engine lost raises an error. A member that its environment loses has no reward. Requests depend only on the set's draws
and the prompt's index, so versions compare and every site draws the same.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from heterorl.common.errors import ConfigError, EngineError, PromptRefused, RewardError
from heterorl.common.evaluation.evaluation_sets import EvaluationSetConfig
from heterorl.common.generation.inference_engine import Completion, Engine, Finished, Request
from heterorl.common.process.clock import Bell
from heterorl.common.tasks.task import Measure, Prompt, Task, check_answer
from heterorl.common.tasks.task_config import build_task
from heterorl.common.text.conversation import Conversations, open_conversations
from heterorl.common.text.prompter import Prompter
from heterorl.common.text.token_text import TokenTexts
from heterorl.common.types.evaluation import EvaluationDraws, EvaluationSet, EvaluationSpec, PromptResult, ScoredSample
from heterorl.common.types.rollout import FinishReason, Span, WorkAssignment, total_reward
from heterorl.common.types.sample import shown_answer
from heterorl.sampler.rollout.episode_runner import EpisodeRunner, Turn
from heterorl.sampler.rollout.group_builder import GroupBuilder
from heterorl.sampler.rollout.in_flight_groups import EvaluationRequests, GroupDraft
from heterorl.sampler.sampler_config import with_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSet:
    """An evaluation set and its task."""

    name: str
    task: Task
    conversations: Conversations | None = None
    """Environments of the task; None if no prompt has one."""
    draws: EvaluationDraws
    """Draws that this site states, of at most its prompts; for `heterorl evaluate`."""

    def played(self, prompter: Prompter) -> Self:
        """The set with its environments, after a trial.

        Raises ConfigError: an environment fails, or the template does not write what it says.
        """
        return replace(self, conversations=open_conversations(self.task, prompter))

    @property
    def stated(self) -> EvaluationSet:
        return EvaluationSet(name=self.name, task_digest=self.task.digest, num_prompts=self.task.num_evaluation_prompts)


@contextmanager
def naming_set(name: str) -> Iterator[None]:
    """Name the set in errors."""
    try:
        yield
    except ConfigError as error:
        problem = str(error.args[0]).removeprefix(f"{error.key}: ")
        raise error.within(f"evaluation.{name}.{error.key}", problem, action=error.action) from error


def open_set(config: EvaluationSetConfig, *, measure: Measure | None, every_row: bool = False) -> SiteSet:
    """Load a set's task, with `every_row` of its dataset.

    Raises ConfigError: its data cannot be read, or has no held-out prompts.
    """
    task = build_task(with_workers(config.task), measure=measure, every_row=every_row)
    if not task.num_evaluation_prompts:
        action = "set evaluation_size, evaluation_path or evaluation_split in its data"
        raise ConfigError("task", "has no held-out prompts", action=action)
    draws = replace(config.draws, num_prompts=min(config.num_prompts, task.num_evaluation_prompts))
    return SiteSet(name=config.name, task=task, draws=draws)


BLOCK = 8
"""Completions of one request, so that a small engine need not hold all completions of a prompt."""
MAX_FAILURES = 3
"""Ends of engine or process in a row after which this site stops drawing the prompt."""


def blocks_of(draws: EvaluationDraws) -> Iterator[range]:
    """Numbers of the completions of each request of one prompt."""
    for first in range(0, draws.num_samples, BLOCK):
        yield range(first, min(first + BLOCK, draws.num_samples))


def seed_of(draws: EvaluationDraws, *, prompt_index: int, first: int) -> int:
    """63-bit seed of a block; close seeds of sets share no stream."""
    name = f"evaluation/{draws.seed}/{prompt_index}/{first}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_CUT = (FinishReason.LENGTH, FinishReason.CONTEXT)
_UNSCORED = ScoredSample(reward=None, num_tokens=0, is_truncated=False)


@dataclass(kw_only=True, eq=False, repr=False)
class PromptEvaluator:
    """Turns held-out prompts into results, in a `share` of the engine's rows.

    A share of 1 means all rows and a quarter more, so that the engine never idles. `max_trajectory_tokens` bounds drawn
    and given tokens of a completion of several turns. `news` rings at every event of the engine.
    """

    engine: Engine
    evaluation_requests: EvaluationRequests
    builder: GroupBuilder
    share: float
    max_trajectory_tokens: int
    news: Bell

    def __post_init__(self) -> None:
        self.refused: dict[tuple[str, int], PromptRefused] = {}
        """Prompts that cannot be drawn, by set and index."""
        self.failures: Counter[tuple[str, int]] = Counter()
        """Failures of engine or process since a prompt last ended, by set and index."""
        rows = self.engine.max_running
        self.num_rows = rows + rows // 4 if self.share >= 1 else max(1, int(rows * self.share))
        """Most completions in the engine at once; a single request may be larger."""
        prompter = self.builder.prompter
        raw = functools.partial(prompter.decode, keeps_special=True)
        self._texts = TokenTexts(decode=prompter.decode, decode_given=raw)
        # One thread: a prompt may begin an episode, and wait until a live one ends.
        self._prompts = ThreadPoolExecutor(1, thread_name_prefix="prompt")
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._runners: dict[tuple[str, int], EpisodeRunner] = {}

    async def result(self, spec: EvaluationSpec, of: SiteSet, assignment: WorkAssignment) -> PromptResult:
        """Draw and score a prompt; a refused prompt's completions have no reward.

        Raises ConfigError: the engine has no room for such completions; EngineError: the engine lost a completion, or
        drew with another version.
        """
        index = assignment.prompt_index
        prompt = await asyncio.get_running_loop().run_in_executor(self._prompts, of.task.evaluation_prompt, index)
        samples: dict[int, ScoredSample] = {}
        try:
            draft = await asyncio.to_thread(self._draft, spec, of, prompt, assignment)
            try:
                await _together(self._block(spec, of, draft, block, samples) for block in blocks_of(spec.draws))
            finally:
                for runner in self._runners.values():
                    runner.drop(draft.key)
            self.refused.pop((of.name, index), None)
            self.failures.pop((of.name, index), None)
        except PromptRefused as error:
            if (of.name, index) not in self.refused:
                _LOG.warning("held-out prompt %d cannot be drawn and stays without a score: %s", index, error)
            self.refused[of.name, index] = error
            samples = dict.fromkeys(range(spec.draws.num_samples), _UNSCORED)
        return PromptResult(
            prompt_index=index,
            samples=tuple(samples[number] for number in range(spec.draws.num_samples)),
            prompt=prompt.shown,
            answer=shown_answer(prompt.answer),
            assignment=assignment.id,
        )

    def close(self) -> None:
        for threads in (self._prompts, *self._threads.values()):
            threads.shutdown(wait=False, cancel_futures=True)
        for runner in self._runners.values():
            runner.close()

    def _draft(self, spec: EvaluationSpec, of: SiteSet, prompt: Prompt, assignment: WorkAssignment) -> GroupDraft:
        if self.failures[of.name, prompt.index] >= MAX_FAILURES:
            raise PromptRefused(
                f"evaluation.{of.name}.task", f"engine or process ended {MAX_FAILURES} times as it drew it"
            )
        check_answer(of.task, prompt)
        seed = seed_of(spec.draws, prompt_index=assignment.prompt_index, first=0)
        return self.builder.draft(
            prompt, of.conversations, assignment, seed=seed, version=spec.version, source="evaluation",
            begun_at=math.inf,
        )  # fmt: skip

    async def _block(
        self, spec: EvaluationSpec, of: SiteSet, draft: GroupDraft, block: range, samples: dict[int, ScoredSample]
    ) -> None:
        key, index = next(self.builder.keys), draft.assignment.prompt_index
        # Its episodes have their own time: the blocks before it had the rows of the engine.
        draft = replace(draft, begun_at=math.inf)
        request = Request(
            key=key,
            prompt=draft.prompt_token_ids,
            seed=seed_of(spec.draws, prompt_index=index, first=block.start),
            num_completions=len(block),
            sampling=spec.draws.sampling,
            may_continue=draft.conversation is not None,
        )
        drawn = await self._drawn(spec, draft, request)
        if draft.conversation is not None:
            await _together(
                self._play(spec, of, draft, block.start + one.member, one.completion, samples) for one in drawn
            )
            return
        for one in drawn:
            text, reward = await self._in_thread(of, self._score, of, draft.prompt, one.completion)
            samples[block.start + one.member] = _scored(one.completion, text, reward)

    async def _play(
        self,
        spec: EvaluationSpec,
        of: SiteSet,
        draft: GroupDraft,
        number: int,
        completion: Completion,
        samples: dict[int, ScoredSample],
    ) -> None:
        """Play a completion through its environment, from its first turn."""
        runner = self._runner(spec, of)
        came = await runner.play(draft, number, completion)
        while isinstance(came, Turn):
            request = Request(
                key=next(self.builder.keys), prompt=came.context, seed=came.seed, num_completions=1,
                sampling=spec.draws.sampling, first_member=number, may_continue=True,
            )  # fmt: skip
            try:
                (one,) = await self._drawn(spec, draft, request)
            except PromptRefused:
                came = await runner.end(draft, number, FinishReason.CONTEXT)
            else:
                came = await runner.play(draft, number, one.completion)
        is_lost = not came.completion.finish_reason.is_trainable
        text = await self._in_thread(of, self._read, came.completion)
        samples[number] = _scored(came.completion, text, None if is_lost else total_reward(came.parts))

    def _runner(self, spec: EvaluationSpec, of: SiteSet) -> EpisodeRunner:
        assert of.conversations is not None, "the prompt has an environment"
        name = of.name, spec.draws.max_new_tokens
        if name not in self._runners:
            self._runners[name] = EpisodeRunner(
                max_live=of.conversations.max_live, max_new_tokens=spec.draws.max_new_tokens,
                max_trajectory_tokens=self.max_trajectory_tokens, clock=self.builder.clock,
            )  # fmt: skip
        return self._runners[name]

    async def _drawn(self, spec: EvaluationSpec, draft: GroupDraft, request: Request) -> list[Finished]:
        count, evaluation_requests = request.num_completions, self.evaluation_requests
        while evaluation_requests.num_running and evaluation_requests.num_running + count > self.num_rows:
            await self.news.ticket().wait()
        draft.begun_at = min(draft.begun_at, self.builder.clock.monotonic())
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ended: list[Finished] = []

        def on_end(one: Finished | None) -> None:
            if one is not None:
                ended.append(one)
            if done.done():
                return
            if one is None or len(ended) == count:
                done.set_result(one is not None)

        evaluation_requests.longest = max(evaluation_requests.longest, spec.draws.max_new_tokens)
        evaluation_requests.add(request.key, count, on_end)
        # The thread cannot be cancelled: its callback still notes whether the engine took the request.
        submitting = asyncio.ensure_future(asyncio.to_thread(self.engine.submit, request))
        submitting.add_done_callback(lambda found: self._note_submitted(request, found))
        await asyncio.shield(submitting)
        self.news.ring()
        if not await done:
            raise EngineError("the engine lost what was evaluated")
        return [replace(one, completion=_of_version(spec.version, one.completion)) for one in ended]

    def _note_submitted(self, request: Request, found: asyncio.Future[None]) -> None:
        if found.cancelled() or found.exception() is not None:
            self.evaluation_requests.drop(request.key)
            # Requests wait for its rows.
            self.news.ring()

    async def _in_thread(self, of: SiteSet, function: Callable[..., _T], *arguments: Any) -> _T:
        threads = self._threads.get(of.name)
        if threads is None:
            num_workers = max(1, of.task.num_workers)
            threads = self._threads[of.name] = ThreadPoolExecutor(num_workers, thread_name_prefix="evaluate")
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)

    def _read(self, completion: Completion) -> str:
        with self.builder.lock:
            return self._texts.read(completion.token_ids, completion.spans)[0]

    def _score(self, of: SiteSet, prompt: Prompt, completion: Completion) -> tuple[str, float | None]:
        with self.builder.lock:
            text = self.builder.prompter.completion(completion.token_ids, prompt)
        try:
            return text, total_reward(of.task.score(prompt, text))
        except RewardError as error:
            _LOG.warning(
                "held-out prompt %d could not be scored, it counts as an error and not as wrong: %s",
                prompt.index, error,
            )  # fmt: skip
            return text, None


def _scored(completion: Completion, text: str, reward: float | None) -> ScoredSample:
    """A completion with its reward; None if it could not be computed."""
    return ScoredSample(
        reward=None if reward is None or math.isnan(reward) else reward,
        num_tokens=sum(span.end - span.start for span in completion.spans if span.is_drawn),
        is_truncated=completion.finish_reason in _CUT,
        text=text,
    )


def _of_version(version: int, completion: Completion) -> Completion:
    """The completion as one span of `version`; model files count as 0.

    Raises EngineError: another version drew some of it.
    """
    drawn_by = {span.version for span in completion.spans}
    if version >= 0 and drawn_by != {version}:
        raise EngineError(f"held-out completions of version {version} were drawn by {sorted(drawn_by)}")
    return replace(completion, spans=(Span(version=max(0, version), start=0, end=completion.token_ids.size),))


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
