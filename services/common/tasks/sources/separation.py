"""Sources of a mixture kept apart: what one of them holds out, none of the others trains on.

Guarantees: files are compared by question, whatever system prompt stands before it; generated tasks of one kind must
hold out the same pairs. A file that repeats what a generator makes is not seen. One pass over the questions of a file,
and memory for what is held out.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, Self, runtime_checkable

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.number_pairs import NumberPairs
from heterorl.common.tasks.task import Task

_LOG = logging.getLogger(__name__)


@runtime_checkable
class Separable(Protocol):
    """A task whose prompts are rows; questions are those of heterorl.common.tasks.messages.question_of."""

    num_prompts: int

    def held_out_questions(self) -> Iterable[str]:
        """The questions of all held-out prompts."""
        ...

    def without(self, questions: Collection[str]) -> Self:
        """The same task with fewer training prompts; there may be none left."""
        ...


def say_held_out(num: int, *, wanted: int, different: int) -> None:
    """Say where fewer prompts are held out than were asked for: half of a data set stays for training."""
    if num < wanted:
        _LOG.info(
            "task.evaluation_size = %d, and %d of %d different prompts are held out: at most half of them",
            wanted, num, different,
        )  # fmt: skip


def separated(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks by label, without the training prompts that another one holds out.

    Args:
        tasks: as they are built, before rewards and system prompts.

    Raises:
        ConfigError: nothing is left to train on, or two generated tasks hold out different pairs of numbers.
    """
    _refuse_other_pairs(tasks)
    rows = {label: task for label, task in tasks.items() if isinstance(task, Separable)}
    held_out = {label: frozenset(task.held_out_questions()) for label, task in rows.items()} if len(rows) > 1 else {}
    kept: dict[str, Task] = {}
    for label, task in tasks.items():
        kept[label] = task
        if not (isinstance(task, Separable) and held_out):
            continue
        left = task.without(frozenset().union(*(those for other, those in held_out.items() if other != label)))
        if not left.num_prompts:
            problem = "other sources hold out every prompt of it"
            raise ConfigError(f"task.sources, {label}", problem, action="name another split, or take it out")
        if gone := task.num_prompts - left.num_prompts:
            _LOG.warning("task.sources, %s: %d prompts are held out by another source, and not trained on", label, gone)
            kept[label] = left
    return kept


def _refuse_other_pairs(tasks: Mapping[str, Task]) -> None:
    first: dict[int, tuple[str, int]] = {}
    for label, task in tasks.items():
        if not isinstance(task, NumberPairs):
            continue
        # Sums and progressions ask the same questions.
        known, shift = first.setdefault(task.digits, (label, task.shift))
        if shift != task.shift:
            raise ConfigError(
                f"task.sources, {label}.seed",
                f"holds out other numbers of {task.digits} digits than {known}, which trains on them",
                action="give both the same seed",
            )
