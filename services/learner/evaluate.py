"""Held-out accuracy of a version's published weights. Runs in a thread."""

import logging
import math
import time
from dataclasses import dataclass, fields

from heterorl.common.errors import EpisodeError, PromptRefused, RewardError
from heterorl.common.generation.inference_engine import Completion, Engine, generate_all
from heterorl.common.tasks.task import Prompt, Task, check_answer
from heterorl.common.text.conversation import Conversations
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Int32Array, SiteId
from heterorl.common.types.rollout import RewardPart, total_reward
from heterorl.common.types.sample import EvaluationSample, SampleRollout, shown_answer
from heterorl.common.weights.arena import Arena

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result; `accuracy` is None when no completion could be scored."""

    version: int
    accuracy: float | None
    num_prompts: int
    num_completions: int
    num_errors: int
    seconds: float
    samples: tuple[EvaluationSample, ...] = ()
    """The reward of a completion that could not be scored is NaN."""

    def row(self) -> dict[str, object]:
        """All but the samples."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "samples"}


class Evaluator:
    """Scores the first held-out prompts, with equal seeds for every version."""

    def __init__(
        self, *, task: Task, engine: Engine, prompter: Prompter, num_prompts: int, num_per_prompt: int, seed: int,
        conversations: Conversations | None = None,
    ) -> None:  # fmt: skip
        """Keep them; `conversations` have the environments and tools that rollouts have."""
        self._task = task
        self._engine = engine
        self._prompter = prompter
        self._conversations = conversations
        self._num_prompts = min(num_prompts, task.num_evaluation_prompts)
        self._num_per_prompt = num_per_prompt
        self._seed = seed
        self._refused: set[int] = set()

    def evaluate(self, arena: Arena, version: int) -> Evaluation:
        """Mean reward over held-out completions, the accuracy for rewards 0 and 1.

        A completion whose verifier fails is left out and counted, not scored as wrong. A prompt that the template or
        the engine refuses is left out.
        """
        started = time.perf_counter()
        self._engine.load(arena, version)
        prompts, encoded = self._written()
        completions = generate_all(
            self._engine,
            encoded,
            seeds=[self._seed + prompt.index for prompt in prompts],
            num_per_prompt=self._num_per_prompt,
        )
        rewards: list[float] = []
        samples: list[EvaluationSample] = []
        num_errors = 0
        drawn = [(prompt, group) for prompt, group in zip(prompts, completions, strict=True) if group]
        for prompt, group in drawn:
            rollouts: list[SampleRollout] = []
            for completion in group:
                parts: tuple[RewardPart, ...] = ()
                reward = math.nan
                text = self._prompter.completion(completion.token_ids, prompt)
                try:
                    parts = self._score(prompt, completion, text)
                    reward = total_reward(parts)
                    rewards.append(reward)
                except RewardError as error:
                    num_errors += 1
                    _LOG.warning(
                        "held-out prompt %d could not be scored, it counts as an error and not as wrong: %s",
                        prompt.index,
                        error,
                    )
                rollouts.append(
                    SampleRollout(
                        completion=text,
                        token_ids=completion.token_ids,
                        sampler_logprobs=completion.logprobs,
                        reward=reward,
                        reward_parts=parts,
                        finish_reason=completion.finish_reason,
                    )
                )
            samples.append(
                EvaluationSample(
                    version=version,
                    site=SiteId(""),
                    prompt_index=prompt.index,
                    prompt=prompt.shown,
                    answer=shown_answer(prompt.answer),
                    rollouts=tuple(rollouts),
                )
            )
        return Evaluation(
            version=version,
            accuracy=sum(rewards) / len(rewards) if rewards else None,
            num_prompts=len(drawn),
            num_completions=len(rewards),
            num_errors=num_errors,
            seconds=time.perf_counter() - started,
            samples=tuple(samples),
        )

    def _score(self, prompt: Prompt, completion: Completion, text: str) -> tuple[RewardPart, ...]:
        conversation = None if self._conversations is None else self._conversations.of(prompt)
        if conversation is None:
            return self._task.score(prompt, text)
        try:
            with conversation.spec.open() as episode:
                conversation.answer(episode, completion.token_ids)
                return episode.score()
        except EpisodeError as error:
            raise RewardError(f"the episode of prompt {prompt.index} failed: {error}") from error

    def _written(self) -> tuple[list[Prompt], list[Int32Array]]:
        """The prompts that can be written and scored, and their tokens."""
        prompts: list[Prompt] = []
        encoded: list[Int32Array] = []
        encode = self._prompter.encode_prompt if self._conversations is None else self._conversations.encode
        for index in range(self._num_prompts):
            prompt = self._task.evaluation_prompt(index)
            try:
                check_answer(self._task, prompt)
                encoded.append(encode(prompt))
            except PromptRefused as error:
                if index not in self._refused:
                    self._refused.add(index)
                    _LOG.warning("held-out prompt %d is left out: %s", index, error)
            else:
                prompts.append(prompt)
        return prompts, encoded
