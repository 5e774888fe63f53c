"""A run as a report sees it, wherever it was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation
from heterorl.common.types.run import LedgerCounts, with_changes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteTotals:
    """One site over the whole run: groups by what became of them."""

    site: str
    engines: tuple[str, ...]
    accepted: int
    dropped: int
    incarnations: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A run from its files; None or empty for what a file would have said that is not there.

    `reports` are all steps in order, applied or not; `versions` rows have `version`, `bytes`, `full_bytes`;
    `published` are (version, seconds since the epoch).
    """

    run_id: str
    sources: tuple[Path, ...]
    reports: tuple[StepReport, ...]
    versions: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...] = ()
    published: tuple[tuple[int, float], ...] = ()
    num_abandoned: int = 0
    ledger: LedgerCounts | None = None
    sites: tuple[SiteTotals, ...] = ()
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The learner's run.json: `heterorl_version` and `config`."""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_live: bool = False
    sets: tuple[Evaluation, ...] = ()
    """What samplers evaluated, by version and set."""


def newer_facts(known: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The facts of the learner's own directory, where it has some, with the changes that the coordinator knows."""
    return with_changes(known, own or known, words="", step=0)
