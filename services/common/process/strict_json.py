"""JSON for other programs: RFC 8259 has no NaN, no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Write plain values; a number that is not finite is null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
