"""Arithmetic progressions with many terms: long completions in which one wrong digit spoils all that follows.

Every term is written with its digits reversed, like the sums of `arithmetic`, so that a small model carries rightwards.
"""

from __future__ import annotations

from heterorl.common.tasks.number_pairs import NumberPairs
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest


class ProgressionTask(NumberPairs):
    """Implements heterorl.common.tasks.task.Task: "12+34=" with 3 terms -> "640841" (46, 80, 14 modulo 100, reversed).

    The reward is the share of terms before the first wrong one. An answer that goes on after its last term is worth
    nothing, or with `prefix_counts` what its first terms are worth: then it need not have learned to stop.
    """

    def __init__(self, *, digits: int, terms: int, seed: int = 0, prefix_counts: bool = False) -> None:
        super().__init__(digits=digits, seed=seed)
        self._terms = terms
        self._prefix_counts = prefix_counts
        kind = "progression:prefix" if prefix_counts else "progression"
        self.digest: Digest = bytes_digest(f"{kind} 1 {digits} {terms} {self.shift}".encode())

    def _prompt(self, index: int, left: int, right: int) -> Prompt:
        terms = [(left + number * right) % self._base for number in range(1, self._terms + 1)]
        return Prompt(
            index=index,
            text=f"{left:0{self.digits}d}+{right:0{self.digits}d}=",
            answer="".join(f"{term:0{self.digits}d}"[::-1] for term in terms),
        )

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Right terms before the first wrong one, over all terms."""
        given = completion.strip()
        right = 0
        if self._prefix_counts or len(given) <= len(prompt.answer):
            width = self.digits
            while (
                right < self._terms
                and given[right * width : (right + 1) * width] == (prompt.answer[right * width : (right + 1) * width])
            ):
                right += 1
        return (RewardPart(name="right_terms", value=right / self._terms),)
