"""Addition of N-digit numbers, answers written with their digits reversed: small, verifiable, and not trivial.

Reversed digits let a small model carry from one token to the next.
"""

from __future__ import annotations

from services.common.tasks.task import Prompt
from services.common.types import Digest, RewardPart
from services.common.wire import bytes_digest

_STRIDE = 7919
_SEED_STRIDE = 104_729
_EVALUATION_SHARE = 19
"""Without a common factor with 10, so that the held-out numbers end in every digit."""


class ArithmeticTask:
    """Implements services.common.tasks.task.Task: "123+456=" -> "9750" (579 reversed, padded to 4 digits)."""

    def __init__(self, *, digits: int, seed: int = 0) -> None:
        self._digits = digits
        self._shift = seed * _SEED_STRIDE
        self._base = 10**digits
        self._total = self._base**2
        # Every 19th pair, in a fixed order, is held out.
        self.num_evaluation_prompts = self._total // _EVALUATION_SHARE
        self.num_prompts = self.num_evaluation_prompts * (_EVALUATION_SHARE - 1)
        # A seed that shifts nothing states the digest of no seed: equal prompts, equal digests.
        shift = self._shift % self._total
        shifted = f" shift={shift}" if shift else ""
        self.digest: Digest = bytes_digest(f"arithmetic 2 digits={digits}{shifted}".encode())

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        skip = _EVALUATION_SHARE - 1
        return self._prompt(index, index // skip * _EVALUATION_SHARE + index % skip + 1)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._prompt(index, index * _EVALUATION_SHARE)

    def _prompt(self, index: int, pair: int) -> Prompt:
        # A stride without a common factor with 10 visits every pair once, far from its neighbours, from any start.
        left, right = divmod((pair * _STRIDE + self._shift) % self._total, self._base)
        text = f"{left:0{self._digits}d}+{right:0{self._digits}d}="
        return Prompt(index=index, text=text, answer=f"{left + right:0{self._digits + 1}d}"[::-1])

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """1 for the exact answer, else 0."""
        return (RewardPart(name="correct", value=float(completion.strip() == prompt.answer)),)
