"""A reward by unit tests, computed in worker processes whose foreign code runs in a sandbox."""

from __future__ import annotations

import json
from typing import Any

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.tasks.rewards.config import CodeRewardConfig
from heterorl.common.tasks.rewards.near import NEAR, NearLimit
from heterorl.common.tasks.rewards.process import PATIENCE, START_TIMEOUT_S, LoadFailed, RewardPool
from heterorl.common.tasks.rewards.remote.reward import WHOLE
from heterorl.common.tasks.rewards.sandbox.unit_tests import COLUMNS, tests_of
from heterorl.common.tasks.task import Prompt
from heterorl.common.tasks.thoughts import answer_of
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest


class CodeReward:
    """Whether the code of a completion passes its prompt's tests; implements RewardSource."""

    def __init__(self, config: CodeRewardConfig, *, key: str, timeout_s: float, num_workers: int) -> None:
        """Try the sandbox once.

        Args:
            config: of the reward.
            key: that names it.
            timeout_s: processor time for all tests of one completion, seconds.
            num_workers: most completions at once.

        Raises:
            ConfigError: foreign code can be run here by nobody.
        """
        job = {**config.model_dump(mode="json"), "kind": "code", "timeout_s": timeout_s}
        self.num_workers = num_workers
        # The worker counts; this ends a worker that does not, with the starts of its sandboxes.
        self.pool = RewardPool(job, timeout_s=START_TIMEOUT_S + PATIENCE * timeout_s, num_workers=num_workers)
        self._near = NearLimit()
        try:
            facts = self.pool.start()
        except RewardError as error:
            raise ConfigError(key, str(error)) from error
        stated = [
            facts["python"], config.credit, config.needs_block, config.test_timeout_s, timeout_s, config.memory_bytes,
            config.num_processes, config.work_bytes, config.output_bytes,
        ]  # fmt: skip
        self.digest: Digest = bytes_digest(json.dumps(["code 4", *stated]).encode())

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """1 or 0, or the share of tests that pass.

        Raises:
            RewardError: the prompt has no tests, or the sandbox could not be built; that is not a score.
        """
        try:
            reply = self.pool.ask(
                {"answer": prompt.answer, "columns": _beside(prompt), "completion": answer_of(completion)}
            )
        except LoadFailed as error:
            raise RewardError(f"the sandbox does not start again: {error}") from error
        except RewardError as error:
            raise RewardError(f"prompt {prompt.index}: {error}") from error
        if reply["share"] > NEAR:
            self._near.add(prompt.index, completion)
        return (RewardPart(name=WHOLE, value=float(reply["value"])),)

    def is_uncertain(self, prompt: Prompt, completion: str) -> bool:
        """Whether the score that was given took so long that another machine's may differ without fault."""
        return self._near.has(prompt.index, completion)

    def answer_problem(self, prompt: Prompt) -> str:
        """Why a prompt's answer holds no tests; empty where it does."""
        try:
            tests_of(prompt.answer, _beside(prompt))
        except ValueError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Kill the processes, with what runs inside."""
        self.pool.close()


def _beside(prompt: Prompt) -> dict[str, Any]:
    return {name: prompt.columns[name] for name in COLUMNS if name in prompt.columns}
