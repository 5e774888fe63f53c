"""Rewards that run completions as code, asked in worker processes with a sandbox: unit tests, and reasoning-gym's.

The verifiers of reasoning-gym run answers as Python, so no completion is scored in this process. Of its data sets a
text is held out or trained on by its own digest, so that no seed and no size can show a held-out prompt in training.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from heterorl.common.errors import ConfigError, DependencyMissing, RewardError
from heterorl.common.tasks.completions import answer_of
from heterorl.common.tasks.rewards.config import CodeRewardConfig
from heterorl.common.tasks.rewards.process import NEAR, PATIENCE, START_TIMEOUT_S, LoadFailed, NearLimit, RewardPool
from heterorl.common.tasks.rewards.remote import WHOLE
from heterorl.common.tasks.rewards.sandbox.gym import SERVE_TIMEOUT_S, limit_of
from heterorl.common.tasks.rewards.sandbox.serve import Entries, NoEntries
from heterorl.common.tasks.rewards.sandbox.unit_tests import COLUMNS, tests_of
from heterorl.common.tasks.task import Doubts, Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest


class CodeReward:
    """Whether the code of a completion passes its prompt's tests; implements RewardSource."""

    def __init__(self, config: CodeRewardConfig, *, key: str, timeout_s: float, num_workers: int) -> None:
        """Try the sandbox once; `timeout_s` is processor time for all tests of one completion.

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
        except RewardError as error:
            raise RewardError(f"prompt {prompt.index}: {error}") from error
        if reply["share"] > NEAR:
            self._near.add(prompt.index, completion)
        return (RewardPart(name=WHOLE, value=float(reply["value"])),)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        """The score is what code comes to, and may have taken nearly all its time."""
        return Doubts(near=self._near.names(WHOLE, prompt.index, completion), by_code=(WHOLE,))

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


_LOG = logging.getLogger(__name__)
_PART = "score"


class ReasoningGymTask:
    """Implements heterorl.common.tasks.task.Task; entries on the wrong side of the split are drawn again."""

    def __init__(
        self,
        *,
        name: str,
        size: int,
        evaluation_size: int,
        seed: int,
        timeout_s: float,
        num_workers: int,
        sandbox: bool = True,
    ) -> None:
        """Nothing starts before the first score; a completion has half of `timeout_s`, at most 2 s of processor time.

        Raises:
            ConfigError: the data set is unknown, or too small to be split.
            DependencyMissing: the package is not installed.
        """
        try:
            import reasoning_gym
        except ImportError as error:
            raise DependencyMissing("reasoning-gym", "gym") from error
        version = getattr(reasoning_gym, "__version__", "")
        self._entries = Entries(reasoning_gym, name=name, size=max(size, evaluation_size), seed=seed)
        self._limit_s = limit_of(timeout_s)
        self._near = NearLimit()
        self.num_workers = num_workers
        self.num_prompts = size
        self.num_evaluation_prompts = evaluation_size
        stated = f"{version} {name} {size} {evaluation_size} {seed} {self._limit_s:g}"
        self.digest: Digest = bytes_digest(f"reasoning_gym 5 {stated}".encode())
        job = {
            "kind": "gym", "name": name, "size": max(size, evaluation_size), "seed": seed, "version": version,
            "timeout_s": timeout_s, "sandbox": sandbox,
        }  # fmt: skip
        # The worker counts; this ends a worker that does not: it starts what scores once more, and asks it twice.
        patience_s = 4 * SERVE_TIMEOUT_S + PATIENCE * timeout_s
        self.pool = RewardPool(job, timeout_s=patience_s, num_workers=num_workers)
        # A wrong name and a data set too small to be split are told at the start, not in the middle of a run.
        self._entry(0, False)
        self._entry(0, True)
        if not sandbox:
            _LOG.warning(
                "task.sandbox is false: a completion of reasoning_gym:%s may run any code as the user of this service",
                name,
            )

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return _prompt(index, self._entry(index, False))

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return _prompt(index, self._entry(index, True))

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The data set's own score in [0, 1]; 0 where its verifier raises or does not end in time.

        Raises:
            ConfigError: completions cannot be scored here, such as without a sandbox.
            RewardError: the prompt is not of this data set, or what scores does not start again; that is not a score.
        """
        try:
            reply = self.pool.ask({"index": prompt.index, "prompt": prompt.text, "completion": answer_of(completion)})
        except LoadFailed as error:
            action = "docs/rewards.md says what a sandbox needs, and what task.sandbox = false gives away"
            raise ConfigError("task.name", str(error), action=action) from error
        except RewardError as error:
            raise RewardError(f"the reward of prompt {prompt.index} failed: {error}") from error
        if reply["share"] > NEAR:
            self._near.add(prompt.index, completion)
        return (RewardPart(name=_PART, value=float(reply["value"])),)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        """Whether the score took nearly all its time."""
        return Doubts(near=self._near.names(_PART, prompt.index, completion))

    def close(self) -> None:
        """Kill the processes, with what runs inside."""
        self.pool.close()

    def _entry(self, index: int, held_out: bool) -> Any:
        try:
            return self._entries.find(index, held_out)
        except NoEntries as error:
            raise ConfigError("task.name", str(error)) from error


def _prompt(index: int, entry: Any) -> Prompt:
    return Prompt(index=index, text=entry["question"], answer=str(entry["answer"]))
