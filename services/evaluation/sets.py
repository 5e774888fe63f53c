"""The sets that a command evaluates: from the configuration, or one that its options name. Loads tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from heterorl.common.errors import ConfigError
from heterorl.common.evaluation.config import EvaluationSetConfig
from heterorl.common.process.config import InvalidConfig, problems_of
from heterorl.common.tasks.task import Measure
from heterorl.common.types.evaluation import EvaluationDraws
from heterorl.sampler.config import SamplerConfig
from heterorl.sampler.evaluation.sets import SiteSet
from heterorl.sampler.evaluation.sets import open_set as open_site_set

FROM_TASK = "task"
"""Name of the set that is made of the run's own task where none is configured."""
_OF_SAMPLING = ("temperature", "top_p", "max_new_tokens")
"""Keys of [sampling] that this set takes where the file states them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSet(SiteSet):
    """A set whose data is loaded; `draws.num_prompts` is no more than it has."""

    draws: EvaluationDraws


def configured(config: SamplerConfig, *, names: Sequence[str], **changes: Any) -> tuple[EvaluationSetConfig, ...]:
    """The sets to evaluate: those of the configuration, or the task's own held-out prompts; each with the changes.

    The task's own prompts are drawn as [sampling] states, as far as it states how.

    Args:
        config: a sampler's.
        names: which of its sets; all where none is named.
        **changes: keys of a set that options override; None leaves the set's own.

    Raises:
        ConfigError: a name is not there, or a change cannot be.
    """
    sampling = config.sampling.model_dump(include=set(_OF_SAMPLING) & config.sampling.model_fields_set)
    sets = config.evaluation or (EvaluationSetConfig(name=FROM_TASK, task=config.task, **sampling),)
    known = {one.name: one for one in sets}
    for name in names:
        if name not in known:
            raise ConfigError("--only", f"there is no set {name}; there are {', '.join(known)}")
    stated = {key: value for key, value in changes.items() if value is not None}
    chosen = [known[name] for name in names] or list(sets)
    try:
        return tuple(EvaluationSetConfig.model_validate({**one.model_dump(), **stated}) for one in chosen)
    except ValidationError as error:
        raise InvalidConfig(problems_of(EvaluationSetConfig, error), source="the set") from error


def open_set(config: EvaluationSetConfig, *, measure: Measure | None = None, notes: Path | None = None) -> OpenSet:
    """Load a set's task, with its rewards in processes that can be killed.

    Args:
        config: of the set.
        measure: counts a prompt's tokens, for sets whose prompts are bounded.
        notes: see heterorl.common.tasks.registry.build_task.

    Raises:
        ConfigError: its data cannot be read, or holds out nothing.
    """
    found = open_site_set(config, measure=measure, notes=notes)
    num = min(config.num_prompts, found.task.num_evaluation_prompts)
    draws = dataclasses.replace(config.draws, num_prompts=num)
    return OpenSet(name=found.name, task=found.task, tool_parser=found.tool_parser, draws=draws)
