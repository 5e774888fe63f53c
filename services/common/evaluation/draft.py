"""A prompt under way: what of it has been drawn and scored. Pure.

Guarantees: a completion counts once; the result lists completions in the order of their seeds, however they ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from heterorl.common.generation.requests import Completion
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.evaluation import PromptResult, ScoredSample
from heterorl.common.types.rollout import FinishReason
from heterorl.common.types.sample import shown_answer


@dataclass(slots=True, kw_only=True, eq=False)
class PromptDraft:
    """One prompt of a set; `prompt_index` is its place among the held-out prompts."""

    prompt_index: int
    prompt: Prompt
    num_samples: int
    samples: dict[int, ScoredSample] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every completion is scored."""
        return len(self.samples) == self.num_samples

    def note(self, number: int, completion: Completion, *, text: str, reward: float | None) -> None:
        """Note completion `number` with its reward, None where none could be computed; what is no number is none."""
        self.samples[number] = ScoredSample(
            reward=None if reward is None or math.isnan(reward) else reward,
            num_tokens=int(completion.token_ids.size),
            is_truncated=completion.finish_reason is FinishReason.LENGTH,
            text=text,
        )

    def refused(self) -> PromptResult:
        """The result of a prompt that cannot be drawn: none of its completions has a reward."""
        none = ScoredSample(reward=None, num_tokens=0, is_truncated=False)
        return PromptResult(
            prompt_index=self.prompt_index, samples=(none,) * self.num_samples, prompt=self.prompt.shown
        )

    def result(self) -> PromptResult:
        """All of it."""
        return PromptResult(
            prompt_index=self.prompt_index,
            samples=tuple(self.samples[number] for number in range(self.num_samples)),
            prompt=self.prompt.shown,
            answer=shown_answer(self.prompt.answer),
        )
