"""What a cell of a data set says, as a person writes it: numbers without a tail, and absence in each of its forms."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

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
