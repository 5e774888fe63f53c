"""The sets that a site has the data of: their tasks, with rewards in processes that can be killed. Loads data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from heterorl.common.errors import ConfigError
from heterorl.common.evaluation.config import EvaluationSetConfig
from heterorl.common.tasks.registry import TaskConfig, apart, build_task
from heterorl.common.tasks.task import Measure, Task
from heterorl.common.text.actions import Parser
from heterorl.common.text.conversation import Conversations, open_conversations
from heterorl.common.text.prompts import Prompter
from heterorl.common.types.evaluation import EvaluationSet

REWARD_WORKERS = 4
"""Where nobody says how many: completions end faster at a sampler than one process scores them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSet:
    """A set and its task."""

    name: str
    task: Task
    tool_parser: Parser | Literal["auto"] = "auto"
    conversations: Conversations | None = None
    """The environments of the task; None where no prompt has one."""

    def played(self, prompter: Prompter, end_token_ids: Collection[int]) -> Self:
        """The set with its environments, tried.

        Raises:
            ConfigError: one of them fails, or the template does not write what it says.
        """
        conversations = open_conversations(
            self.task, prompter, end_token_ids=end_token_ids, tool_parser=self.tool_parser
        )
        return replace(self, conversations=conversations)

    @property
    def stated(self) -> EvaluationSet:
        """What the coordinator is told of it."""
        return EvaluationSet(name=self.name, task_digest=self.task.digest, num_prompts=self.task.num_evaluation_prompts)


def with_workers(config: TaskConfig) -> TaskConfig:
    """A sampler's task: with its own number of processes where none is stated."""
    if "reward_workers" in config.model_fields_set:
        return config
    return config.model_copy(update={"reward_workers": REWARD_WORKERS})


def open_set(config: EvaluationSetConfig, *, measure: Measure | None, notes: Path | None) -> SiteSet:
    """Load a set's task.

    Args:
        config: of the set.
        measure: counts a prompt's tokens, for sets whose prompts are bounded.
        notes: file that keeps which commits branches of the hub stood at; None keeps none.

    Raises:
        ConfigError: its data cannot be read, or holds out nothing.
    """
    settings = with_workers(config.task)
    task = apart(build_task(settings, measure=measure, notes=notes), settings)
    if not task.num_evaluation_prompts:
        raise ConfigError(f"evaluation.{config.name}.task", "has no held-out prompts")
    return SiteSet(name=config.name, task=task, tool_parser=settings.tool_parser)
