"""Verifiers of answers: equal text, or equal mathematics by math-verify.

A comparison that exceeds its processor time counts as a wrong answer, as does any failure inside math-verify.
Processor time gives equal values on a busy machine. Any other failure is an error, never a zero reward.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from heterorl.common.errors import DependencyMissing, RewardError
from heterorl.common.tasks.answer_extraction import answer_of, is_exact, texts_of
from heterorl.common.tasks.rewards.worker_pool import NEAR, LoadFailed, NearLimit, OutOfTime, WorkerPool
from heterorl.common.tasks.source_config import SourceConfig
from heterorl.common.tasks.task import AnswerProblem, Doubts, Prompt, RewardSource
from heterorl.common.types.rollout import RewardPart

MAX_ANSWER_CHARS = 20_000
MAX_MEMORY_BYTES = 4 << 30
LIMIT_S = 5.0
"""Most processor time of a comparison, so that nodes with longer limits agree."""
PATIENCE = 40.0
"""Seconds by the clock for each of processor time: on a busy machine too, that limit ends what hangs, as a 0."""
_CACHED_ANSWERS = 1 << 14
_UNREADABLE = "the right answer cannot be parsed"


def limit_of(timeout_s: float) -> float:
    """Processor time of a comparison, from task.reward_timeout_s."""
    return min(LIMIT_S, timeout_s)


class MathVerifier:
    """Compares answers as mathematics; thread-safe."""

    def __init__(self, *, timeout_s: float, num_workers: int = 1) -> None:
        job = {"kind": "math_verify", "max_memory_bytes": MAX_MEMORY_BYTES}
        self._cpu_s = cpu_s = limit_of(timeout_s)
        self.pool = WorkerPool(job, timeout_s=PATIENCE * cpu_s, cpu_s=cpu_s, num_workers=num_workers)
        # Its own worker: answers are read before generation, which must not wait for scores.
        self.reader = WorkerPool(job, timeout_s=PATIENCE * cpu_s, cpu_s=cpu_s)
        self.problem = functools.lru_cache(maxsize=_CACHED_ANSWERS)(self._problem)
        self.near = NearLimit()
        """Comparisons whose result another machine may not repeat within the limit."""

    def verify(self, *, answer: str, completion: str) -> bool:
        """Whether the final answer equals `answer`; False where comparing takes too long.

        Raises:
            DependencyMissing: math-verify is not installed.
            RewardError: the worker crashed, or could not read the right answer.
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
        """Why no completion can be compared with an answer, else empty."""
        try:
            return "" if self._asked(self.reader, {"answer": answer})["readable"] else _UNREADABLE
        except OutOfTime:
            return f"the right answer takes more than {self._cpu_s:g} s of processor time to parse"

    def close(self) -> None:
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


_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")
"""They decide which texts are equal."""
_PART = "correct"
_OTHER = 'correct the data, or take match = "exact" or another reward'
_RULES = {"exact": 7, "math_verify": 16}
"""A number rises where equal completions get other scores."""


def _version_of(package: str) -> str:
    """A package's version; empty without it, which the first comparison reports."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class MatchedTask(RewardSource):
    """Compares completions with the answers of rows."""

    def __init__(self, config: SourceConfig) -> None:
        self.match_name = f"{config.match} {_RULES[config.match]}"
        """Part of task digests."""
        self.num_workers = 1
        self._verifier: MathVerifier | None = None
        if config.match == "math_verify":
            self.num_workers = config.reward_workers
            # A site that ran out of a shorter limit would state 0 where another node computes 1.
            limit_s = limit_of(config.reward_timeout_s)
            self.match_name += " ".join(["", *map(_version_of, _PACKAGES), f"{limit_s:g}"])
            self._verifier = MathVerifier(timeout_s=config.reward_timeout_s, num_workers=self.num_workers)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        if self._verifier is None:
            is_right = is_exact(prompt.answer, completion)
        else:
            given = answer_of(completion)
            is_right = any(self._verifier.verify(answer=one, completion=given) for one in self._right(prompt))
        return (RewardPart(name=_PART, value=float(is_right)),)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        if self._verifier is None:
            return Doubts()
        given, near = answer_of(completion), self._verifier.near
        return Doubts(near=next(filter(None, (near.names(_PART, one, given) for one in self._right(prompt))), ()))

    def answer_problem(self, prompt: Prompt) -> AnswerProblem | None:
        text = "" if self._verifier is None else self._verifier.problem(self._right(prompt)[0])
        return AnswerProblem(key="task.match", text=text, action=_OTHER) if text else None

    def _right(self, prompt: Prompt) -> tuple[str, ...]:
        """Texts of a row's answer, one of which a completion's must equal."""
        return (", ".join(texts_of(prompt.answer)) or prompt.answer,)

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()
