"""Addition of N-digit numbers, answers written with their digits reversed: small, verifiable, and not trivial.

Reversed digits let a small model carry from one token to the next.
"""

from __future__ import annotations

from heterorl.common.tasks.number_pairs import NumberPairs
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest


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
