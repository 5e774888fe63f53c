"""A prompt under way: what of it has been drawn and scored. Pure.

Guarantees: a completion counts once; the result lists completions in the order of their seeds, however they ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from heterorl.common.generation.engine import Completion
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.evaluation import PromptResult, ScoredSample
from heterorl.common.types.rollout import FinishReason
from heterorl.common.types.sample import shown_answer

_CUT = (FinishReason.LENGTH, FinishReason.CONTEXT)


@dataclass(slots=True, kw_only=True, eq=False)
class PromptDraft:
    """One prompt of a set; `prompt_index` is its place among the held-out prompts."""

    prompt_index: int
    prompt: Prompt
    num_samples: int
    samples: dict[int, ScoredSample] = field(default_factory=dict)

    def note(self, number: int, completion: Completion, *, text: str, reward: float | None) -> None:
        """Note completion `number`, of one turn or more; its reward is None where none could be computed."""
        self.samples[number] = ScoredSample(
            reward=None if reward is None or math.isnan(reward) else reward,
            num_tokens=sum(span.end - span.start for span in completion.spans if span.is_drawn),
            is_truncated=completion.finish_reason in _CUT,
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
