"""The result of one check, for people and programs.

Every fault has a remedy.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text


class Level(enum.StrEnum):
    """How a check ended; only FAIL makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


_STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red", Level.SKIP: "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A finding, and its remedy for WARN and FAIL."""

    name: str
    level: Level
    finding: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.level in {Level.WARN, Level.FAIL}), self


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a measurement failed: kind for judgements, the system's message, its remedy."""

    kind: str
    detail: str = ""
    action: str = ""


TIMEOUT = "timeout"
"""Kind of a measurement that exceeded its time limit."""
UNSTATED = "unstated"
"""Kind of a contract that cannot be measured before the run's statement."""


def _at(level: Level, name: str, finding: str, remedy: str = "") -> Check:
    return Check(name=name, level=level, finding=finding, remedy=remedy)


ok, warn, fail, skip = (functools.partial(_at, level) for level in (Level.OK, Level.WARN, Level.FAIL, Level.SKIP))


def exit_code(checks: Sequence[Check]) -> int:
    """1 if a check failed, else 0."""
    return int(any(check.level is Level.FAIL for check in checks))


def checks_json(checks: Sequence[Check]) -> dict[str, Any]:
    """All checks as plain JSON values."""
    return {"is_ok": exit_code(checks) == 0, "checks": [dataclasses.asdict(entry) for entry in checks]}


def checks_table(checks: Sequence[Check], *, title: str) -> Table:
    """All checks as a table; text of other machines is shown literally."""
    table = Table("check", "", "finding", title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for entry in checks:
        finding = Text(entry.finding)
        if entry.remedy:
            finding.append(f"\n-> {entry.remedy}", style="bold")
        table.add_row(Text(entry.name), Text(entry.level.value, _STYLE[entry.level]), finding)
    return table
