"""Generated tasks over all pairs of N-digit numbers: sums, and arithmetic progressions with many terms.

Pairs stand in a fixed order, every 19th of them held out. Answers are written with their digits reversed: small,
verifiable, and not trivial, since reversed digits let a small model carry from one token to the next. In a progression
one wrong digit spoils all that follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest

_STRIDE = 7919
_SEED_STRIDE = 104_729
_EVALUATION_SHARE = 19
"""Without a common factor with 10, so that the held-out numbers end in every digit."""


class NumberPairs(ABC):
    """The part of a task that says which pair of numbers a position stands for; `_prompt` says what is asked of it."""

    def __init__(self, *, digits: int, seed: int) -> None:
        self.digits = digits
        self._base: int = 10**digits
        self._total = self._base * self._base
        self.shift = seed * _SEED_STRIDE % self._total
        self.num_evaluation_prompts = self._total // _EVALUATION_SHARE
        self.num_prompts = self.num_evaluation_prompts * (_EVALUATION_SHARE - 1)

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        skip = _EVALUATION_SHARE - 1
        return self._prompt(index, *self._pair(index // skip * _EVALUATION_SHARE + index % skip + 1))

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._prompt(index, *self._pair(index * _EVALUATION_SHARE))

    def _pair(self, position: int) -> tuple[int, int]:
        # A stride without a common factor with 10 visits every pair once, far from its neighbours, from any start.
        number = (position * _STRIDE + self.shift) % self._total
        return number // self._base, number % self._base

    @abstractmethod
    def _prompt(self, index: int, left: int, right: int) -> Prompt: ...


class ArithmeticTask(NumberPairs):
    """Implements heterorl.common.tasks.task.Task: "123+456=" -> "9750" (579 reversed, padded to 4 digits)."""

    def __init__(self, *, digits: int, seed: int = 0) -> None:
        super().__init__(digits=digits, seed=seed)
        # A seed that shifts nothing states the digest of no seed: equal prompts, equal digests.
        shifted = f" shift={self.shift}" if self.shift else ""
        self.digest: Digest = bytes_digest(f"arithmetic 2 digits={digits}{shifted}".encode())

    def _prompt(self, index: int, left: int, right: int) -> Prompt:
        text = f"{left:0{self.digits}d}+{right:0{self.digits}d}="
        return Prompt(index=index, text=text, answer=f"{left + right:0{self.digits + 1}d}"[::-1])

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """1 for the exact answer, else 0."""
        return (RewardPart(name="correct", value=float(completion.strip() == prompt.answer)),)


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
