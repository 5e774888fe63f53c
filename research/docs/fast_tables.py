"""The vectorised lab beside the services' lab, from the file that `make bench-lab` writes -> tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from docs.markdown import table
from research.docs.lab_tables import RESULTS


def _found() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "fast.json").read_bytes())
    return found


def _cells() -> str:
    """A row for each run that both have made: its seconds and its last accuracy by each."""
    return table(
        ["run", "seconds, services", "seconds, fast", "last, services", "last, fast"],
        [
            [
                row["cell"],
                *(f"{row[key]:.1f}" for key in ("seconds_services", "seconds_fast")),
                *(f"{row[key]:.3f}" for key in ("last_services", "last_fast")),
            ]
            for row in _found()["rows"]
        ],
    )


def _arms() -> str:
    """A row for each method: its last accuracies' difference over seeds, and how much less time all runs took."""
    found = _found()
    return table(
        ["method", "seeds", "last, fast minus services", "standard error", "all runs, times less time"],
        [
            [
                arm["arm"],
                str(arm["seeds"]),
                f"{arm['difference']:+.3f}",
                f"{arm['standard_error']:.3f}",
                f"{found['times_faster']:.1f}",
            ]
            for arm in found["arms"]
        ],
    )


FAST: dict[str, Callable[[], str]] = {"fast": _cells, "fast-differences": _arms}
"""What a marker may name, and what is written there."""
