"""Whether a completion is the right answer of a row: as text, or as mathematics by math-verify in processes of its own.

An answer of a completion that takes more than the processor time is a wrong answer, as slow code is. It is processor
time, not that of a clock, so that a busy machine gives the same values. What fails for another reason is an error and
never a zero reward.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from heterorl.common.errors import DependencyMissing, RewardError
from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.rewards.worker_pool import NEAR, PATIENCE, LoadFailed, NearLimit, OutOfTime, WorkerPool
from heterorl.common.tasks.task import Doubts, Prompt
from heterorl.common.types.rollout import RewardPart

MAX_ANSWER_CHARS = 20_000
MAX_MEMORY_BYTES = 4 << 30
_CACHED_ANSWERS = 1 << 14
_UNREADABLE = "the right answer cannot be parsed"


class MathVerifier:
    """Compares answers as mathematics; may be used from several threads."""

    def __init__(self, *, timeout_s: float, num_workers: int = 1) -> None:
        """Start nothing yet; `timeout_s` is processor time for one completion."""
        job = {"kind": "math_verify", "max_memory_bytes": MAX_MEMORY_BYTES}
        self._cpu_s = timeout_s
        self.pool = WorkerPool(job, timeout_s=PATIENCE * timeout_s, cpu_s=timeout_s, num_workers=num_workers)
        # A worker of its own: whether an answer can be read is asked before generation, which must not wait for scores.
        self.reader = WorkerPool(job, timeout_s=PATIENCE * timeout_s, cpu_s=timeout_s)
        self.problem = functools.lru_cache(maxsize=_CACHED_ANSWERS)(self._problem)
        self.near = NearLimit()
        """Comparisons that took so long that another machine's may differ without fault."""

    def verify(self, *, answer: str, completion: str) -> bool:
        """Whether the completion's final answer equals the answer; one that takes too long to compare does not.

        Raises:
            DependencyMissing: the package is not installed.
            RewardError: the worker crashed, timed out, or could not read the right answer.
        """
        given = completion[-MAX_ANSWER_CHARS:]
        try:
            reply = self._asked(self.pool, {"answer": answer, "completion": given})
        except OutOfTime:
            if problem := self.problem(answer):
                raise RewardError(f"math-verify: {problem}") from None
            reply = {"readable": True, "correct": False, "used_s": self._cpu_s}
        if not reply["readable"]:
            raise RewardError(f"math-verify: {_UNREADABLE}")
        if reply["used_s"] > NEAR * self._cpu_s:
            self.near.add(answer, completion)
        return bool(reply["correct"])

    def _problem(self, answer: str) -> str:
        """Why no completion can be compared with an answer; empty where they can."""
        try:
            return "" if self._asked(self.reader, {"answer": answer})["readable"] else _UNREADABLE
        except OutOfTime:
            return f"the right answer takes more than {self._cpu_s:g} s of processor time to parse"

    def close(self) -> None:
        """Kill the workers."""
        self.pool.close()
        self.reader.close()

    def _asked(self, pool: WorkerPool, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return pool.ask(request)
        except LoadFailed as error:
            raise DependencyMissing("math-verify", "tasks") from error
        except OutOfTime:
            raise
        except RewardError as error:
            raise RewardError(f"math-verify: {error}") from error


_PART = "correct"


class Matcher:
    """Compares a completion with the answer of its prompt."""

    def __init__(self, match: Literal["exact", "math_verify"], *, timeout_s: float, num_workers: int) -> None:
        self.name = f"{match} 2"
        """What digests of tasks state: a number more where the same completions are worth something else."""
        self._verifier = MathVerifier(timeout_s=timeout_s, num_workers=num_workers) if match == "math_verify" else None
        self.num_workers = num_workers if self._verifier else 1

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """1 for a matching answer, else 0; mathematics that take too long to compare match nothing."""
        given = answer_of(completion)
        if self._verifier is None:
            is_right = given.strip() == prompt.answer.strip()
        else:
            is_right = self._verifier.verify(answer=prompt.answer, completion=given)
        return (RewardPart(name=_PART, value=float(is_right)),)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        """Whether the comparison took nearly all its time."""
        if self._verifier is None:
            return Doubts()
        return Doubts(near=self._verifier.near.names(_PART, prompt.answer, answer_of(completion)))

    def answer_problem(self, prompt: Prompt) -> str:
        """Why no completion can be compared with the prompt's answer; empty where they can."""
        return "" if self._verifier is None else self._verifier.problem(prompt.answer)

    def close(self) -> None:
        """Kill the verifier's processes."""
        if self._verifier is not None:
            self._verifier.close()


class MatchedTask:
    """The score of a task that compares completions with the answers of its rows."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self.num_workers = matcher.num_workers

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """See Matcher.score."""
        return self._matcher.score(prompt, completion)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        """See Matcher.doubts."""
        return self._matcher.doubts(prompt, completion)

    def answer_problem(self, prompt: Prompt) -> str:
        """See Matcher.answer_problem."""
        return self._matcher.answer_problem(prompt)

    def close(self) -> None:
        """Kill the verifier's processes."""
        self._matcher.close()
