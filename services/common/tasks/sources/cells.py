"""Dataset cells as text, prompt length filters, and the split of mixtures.

No source trains on prompts that another holds out. Files are compared by question, without system prompts; arithmetic
tasks must hold out the same pairs. A file that repeats arithmetic prompts is not detected.
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
"""A cell that a row does not have."""
_LARGEST, _SMALLEST = 1e21, 1e-9
"""Numbers beyond are written with an exponent."""


def answer_text(value: Any) -> str:
    """Text of an answer; empty for null, NaN, blanks, lists of those."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, list | dict):
        # Such as tests of code.
        if not _is_written(value):
            return ""
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    if isinstance(value, float | Decimal):
        return _number(value)
    return str(value)


def _is_written(value: Any) -> bool:
    """Whether a cell, or anything in it, has a text."""
    if isinstance(value, dict):
        return any(map(_is_written, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_written, value))
    return bool(answer_text(value))


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
    """A cell by name or path (`reward_model.ground_truth`); ABSENT where none is."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return ABSENT
        value = value[part]
    return value


def kind_of(value: Any) -> str:
    """Kind of a cell or of a value in `where`."""
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, int | float):
        return "a number"
    return "text" if isinstance(value, str) else "neither text, number nor bool"


def refuse_other_kinds(name: str, wanted: Sequence[Any], kinds: Collection[str], cells: str) -> None:
    """Raise ConfigError where `where` compares cells with values of another kind."""
    if other := [value for value in wanted if kind_of(value) not in kinds]:
        problem = f"{cells}, and {other[0]!r} is {kind_of(other[0])}"[:300]
        raise ConfigError(f"task.data.where.{name}", problem, action="give values of the column's type")


def json_value(value: Any) -> Any:
    """A cell as JSON holds it, for other processes."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


_AT_ONCE = 4096
_LOG = logging.getLogger(__name__)


def short_prompts(
    count: int, prompt_at: Callable[[int], Prompt], *, most: int, measure: Measure | None
) -> npt.NDArray[np.bool_]:
    """Mask of unrefused prompts within `most` tokens; raises ConfigError without `measure`."""
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
    """Tokens of each prompt; -1 where the template refuses it."""
    return np.array([-1 if length is None else length for length in measure(prompts)], np.int64)


@runtime_checkable
class Separable(Protocol):
    """A task over rows; task.question_of gives a row's question."""

    num_prompts: int

    def held_out_questions(self) -> Iterable[str]: ...

    def without(self, questions: Collection[str]) -> Self: ...


def log_held_out(num: int, *, wanted: int, different: int) -> None:
    """Log if fewer prompts than configured are held out."""
    if num < wanted:
        _LOG.info(
            "task.evaluation_size is %d, but %d of %d different prompts are held out, at most half",
            wanted, num, different,
        )  # fmt: skip


def without_held_out(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Tasks without prompts that another holds out; raises ConfigError where none stays."""
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
