"""Arithmetic tasks over all pairs of N-digit numbers: sums and progressions.

Every 19th pair of a fixed order is held out. Answers have their digits reversed, so that a small model can carry from
one token to the next. In a progression, one wrong digit spoils all later terms.
"""

from abc import abstractmethod
from itertools import takewhile

from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common_messages import bytes_digest

_STRIDE = 7919
_SEED_STRIDE = 104_729
_EVALUATION_SHARE = 19
"""Coprime to 10, so that the held-out numbers end in every digit."""


class NumberPairs(Task):
    """Maps a position to a pair of numbers; subclasses write the prompt."""

    def __init__(self, *, digits: int, seed: int) -> None:
        self.digits = digits
        self._base: int = 10**digits
        self._total = self._base * self._base
        self.shift = seed * _SEED_STRIDE % self._total
        self.num_evaluation_prompts = self._total // _EVALUATION_SHARE
        self.num_prompts = self.num_evaluation_prompts * (_EVALUATION_SHARE - 1)

    def prompt(self, index: int) -> Prompt:
        skip = _EVALUATION_SHARE - 1
        return self._prompt(index, *self._pair(index // skip * _EVALUATION_SHARE + index % skip + 1))

    def evaluation_prompt(self, index: int) -> Prompt:
        return self._prompt(index, *self._pair(index * _EVALUATION_SHARE))

    def _pair(self, position: int) -> tuple[int, int]:
        # A stride coprime to 10 visits every pair once, far from its neighbours.
        number = (position * _STRIDE + self.shift) % self._total
        return number // self._base, number % self._base

    @abstractmethod
    def _prompt(self, index: int, left: int, right: int) -> Prompt: ...


class ArithmeticTask(NumberPairs):
    """Sums: "123+456=" -> "9750" (579 reversed, padded to 4 digits)."""

    def __init__(self, *, digits: int, seed: int = 0) -> None:
        super().__init__(digits=digits, seed=seed)
        # A seed without a shift has the digest of no seed: equal prompts, equal digests.
        shifted = f" shift={self.shift}" if self.shift else ""
        self.digest = bytes_digest(f"arithmetic 3 digits={digits}{shifted}".encode())

    def _prompt(self, index: int, left: int, right: int) -> Prompt:
        text = f"{left:0{self.digits}d}+{right:0{self.digits}d}="
        return Prompt(index=index, text=text, answer=f"{left + right:0{self.digits + 1}d}"[::-1])

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        return (RewardPart(name="correct", value=float(answer_of(completion).strip() == prompt.answer)),)


class ProgressionTask(NumberPairs):
    """Progressions of N-digit numbers.

    "12+34=" with 3 terms has the answer "640841": 46, 80, 14 modulo 100, reversed. The reward is the share of terms
    before the first wrong one. An answer longer than the right one gets 0.
    """

    def __init__(self, *, digits: int, terms: int, seed: int = 0) -> None:
        super().__init__(digits=digits, seed=seed)
        self._terms = terms
        self.digest = bytes_digest(f"progression 2 {digits} {terms} {self.shift}".encode())

    def _prompt(self, index: int, left: int, right: int) -> Prompt:
        terms = [(left + number * right) % self._base for number in range(1, self._terms + 1)]
        return Prompt(
            index=index,
            text=f"{left:0{self.digits}d}+{right:0{self.digits}d}=",
            answer="".join(f"{term:0{self.digits}d}"[::-1] for term in terms),
        )

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        given = answer_of(completion).strip()
        pairs = zip(given, prompt.answer, strict=False) if len(given) <= len(prompt.answer) else ()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return (RewardPart(name="right_terms", value=same // self.digits / self._terms),)
