"""Draws and scores parts of a set with the engine that rollouts use, in a share of its rows.

    draw   waits for rows of the share, then for its completions; unblocked by the engine
    play   waits for an environment that answers a turn; unblocked by it, and by its time limit
    score  waits for a process that computes rewards; unblocked by it, and by its time limit

Guarantees: a completion of another version than the part's is never scored; what the engine lost is said, not counted;
a member that its environment loses has no reward.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from heterorl.common.errors import EngineError, PromptRefused, RewardError
from heterorl.common.evaluation.draft import PromptDraft
from heterorl.common.evaluation.draws import Block, blocks_of, request_of, seed_of
from heterorl.common.generation.engine import Completion, Engine, Finished, Request
from heterorl.common.process.clock import Bell
from heterorl.common.tasks.task import Prompt, Task, check_answer
from heterorl.common.text.texts import Texts
from heterorl.common.types.evaluation import EvaluationPart, PromptResult
from heterorl.common.types.rollout import FinishReason, Span, WorkAssignment, total_reward
from heterorl.sampler.evaluation.sets import SiteSet
from heterorl.sampler.rollout.drafts import Draft
from heterorl.sampler.rollout.guests import Guests
from heterorl.sampler.rollout.maker import RolloutMaker
from heterorl.sampler.rollout.player import Player, Turn

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """A prompt of a part: its results, and the group that draws them; None where it is refused."""

    results: PromptDraft
    draft: Draft | None


class Drawing:
    """Parts in, results out."""

    def __init__(
        self,
        *,
        engine: Engine,
        guests: Guests,
        maker: RolloutMaker,
        share: float,
        max_trajectory_tokens: int,
        news: Bell,
    ) -> None:
        """Join it.

        Args:
            engine: that computes completions.
            guests: what of the engine is no rollout's.
            maker: whose tokenizer, clock and keys of requests are the site's.
            share: of the engine's rows, while rollouts are made too.
            max_trajectory_tokens: of a completion of several turns, drawn and given.
            news: rings when anything happened in the engine.
        """
        self.refused: dict[tuple[str, int], PromptRefused] = {}
        """Why prompts cannot be drawn, by set and index."""
        self._engine = engine
        self._guests = guests
        self._maker = maker
        self._share = share
        self._max_trajectory_tokens = max_trajectory_tokens
        self._news = news
        prompter = maker.prompter
        raw = functools.partial(prompter.decode, keeps_special=True)
        self._texts = Texts(decode=prompter.decode, decode_given=raw)
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._players: dict[tuple[str, int], Player] = {}

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
        asked = await asyncio.to_thread(lambda: [self._asked(part, of, index) for index in part.prompts])
        drawn = [(each.results, each.draft) for each in asked if each.draft is not None]
        try:
            await _together(
                self._block(part, of, results, draft, block)
                for results, draft in drawn
                for block in blocks_of(part.draws)
            )
        finally:
            for player in self._players.values():
                for _, draft in drawn:
                    player.drop(draft.key)
        return tuple(
            each.results.refused() if (of.name, index) in self.refused else each.results.result()
            for index, each in zip(part.prompts, asked, strict=True)
        )

    def close(self) -> None:
        """Wait for no reward and no environment any longer."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for player in self._players.values():
            player.close()

    def _asked(self, part: EvaluationPart, of: SiteSet, index: int) -> _Asked:
        self.refused.pop((of.name, index), None)
        prompt = of.task.evaluation_prompt(index)
        results = PromptDraft(prompt_index=index, prompt=prompt, num_samples=part.draws.num_samples)
        try:
            check_answer(of.task, prompt)
            conversation = of.conversations.of(prompt) if of.conversations else None
            with self._maker.lock:
                ids = conversation.encode(prompt) if conversation else self._maker.prompter.encode_prompt(prompt)
        except PromptRefused as error:
            self._refuse(of, index, error)
            return _Asked(results=results, draft=None)
        seed = seed_of(part.draws, prompt_index=index, first=0)
        assignment = WorkAssignment(id=part.id, prompt_index=index, seed=seed, lease_s=part.lease_s)
        draft = Draft(
            key=next(self._maker.keys),
            assignment=assignment,
            prompt=prompt,
            prompt_token_ids=ids,
            seed=seed,
            version=part.version,
            source="evaluation",
            begun_at=math.inf,
            conversation=conversation,
        )
        return _Asked(results=results, draft=draft)

    def _refuse(self, of: SiteSet, index: int, error: PromptRefused) -> None:
        if (of.name, index) not in self.refused:
            _LOG.warning("held-out prompt %d cannot be drawn: %s", index, error)
        self.refused[of.name, index] = error

    async def _block(self, part: EvaluationPart, of: SiteSet, results: PromptDraft, draft: Draft, block: Block) -> None:
        """Draw and score some completions of a prompt."""
        key, index = next(self._maker.keys), results.prompt_index
        request = request_of(part.draws, block, key=key, prompt_index=index, prompt=draft.prompt_token_ids)
        try:
            drawn = await self._drawn(part, draft, request)
        except PromptRefused as error:
            self._refuse(of, index, error)
            return
        if draft.conversation is not None:
            await _together(
                self._play(part, of, results, draft, block.first + one.member, one.completion) for one in drawn
            )
            return
        for one in drawn:
            text, reward = await self._in_thread(of, self._score, of.task, draft.prompt, one.completion)
            results.note(block.first + one.member, one.completion, text=text, reward=reward)

    async def _play(
        self, part: EvaluationPart, of: SiteSet, results: PromptDraft, draft: Draft, number: int, completion: Completion
    ) -> None:
        """Lead a completion through its environment, from its first turn on."""
        player = self._player(part, of)
        came = await player.play(draft, number, completion)
        while isinstance(came, Turn):
            request = Request(
                key=next(self._maker.keys), prompt=came.context, seed=came.seed, num_completions=1,
                sampling=part.draws.sampling,
            )  # fmt: skip
            try:
                (one,) = await self._drawn(part, draft, request)
            except PromptRefused:
                came = await player.end(draft, number, FinishReason.CONTEXT)
            else:
                came = await player.play(draft, number, one.completion)
        is_lost = not came.completion.finish_reason.is_trainable
        text = await self._in_thread(of, self._read, came.completion)
        results.note(number, came.completion, text=text, reward=None if is_lost else total_reward(came.parts))

    def _player(self, part: EvaluationPart, of: SiteSet) -> Player:
        assert of.conversations is not None, "the prompt has an environment"
        name = of.name, part.draws.max_new_tokens
        if name not in self._players:
            self._players[name] = Player(
                max_live=of.conversations.max_live, max_new_tokens=part.draws.max_new_tokens,
                max_trajectory_tokens=self._max_trajectory_tokens, clock=self._maker.clock,
            )  # fmt: skip
        return self._players[name]

    async def _drawn(self, part: EvaluationPart, draft: Draft, request: Request) -> list[Finished]:
        count = request.num_completions
        while self._guests.num_running and self._guests.num_running + count > self.num_rows:
            await self._news.ticket().wait()
        draft.begun_at = min(draft.begun_at, self._maker.clock.monotonic())
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
        return [replace(one, completion=_of_version(part.version, one.completion)) for one in ended]

    def _note_submitted(self, request: Request, found: asyncio.Future[None]) -> None:
        if found.cancelled() or found.exception() is not None:
            self._guests.drop(request.key)

    async def _in_thread(self, of: SiteSet, function: Callable[..., _T], *arguments: Any) -> _T:
        threads = self._threads.get(of.name)
        if threads is None:
            num_workers = int(getattr(of.task, "num_workers", 1))
            threads = self._threads[of.name] = ThreadPoolExecutor(num_workers, thread_name_prefix="evaluate")
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)

    def _read(self, completion: Completion) -> str:
        with self._maker.lock:
            return self._texts.read(completion.token_ids, completion.spans)[0]

    def _score(self, task: Task, prompt: Prompt, completion: Completion) -> tuple[str, float | None]:
        with self._maker.lock:
            text = self._maker.prompter.decode(completion.token_ids)
        try:
            return text, total_reward(task.score(prompt, text))
        except RewardError as error:
            _LOG.warning("held-out prompt %d could not be scored: %s", prompt.index, error)
            return text, None


def _of_version(version: int, completion: Completion) -> Completion:
    """The completion as one span of a version; files of a model, which have none, count as version 0.

    Raises:
        EngineError: another version drew some of it.
    """
    drawn_by = {span.version for span in completion.spans}
    if version >= 0 and drawn_by != {version}:
        raise EngineError(f"held-out completions of version {version} were drawn by {sorted(drawn_by)}")
    return replace(completion, spans=(Span(version=max(0, version), start=0, end=completion.token_ids.size),))


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; where one fails the others end too."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
