"""Which versions are evaluated on which sets, as store operations.

Guarantees: a version has at most one evaluation of each set; one that nobody has begun gives way to a newer one of its
set, and one that was begun gives way when nothing comes back of it for as long as a site may take, or at the end of a
run; the last version of a run is evaluated whatever its number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from heterorl.common.evaluation.config import PlannedSetConfig
from heterorl.common.types.evaluation import EvaluationDraws
from heterorl.coordinator.store.engine import Connection


def plan(
    connection: Connection,
    sets: Sequence[PlannedSetConfig],
    *,
    version: int,
    now: float,
    is_last: bool = False,
) -> None:
    """Plan the evaluations of a version that was published; said again, it changes nothing.

    Args:
        connection: the store.
        sets: as configured.
        version: in the lineage.
        now: wall time.
        is_last: no further version is expected.
    """
    for each in sets:
        if version % each.every_versions and not is_last:
            continue
        connection.execute(
            "DELETE FROM evaluation_jobs WHERE task_set = ? AND state = 'open' AND version < ?", (each.name, version)
        )
        connection.execute(
            "INSERT INTO evaluation_jobs (version, task_set, draws, state, planned)"
            " VALUES (?, ?, ?, 'open', ?) ON CONFLICT DO NOTHING",
            (version, each.name, json.dumps(asdict(each.draws)), now),
        )


def drop(connection: Connection, versions: Sequence[int]) -> None:
    """Forget the evaluations of versions that the lineage lost."""
    for version in versions:
        for table in ("evaluation_results", "evaluation_parts"):
            connection.execute(
                f"DELETE FROM {table} WHERE job IN (SELECT job FROM evaluation_jobs WHERE version = ?)", (version,)
            )
        connection.execute("DELETE FROM evaluation_jobs WHERE version = ?", (version,))


def is_pending(connection: Connection) -> bool:
    """Whether an evaluation is not done, nor given up."""
    row = connection.execute("SELECT 1 FROM evaluation_jobs WHERE state IN ('open', 'running') LIMIT 1").fetchone()
    return row is not None


def draws_of(text: str) -> EvaluationDraws:
    """Read draws as the store has them."""
    return EvaluationDraws(**json.loads(text))
