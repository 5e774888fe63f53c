"""The outcome of one check, for people and programs.

Guarantees: whatever is not in order comes with one sentence that says what to do.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text


class Level(enum.StrEnum):
    """How a check ended; FAIL alone makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


_STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red", Level.SKIP: "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found, and what to do about it."""

    name: str
    level: Level
    finding: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.level in {Level.WARN, Level.FAIL}), self


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why something could not be measured: a kind that decisions know, and the system's own words."""

    kind: str
    detail: str = ""


TIMEOUT = "timeout"
"""The kind of whatever did not end in its time."""


def ok(name: str, finding: str) -> Check:
    """All is well."""
    return Check(name=name, level=Level.OK, finding=finding)


def warn(name: str, finding: str, remedy: str) -> Check:
    """Works, but someone should look."""
    return Check(name=name, level=Level.WARN, finding=finding, remedy=remedy)


def fail(name: str, finding: str, remedy: str) -> Check:
    """Does not work like this."""
    return Check(name=name, level=Level.FAIL, finding=finding, remedy=remedy)


def skip(name: str, why: str) -> Check:
    """Not asked, because an earlier check failed or it does not concern this node."""
    return Check(name=name, level=Level.SKIP, finding=why)


def exit_code(checks: Sequence[Check]) -> int:
    """0 unless a check failed."""
    return int(any(check.level is Level.FAIL for check in checks))


def checks_json(checks: Sequence[Check]) -> dict[str, Any]:
    """All checks as plain JSON values."""
    rows = [
        {"name": entry.name, "level": entry.level.value, "finding": entry.finding, "remedy": entry.remedy}
        for entry in checks
    ]
    return {"is_ok": exit_code(checks) == 0, "checks": rows}


def checks_table(checks: Sequence[Check], *, title: str) -> Table:
    """All checks as a table; what other machines said is text, never markup."""
    table = Table("check", "", "finding", title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for entry in checks:
        finding = Text(entry.finding)
        if entry.remedy:
            finding.append(f"\n-> {entry.remedy}", style="bold")
        table.add_row(Text(entry.name), Text(entry.level.value, _STYLE[entry.level]), finding)
    return table
