"""Arithmetic progressions with many terms: long completions in which one wrong digit spoils all that follows.

Every term is written with its digits reversed, like the sums of `arithmetic`, so that a small model carries rightwards.
"""

from __future__ import annotations

from services.common.tasks.task import Prompt
from services.common.types import Digest, RewardPart
from services.common.wire import bytes_digest

_STRIDE = 7919
_SEED_STRIDE = 104_729
_EVALUATION_SHARE = 19


class ProgressionTask:
    """Implements services.common.tasks.task.Task: "12+34=" with 3 terms -> "640841" (46, 80, 14 modulo 100, reversed).

    The reward is the share of terms before the first wrong one.
    """

    def __init__(self, *, digits: int, terms: int, seed: int = 0) -> None:
        self._digits = digits
        self._terms = terms
        self._base = 10**digits
        self._total = self._base**2
        self._shift = seed * _SEED_STRIDE % self._total
        # Every 19th pair, in a fixed order, is held out.
        self.num_evaluation_prompts = self._total // _EVALUATION_SHARE
        self.num_prompts = self.num_evaluation_prompts * (_EVALUATION_SHARE - 1)
        self.digest: Digest = bytes_digest(f"progression 1 {digits} {terms} {self._shift}".encode())

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        skip = _EVALUATION_SHARE - 1
        return self._prompt(index, index // skip * _EVALUATION_SHARE + index % skip + 1)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._prompt(index, index * _EVALUATION_SHARE)

    def _prompt(self, index: int, pair: int) -> Prompt:
        start, step = divmod((pair * _STRIDE + self._shift) % self._total, self._base)
        terms = [(start + number * step) % self._base for number in range(1, self._terms + 1)]
        return Prompt(
            index=index,
            text=f"{start:0{self._digits}d}+{step:0{self._digits}d}=",
            answer="".join(f"{term:0{self._digits}d}"[::-1] for term in terms),
        )

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Right terms before the first wrong one, over all terms; 0 for an answer that is too long."""
        given = completion.strip()
        right = 0
        if len(given) <= len(prompt.answer):
            width = self._digits
            while (
                right < self._terms
                and given[right * width : (right + 1) * width] == (prompt.answer[right * width : (right + 1) * width])
            ):
                right += 1
        return (RewardPart(name="right_terms", value=right / self._terms),)
