"""What came of evaluations: counted once, summed up when the last prompt is there, listed; as store operations.

Guarantees: a prompt of an evaluation counts once, whoever delivers it and however often; scores are durable when they
are acknowledged; when an evaluation is done its prompts are forgotten and their summary stays.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from heterorl.common.errors import InvalidRequest
from heterorl.common.evaluation.summary import summarize
from heterorl.common.types.common import SiteId
from heterorl.common.types.evaluation import (
    Estimate,
    Evaluation,
    EvaluationDraws,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
    PromptResult,
    ScoredSample,
)
from heterorl.coordinator.evaluations.plan import draws_of

_ROW = "job, version, task_set, draws, state, wanted, task_digest, planned, ended, summary, sites"


def count(
    connection: sqlite3.Connection,
    *,
    part: int,
    site: str,
    incarnation: str,
    state_root: str,
    results: Sequence[PromptResult],
    now: float,
) -> tuple[int | None, tuple[PromptResult, ...], int]:
    """Count what a site delivers of a part; returns the evaluation, what was new of it, and its version.

    Raises:
        InvalidRequest: the part was never this site's, was drawn with other weights, or a prompt is none of it.
    """
    row = connection.execute(
        "SELECT job, first, count, holders, draws, version, state_root FROM evaluation_parts"
        " JOIN evaluation_jobs USING (job) JOIN versions USING (version) WHERE part = ?",
        (min(part, 2**63 - 1),),
    ).fetchone()
    if row is None:
        # Done and summed up before, or given up with its version: nothing of it counts any more.
        return None, (), -1
    job, first, size, holders, draws_text, version, root = row
    if f"{site}/{incarnation}" not in json.loads(holders):
        raise InvalidRequest(f"part: the site was never given part {part}")
    if state_root != root:
        raise InvalidRequest(f"state_root: part {part} is of version {version}, which has another one")
    draws = draws_of(draws_text)
    for result in results:
        if not first <= result.prompt_index < first + size:
            raise InvalidRequest(f"results: prompt {result.prompt_index} is none of part {part}")
        if len(result.samples) != draws.num_samples:
            raise InvalidRequest(f"results: {len(result.samples)} completions, {draws.num_samples} are wanted")
    new = tuple(
        result
        for result in results
        if connection.execute(
            "INSERT OR IGNORE INTO evaluation_results VALUES (?, ?, ?, ?)",
            (job, result.prompt_index, site, _scores(result)),
        ).rowcount
    )
    (num_there,) = connection.execute(
        "SELECT count(*) FROM evaluation_results WHERE job = ? AND prompt_index >= ? AND prompt_index < ?",
        (job, first, first + size),
    ).fetchone()
    if num_there == size:
        connection.execute("UPDATE evaluation_parts SET is_done = 1, is_leased = 0 WHERE part = ?", (part,))
        left = connection.execute(
            "SELECT 1 FROM evaluation_parts WHERE job = ? AND is_done = 0 LIMIT 1", (job,)
        ).fetchone()
        if left is None:
            _end(connection, job, EvaluationState.DONE, now=now)
            _give_up_older(connection, job, now=now)
    return job, new, version


def listed(
    connection: sqlite3.Connection, *, task_set: str = "", after_version: int = -1, limit: int = 1000
) -> tuple[Evaluation, ...]:
    """Evaluations by version and set; all of the last version or none of it, unless it is the first."""
    rows = connection.execute(
        f"SELECT {_ROW} FROM evaluation_jobs WHERE version > ? AND ? IN ('', task_set)"
        " ORDER BY version, task_set LIMIT ?",
        (after_version, task_set, limit + 1),
    ).fetchall()
    if len(rows) > limit:
        last = rows[-1][1]
        rows = [row for row in rows if row[1] != last] or rows[:limit]
    return tuple(_evaluation(connection, row) for row in rows)


def newest_done(connection: sqlite3.Connection, sets: Sequence[str]) -> dict[str, Evaluation]:
    """The newest evaluation that is done, of each of the sets."""
    found = {}
    for name in sets:
        row = connection.execute(
            f"SELECT {_ROW} FROM evaluation_jobs WHERE task_set = ? AND state = 'done' ORDER BY version DESC LIMIT 1",
            (name,),
        ).fetchone()
        if row is not None:
            found[name] = _evaluation(connection, row)
    return found


def _end(connection: sqlite3.Connection, job: int, state: EvaluationState, *, now: float) -> None:
    (draws,) = connection.execute("SELECT draws FROM evaluation_jobs WHERE job = ?", (job,)).fetchone()
    summary, sites = _summed_up(connection, job, draws_of(draws))
    connection.execute(
        "UPDATE evaluation_jobs SET state = ?, ended = ?, summary = ?, sites = ? WHERE job = ?",
        (state.value, now, json.dumps(asdict(summary)), json.dumps(sites), job),
    )
    for table in ("evaluation_results", "evaluation_parts"):
        connection.execute(f"DELETE FROM {table} WHERE job = ?", (job,))


def _give_up_older(connection: sqlite3.Connection, job: int, *, now: float) -> None:
    """End what was begun of the same set before and is with nobody: the newer number is here."""
    rows = connection.execute(
        "SELECT o.job FROM evaluation_jobs o JOIN evaluation_jobs n ON n.task_set = o.task_set"
        " WHERE n.job = ? AND o.version < n.version AND o.state = 'running' AND NOT EXISTS"
        " (SELECT 1 FROM evaluation_parts p WHERE p.job = o.job AND is_leased = 1)",
        (job,),
    ).fetchall()
    for (older,) in rows:
        _end(connection, older, EvaluationState.INCOMPLETE, now=now)


def _summed_up(
    connection: sqlite3.Connection, job: int, draws: EvaluationDraws
) -> tuple[EvaluationSummary, list[tuple[str, int]]]:
    rows = connection.execute(
        "SELECT prompt_index, scores FROM evaluation_results WHERE job = ? ORDER BY prompt_index", (job,)
    )
    results = [
        PromptResult(
            prompt_index=index,
            samples=tuple(
                ScoredSample(reward=reward, num_tokens=num_tokens, is_truncated=bool(is_truncated))
                for reward, num_tokens, is_truncated in json.loads(scores)
            ),
        )
        for index, scores in rows
    ]
    sites = connection.execute(
        "SELECT site, count(*) FROM evaluation_results WHERE job = ? GROUP BY site ORDER BY site", (job,)
    ).fetchall()
    summary = summarize(results, num_samples=draws.num_samples, pass_reward=draws.pass_reward)
    return summary, sites


def _scores(result: PromptResult) -> str:
    return json.dumps([(one.reward, one.num_tokens, int(one.is_truncated)) for one in result.samples])


def _evaluation(connection: sqlite3.Connection, row: tuple[Any, ...]) -> Evaluation:
    job, version, task_set, draws_text, state, wanted, task_digest, planned, ended, summary_text, sites_text = row
    draws = draws_of(draws_text)
    if summary_text:
        summary, sites = _summary(json.loads(summary_text)), json.loads(sites_text)
    else:
        summary, sites = _summed_up(connection, job, draws)
    return Evaluation(
        version=version,
        task_set=task_set,
        state=EvaluationState(state),
        num_wanted=wanted,
        draws=draws,
        task_digest=task_digest,
        summary=summary,
        sites=tuple((SiteId(site), num) for site, num in sites),
        planned_time=planned,
        ended_time=ended,
    )


def _summary(values: dict[str, Any]) -> EvaluationSummary:
    average = values.pop("average")
    passes = values.pop("passes")
    return EvaluationSummary(
        **values,
        average=None if average is None else Estimate(**average),
        passes=tuple(PassEstimate(k=entry["k"], estimate=Estimate(**entry["estimate"])) for entry in passes),
    )
