"""Whether a completion is the right answer of a row: as text, or as mathematics."""

from __future__ import annotations

from typing import Literal

from heterorl.common.tasks.rewards.math_verify import MathVerifier
from heterorl.common.tasks.task import Prompt
from heterorl.common.tasks.thoughts import answer_of
from heterorl.common.types.rollout import RewardPart

_PART = "correct"


class Matcher:
    """Compares a completion with the answer of its prompt."""

    def __init__(self, match: Literal["exact", "math_verify"], *, timeout_s: float, num_workers: int) -> None:
        self.name = f"{match} 2"
        """What digests of tasks state: a number more where the same completions are worth something else."""
        self._verifier = MathVerifier(timeout_s=timeout_s, num_workers=num_workers) if match == "math_verify" else None
        self.num_workers = num_workers if self._verifier else 1

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """1 for a matching answer, else 0; mathematics that take too long to compare match nothing.

        Raises:
            RewardError: the verifier crashed or timed out.
        """
        given = answer_of(completion)
        if self._verifier is None:
            is_right = given.strip() == prompt.answer.strip()
        else:
            is_right = self._verifier.verify(answer=prompt.answer, completion=given)
        return (RewardPart(name=_PART, value=float(is_right)),)

    def uncertain(self, prompt: Prompt, completion: str) -> tuple[str, ...]:
        """The part's name where another machine may give this completion another value without fault."""
        given = answer_of(completion)
        is_so = self._verifier is not None and self._verifier.is_uncertain(answer=prompt.answer, completion=given)
        return (_PART,) if is_so else ()

    def answer_problem(self, prompt: Prompt) -> str:
        """Why no completion can be compared with the prompt's answer; empty where they can.

        Raises:
            DependencyMissing: the package that compares is not installed.
            RewardError: nothing is known.
        """
        return "" if self._verifier is None else self._verifier.problem(prompt.answer)

    def close(self) -> None:
        """Kill the verifier's processes."""
        if self._verifier is not None:
            self._verifier.close()
