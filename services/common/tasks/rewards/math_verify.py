"""math-verify in a process of its own that is killed when it takes too long: an error is never a zero reward."""

from __future__ import annotations

from heterorl.common.errors import DependencyMissing, RewardError
from heterorl.common.tasks.rewards.process import LoadFailed, RewardPool

MAX_ANSWER_CHARS = 20_000
MAX_MEMORY_BYTES = 4 << 30


class MathVerifier:
    """Compares answers as mathematics."""

    def __init__(self, *, timeout_s: float, num_workers: int = 1) -> None:
        job = {"kind": "math_verify", "max_memory_bytes": MAX_MEMORY_BYTES}
        self.pool = RewardPool(job, timeout_s=timeout_s, num_workers=num_workers)

    def verify(self, *, answer: str, completion: str) -> bool:
        """Whether the completion's final answer equals the answer.

        Raises:
            DependencyMissing: the package is not installed.
            RewardError: the worker crashed, timed out, or could not read the right answer.
        """
        try:
            reply = self.pool.ask({"answer": answer, "completion": completion[-MAX_ANSWER_CHARS:]})
        except LoadFailed as error:
            raise DependencyMissing("math-verify", "tasks") from error
        except RewardError as error:
            raise RewardError(f"math-verify: {error}") from error
        return bool(reply["correct"])

    def close(self) -> None:
        """Kill the workers."""
        self.pool.close()
