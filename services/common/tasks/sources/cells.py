"""Dataset cells by name, as texts, kinds and JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from heterorl.common.tasks.task import Measure, Prompt

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
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str) if _is_written(value) else ""
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
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
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


def json_value(value: Any) -> Any:
    """A cell as JSON holds it, for other processes."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


def lengths_of(prompts: Sequence[Prompt], measure: Measure) -> npt.NDArray[np.int64]:
    """Tokens of each prompt; -1 where the template refuses it."""
    return np.array([-1 if length is None else length for length in measure(prompts)], np.int64)
