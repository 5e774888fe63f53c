"""Rewards of a user's function, in worker processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError, RewardError, ServiceUnreachable
from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.rewards.worker_pool import PATIENCE, LoadFailed, WorkerPool
from heterorl.common.tasks.task import AnswerProblem, Prompt, RewardSource, Task, TaskWrapper, messages_json
from heterorl.common.types.common import peer_words
from heterorl.common.types.rollout import MAX_PART_NAME, MAX_PART_VALUE, MAX_REWARD_PARTS, RewardPart
from heterorl.common.wire.common_messages import bytes_digest


class FunctionReward(RewardSource):
    """Reward function `package.module:function`; `digest` covers its files."""

    def __init__(
        self, path: str, *, directory: Path, timeout_s: float, num_workers: int = 1, key: str = "task.reward"
    ) -> None:
        """Load the function once, from the directory or from installed packages.

        `timeout_s` is processor time for one completion; `key` names the function in the configuration. Raises
        ConfigError if it cannot be found, imported or called.
        """
        module, _, name = path.partition(":")
        if not all(word.isidentifier() for word in [*module.split("."), name]):
            raise ConfigError(key, f"{path!r} is not package.module:function", action=_EXAMPLE)
        job = {"kind": "function", "module": module, "name": name, "directory": str(directory)}
        self.pool = WorkerPool(job, timeout_s=PATIENCE * timeout_s, cpu_s=timeout_s, num_workers=num_workers)
        facts = loaded_facts(self.pool, path, key=key, path_key="task.reward_path")
        self.digest = bytes_digest(f"reward 5\n{path}\n{facts['digest']}".encode())
        self._key, self._path = key, path
        self._asks = None if facts["takes_all"] else tuple(facts["asks"])
        self._needs = tuple(facts["needs"])
        self._needs_answer = bool(facts["needs_answer"])
        # To TRL the answer is a column.
        self._answers = frozenset({"answer"} & set(facts["asks"]))
        self.num_files = int(facts["num_files"])
        self.place = str(facts["place"])
        self.num_workers = num_workers

    def answer_problem(self, prompt: Prompt) -> AnswerProblem | None:
        """Columns or answer that the function needs and the row lacks."""
        if missing := [name for name in self._needs if name not in prompt.columns]:
            there = ", ".join(map(str, prompt.columns)) or "no columns"
            problem = f"{self._path} asks for {', '.join(missing)}; the row has {there}"[:500]
            action = "name a parameter as a column is named, or give it a default"
            return AnswerProblem(key=self._key, text=problem, action=action)
        if self._needs_answer and not prompt.answer and not self._answers & set(prompt.columns):
            problem = f"the row has no answer, and {self._path} asks for one"
            action = "name the column of the answer, or give that parameter a default"
            return AnswerProblem(key="task.data.answer", text=problem, action=action)
        return None

    def close(self) -> None:
        self.pool.close()

    def _columns(self, prompt: Prompt) -> dict[str, Any]:
        wanted = prompt.columns if self._asks is None else self._asks
        return {name: prompt.columns[name] for name in wanted if name in prompt.columns}

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """The function's parts; raises RewardError where it fails or they are invalid."""
        request = {
            "prompt": prompt.text,
            "messages": messages_json(prompt),
            "is_conversation": bool(prompt.messages),
            "completion": answer_of(completion),
            "whole": completion,
            "answer": prompt.answer,
            "columns": self._columns(prompt),
        }
        try:
            reply = self.pool.ask(request)
        except RewardError as error:
            raise RewardError(f"the reward function failed on prompt {prompt.index}: {error}") from error
        try:
            return parts_of(reply["parts"])
        except RewardError as error:
            raise RewardError(f"the reward function returned {error}, on prompt {prompt.index}") from error


def loaded_facts(pool: WorkerPool, path: str, *, key: str, path_key: str) -> dict[str, Any]:
    """Start the first worker with a user's code; facts about it.

    `key` names the code in the configuration, `path_key` its directory.
    """
    try:
        return pool.start()
    except LoadFailed as error:
        if error.kind == "place":
            problem = f"{error}, nor among the packages that are installed here"
            raise ConfigError(key, problem, action=_PLACES.format(path_key)) from error
        if error.kind == "outage":
            raise ServiceUnreachable(key, f"{path}: {error}", action=START_IT) from error
        raise ConfigError(key, f"{path}: {error}", action="correct it and start again") from error
    except RewardError as error:
        raise ConfigError(key, f"{path}: {error}", action="see what it printed above") from error


def parts_of(values: Mapping[str, float]) -> tuple[RewardPart, ...]:
    """Parts that a user's code returned; raises RewardError for invalid ones."""
    parts = tuple(RewardPart(name=str(name), value=float(value)) for name, value in values.items())
    if not 1 <= len(parts) <= MAX_REWARD_PARTS:
        raise RewardError(f"{len(parts)} parts, 1 to {MAX_REWARD_PARTS} are allowed")
    for part in parts:
        # The coordinator would refuse a group with another name at every push.
        if len(part.name) > MAX_PART_NAME or not part.name.isprintable():
            name = peer_words(part.name, most=MAX_PART_NAME)
            raise RewardError(
                f"the name of a part, {name!r}, which is not at most {MAX_PART_NAME} printable characters"
            )
        if not math.isfinite(part.value):
            raise RewardError("a value that is not finite")
        # The learner refuses others, even with weight 0.
        if abs(part.value) > MAX_PART_VALUE:
            raise RewardError(f"{part.value:g} for {part.name}, at most {MAX_PART_VALUE:g} either way is allowed")
    return parts


class FunctionRewardTask(TaskWrapper):
    """A task with a user's reward function."""

    def __init__(self, task: Task, reward: FunctionReward) -> None:
        digest = bytes_digest(f"{task.digest}\nreward 2 {reward.digest}".encode())
        super().__init__(task, digest=digest, num_workers=reward.num_workers)
        self._reward = reward

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        return self._reward.score(prompt, completion)

    def answer_problem(self, prompt: Prompt) -> AnswerProblem | None:
        return self._reward.answer_problem(prompt)

    def close(self) -> None:
        self._reward.close()


_EXAMPLE = "for example mytask.rewards:score, a function f(prompt, completion, answer) in mytask/rewards.py"
START_IT = "correct it, or start the server that it needs; a service of heterorl tries again by itself"
_PLACES = "put the module next to the configuration file, name its directory in {}, or install it"
