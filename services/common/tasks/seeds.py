"""Rows of one number each, for environments that need no data: a prompt is what the environment makes of its seed."""

from __future__ import annotations

from heterorl.common.errors import RewardError
from heterorl.common.tasks.environments.task import seed_of
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest


class SeedsTask:
    """Implements heterorl.common.tasks.task.Task for an environment's sake: it has no texts and no score of its own."""

    def __init__(self, *, size: int, evaluation_size: int, seed: int) -> None:
        """Count them.

        Args:
            size: number of training prompts.
            evaluation_size: number of held-out prompts.
            seed: which numbers they are.
        """
        self.num_prompts, self.num_evaluation_prompts, self._seed = size, evaluation_size, seed
        self.digest: Digest = bytes_digest(f"seeds 1 {size} {evaluation_size} {seed}".encode())

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self._prompt(index, is_held_out=False)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position; no training prompt has its seed, whatever their number."""
        return self._prompt(index, is_held_out=True)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:  # noqa: ARG002 - of the Protocol
        """There is none.

        Raises:
            RewardError: always.
        """
        raise RewardError("rows of seeds have no score of their own")

    def _prompt(self, index: int, *, is_held_out: bool) -> Prompt:
        seed = seed_of(index, is_held_out=is_held_out, seed=self._seed)
        return Prompt(index=index, text="", answer="", columns={"seed": seed})
