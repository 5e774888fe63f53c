"""Rows of data sets: what a cell says, which prompts are short enough, and what sources of a mixture hold out.

Guarantees: what one source holds out, none of the others trains on. Files are compared by question, whatever system
prompt stands before it; generated tasks of one kind must hold out the same pairs. A file that repeats what a generator
makes is not seen. One pass over the questions of a file, and memory for what is held out.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.arithmetic import NumberPairs
from heterorl.common.tasks.task import Measure, Prompt, Task

ABSENT = object()
"""Of a cell that a row does not have."""
_LARGEST, _SMALLEST = 1e21, 1e-9
"""Numbers beyond are written with an exponent."""


def written(value: Any) -> str:
    """The text of an answer; empty where the cell holds none: null, NaN, an infinity, or blanks."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, list | dict):
        # Tests of code, or rows of a table.
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    if isinstance(value, float | Decimal):
        return _number(value)
    return str(value)


def _number(value: float | Decimal) -> str:
    if not math.isfinite(value):
        return ""
    if not value:
        return "0"
    if isinstance(value, float) and not _SMALLEST <= abs(value) < _LARGEST:
        return repr(value)
    text = format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def cell_of(row: Mapping[str, Any], name: str) -> Any:
    """The cell of a name, or of a path such as `reward_model.ground_truth` into tables; ABSENT where there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return ABSENT
        value = value[part]
    return value


def plain(value: Any) -> Any:
    """A cell as JSON has it, for what reads it in another process."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


_AT_ONCE = 4096
_LOG = logging.getLogger(__name__)


def short_ones(
    count: int, prompt_at: Callable[[int], Prompt], *, most: int, measure: Measure | None
) -> npt.NDArray[np.bool_]:
    """Which of so many prompts have at most `most` tokens; those that the template refuses have no length.

    Raises:
        ConfigError: there is nothing to count with.
    """
    if measure is None:
        raise ConfigError("task.data.max_prompt_tokens", "counts tokens, and no tokenizer is here", action="remove it")
    keep = np.zeros(count, np.bool_)
    num_refused = 0
    for first in range(0, count, _AT_ONCE):
        some = [prompt_at(position) for position in range(first, min(first + _AT_ONCE, count))]
        lengths = lengths_of(some, measure)
        num_refused += int((lengths < 0).sum())
        keep[first : first + len(some)] = (lengths >= 0) & (lengths <= most)
    if num_long := count - int(keep.sum()) - num_refused:
        _LOG.warning(
            "task.data.max_prompt_tokens: %d of %d prompts have more than %d tokens and are left out",
            num_long, count, most,
        )  # fmt: skip
    if num_refused:
        _LOG.warning("task.data: the template refuses %d of %d prompts, which are left out", num_refused, count)
    return keep


def lengths_of(prompts: Sequence[Prompt], measure: Measure) -> npt.NDArray[np.int64]:
    """Tokens of each, -1 where the template refuses it."""
    return np.array([-1 if length is None else length for length in measure(prompts)], np.int64)


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


def log_held_out(num: int, *, wanted: int, different: int) -> None:
    """Say where fewer prompts are held out than were asked for: half of a data set stays for training."""
    if num < wanted:
        _LOG.info(
            "task.evaluation_size = %d, and %d of %d different prompts are held out: at most half of them",
            wanted, num, different,
        )  # fmt: skip


def separated(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks by label, before rewards and system prompts, without the training prompts that another one holds out.

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
