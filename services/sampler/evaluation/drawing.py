"""Draws and scores parts of a set with the engine that rollouts use, in a share of its rows.

    draw   waits for rows of the share, then for its completions; unblocked by the engine
    score  waits for a process that computes rewards; unblocked by it, and by its time limit

Guarantees: a completion of another version than the part's is never scored; what the engine lost is said, not counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from heterorl.common.errors import EngineError, PromptRefused, RewardError
from heterorl.common.evaluation.draft import PromptDraft
from heterorl.common.evaluation.draws import Block, blocks_of, request_of
from heterorl.common.generation.engine import Engine
from heterorl.common.generation.requests import Completion, Finished, Request
from heterorl.common.process.clock import Bell
from heterorl.common.tasks.task import Prompt, Task, check_answer
from heterorl.common.types.evaluation import EvaluationPart, PromptResult
from heterorl.common.types.rollout import total_reward
from heterorl.sampler.evaluation.sets import SiteSet
from heterorl.sampler.rollout.guests import Guests
from heterorl.sampler.rollout.maker import RolloutMaker

_LOG = logging.getLogger(__name__)


class Drawing:
    """Parts in, results out."""

    def __init__(self, *, engine: Engine, guests: Guests, maker: RolloutMaker, share: float, news: Bell) -> None:
        """Join it.

        Args:
            engine: that computes completions.
            guests: what of the engine is no rollout's.
            maker: whose tokenizer and keys of requests are the site's.
            share: of the engine's rows, while rollouts are made too.
            news: rings when anything happened in the engine.
        """
        self._engine = engine
        self._guests = guests
        self._maker = maker
        self._share = share
        self._news = news
        self._threads: dict[str, ThreadPoolExecutor] = {}

    @property
    def num_rows(self) -> int:
        """Completions that it may have in the engine at once; a single request may be larger."""
        rows = self._engine.max_running
        return rows + rows // 4 if self._guests.are_alone else max(1, int(rows * self._share))

    async def results(self, part: EvaluationPart, of: SiteSet) -> tuple[PromptResult, ...]:
        """Draw and score the prompts of a part; none of a prompt's completions has a reward where it cannot be drawn.

        Raises:
            ConfigError: the engine has no room for such completions.
            EngineError: the engine lost some of it, or drew with another version.
        """
        indices = range(part.first_prompt, part.first_prompt + part.num_prompts)
        refused: dict[int, PromptRefused] = {}
        drafts, requests = await asyncio.to_thread(self._prepared, part, of.task, indices, refused)

        async def drawn(index: int, block: Block, request: Request) -> None:
            try:
                await self._block(part, of, drafts[index], block, request)
            except PromptRefused as error:
                refused[index] = error

        tasks = [asyncio.ensure_future(drawn(*each)) for each in requests]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        for index, error in refused.items():
            _LOG.warning("held-out prompt %d cannot be drawn: %s", index, error)
        return tuple(drafts[index].refused() if index in refused else drafts[index].result() for index in indices)

    def close(self) -> None:
        """Wait for no reward any longer."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _prepared(
        self, part: EvaluationPart, task: Task, indices: Sequence[int], refused: dict[int, PromptRefused]
    ) -> tuple[dict[int, PromptDraft], list[tuple[int, Block, Request]]]:
        drafts, requests = {}, []
        for index in indices:
            prompt = task.evaluation_prompt(index)
            drafts[index] = PromptDraft(prompt_index=index, prompt=prompt, num_samples=part.draws.num_samples)
            try:
                check_answer(task, prompt)
                with self._maker.lock:
                    ids = self._maker.prompter.encode_prompt(prompt)
            except PromptRefused as error:
                refused[index] = error
                continue
            for block in blocks_of(part.draws):
                key = next(self._maker.keys)
                request = request_of(part.draws, block, key=key, prompt_index=index, prompt=ids)
                requests.append((index, block, request))
        return drafts, requests

    async def _block(
        self, part: EvaluationPart, of: SiteSet, draft: PromptDraft, block: Block, request: Request
    ) -> None:
        for one in await self._drawn(request):
            drawn_by = {span.version for span in one.completion.spans}
            if drawn_by != {part.version}:
                raise EngineError(f"held-out completions of version {part.version} were drawn by {sorted(drawn_by)}")
            text, reward = await self._scored(of, draft.prompt, one.completion)
            draft.note(block.first + one.member, one.completion, text=text, reward=reward)

    async def _drawn(self, request: Request) -> list[Finished]:
        count = request.num_completions
        while self._guests.num_running and self._guests.num_running + count > self.num_rows:
            await self._news.ticket().wait()
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ended: list[Finished] = []

        def on_end(one: Finished | None) -> None:
            if one is not None:
                ended.append(one)
            if done.done():
                return
            if one is None or len(ended) == count:
                done.set_result(one is not None)

        self._guests.begin(request.key, count, on_end)
        # Its thread cannot be cancelled: whoever waits for it no longer still learns whether the engine took it.
        submitting = asyncio.ensure_future(asyncio.to_thread(self._engine.submit, request))
        submitting.add_done_callback(lambda found: self._note_submitted(request, found))
        await asyncio.shield(submitting)
        self._news.ring()
        if not await done:
            raise EngineError("the engine lost what was evaluated")
        return ended

    def _note_submitted(self, request: Request, found: asyncio.Future[None]) -> None:
        if found.cancelled() or found.exception() is not None:
            self._guests.drop(request.key)

    async def _scored(self, of: SiteSet, prompt: Prompt, completion: Completion) -> tuple[str, float | None]:
        threads = self._threads.get(of.name)
        if threads is None:
            num_workers = int(getattr(of.task, "num_workers", 1))
            threads = self._threads[of.name] = ThreadPoolExecutor(num_workers, thread_name_prefix="evaluate")
        return await asyncio.get_running_loop().run_in_executor(threads, self._score, of.task, prompt, completion)

    def _score(self, task: Task, prompt: Prompt, completion: Completion) -> tuple[str, float | None]:
        with self._maker.lock:
            text = self._maker.prompter.decode(completion.token_ids)
        try:
            return text, total_reward(task.score(prompt, text))
        except RewardError as error:
            _LOG.warning("held-out prompt %d could not be scored: %s", prompt.index, error)
            return text, None
