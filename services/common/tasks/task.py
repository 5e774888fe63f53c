"""What a task is: prompts by index, held-out prompts, and a verifiable score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and what its answer should be.

    Example: Prompt(index=7, text="12+34=", answer="640")
    """

    index: int
    text: str
    answer: str


class Task(Protocol):
    """Prompts and scores; equal digests mean equal prompts and equal scores on every site."""

    @property
    def digest(self) -> Digest:
        """Digest of data, options and reward."""
        ...

    @property
    def num_prompts(self) -> int:
        """Number of training prompts."""
        ...

    @property
    def num_evaluation_prompts(self) -> int:
        """Number of held-out prompts; none of them is a training prompt."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        ...

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        ...

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Named parts of the reward, whose sum is the reward.

        Raises:
            RewardError: the verifier failed; that is not a score.
        """
        ...
