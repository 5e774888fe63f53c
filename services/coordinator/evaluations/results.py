"""What came of evaluations: counted once, ended when the last prompt is there, listed; as store operations.

Guarantees: a prompt of an evaluation counts once, whoever delivers it and however often; scores are durable when they
are acknowledged; when an evaluation is done its prompts are forgotten and their summary stays. Statistics are computed
without a connection, so that nobody waits for the store meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from heterorl.common.errors import InvalidRequest
from heterorl.common.evaluation.summary import summarize
from heterorl.common.types.common import SiteId
from heterorl.common.types.evaluation import (
    Estimate,
    Evaluation,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
    PromptResult,
    ScoredSample,
)
from heterorl.coordinator.evaluations.plan import draws_of
from heterorl.coordinator.store.engine import Connection

_ROW = "job, version, task_set, draws, state, wanted, task_digest, planned, ended, summary, sites"
_SUMMARY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What was new of a delivery; `job` is None where its evaluation has ended."""

    job: int | None = None
    version: int = -1
    new: tuple[PromptResult, ...] = ()
    is_whole: bool = False
    """Whether every prompt of the evaluation is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of an evaluation as the store has them."""

    draws: str
    rows: list[tuple[int, str]]
    sites: list[tuple[str, int]]

    def summed_up(self) -> EvaluationSummary:
        """What they say."""
        draws = draws_of(self.draws)
        results = [
            PromptResult(
                prompt_index=index,
                samples=tuple(
                    ScoredSample(reward=reward, num_tokens=num_tokens, is_truncated=bool(is_truncated))
                    for reward, num_tokens, is_truncated in json.loads(scores)
                ),
            )
            for index, scores in self.rows
        ]
        return summarize(results, num_samples=draws.num_samples, pass_reward=draws.pass_reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An evaluation as the store has it: the summary of one that has ended, the scores of one that goes on."""

    row: tuple[Any, ...]
    scores: Scores | None

    def evaluation(self) -> Evaluation:
        """As it is told."""
        version, task_set, draws, state, wanted, task_digest, planned, ended, summary_text, sites_text = self.row[1:]
        if self.scores is None:
            summary, sites = _summary(json.loads(summary_text)), json.loads(sites_text)
        else:
            summary, sites = self.scores.summed_up(), self.scores.sites
        return Evaluation(
            version=version,
            task_set=task_set,
            state=EvaluationState(state),
            num_wanted=wanted,
            draws=draws_of(draws),
            task_digest=task_digest,
            summary=summary,
            sites=tuple((SiteId(site), num) for site, num in sites),
            planned_time=planned,
            ended_time=ended,
        )


def count(
    connection: Connection,
    *,
    part: int,
    site: str,
    incarnation: str,
    state_root: str,
    results: Sequence[PromptResult],
) -> Counted:
    """Count what a site delivers of a part.

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
        return Counted()
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
            "INSERT INTO evaluation_results VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (job, result.prompt_index, site, _scores(result)),
        ).rowcount
    )
    (num_there,) = connection.execute(
        "SELECT count(*) FROM evaluation_results WHERE job = ? AND prompt_index >= ? AND prompt_index < ?",
        (job, first, first + size),
    ).fetchone()
    is_whole = False
    if num_there == size:
        connection.execute("UPDATE evaluation_parts SET is_done = 1, is_leased = 0 WHERE part = ?", (part,))
        left = connection.execute(
            "SELECT 1 FROM evaluation_parts WHERE job = ? AND is_done = 0 LIMIT 1", (job,)
        ).fetchone()
        is_whole = left is None
    return Counted(job=job, version=version, new=new, is_whole=is_whole)


def whole(connection: Connection) -> list[int]:
    """Evaluations of which every prompt is there and that have not ended: a process died in between."""
    rows = connection.execute(
        "SELECT job FROM evaluation_jobs j WHERE state = 'running' AND NOT EXISTS"
        " (SELECT 1 FROM evaluation_parts p WHERE p.job = j.job AND is_done = 0)"
    )
    return [job for (job,) in rows]


def scores_of(connection: Connection, job: int) -> Scores:
    """All scores of an evaluation."""
    (draws,) = connection.execute("SELECT draws FROM evaluation_jobs WHERE job = ?", (job,)).fetchone() or ("",)
    return Scores(
        draws=draws,
        rows=connection.execute(
            "SELECT prompt_index, scores FROM evaluation_results WHERE job = ? ORDER BY prompt_index", (job,)
        ).fetchall(),
        sites=connection.execute(
            "SELECT site, count(*) FROM evaluation_results WHERE job = ? GROUP BY site ORDER BY site", (job,)
        ).fetchall(),
    )


def end(
    connection: Connection,
    job: int,
    state: EvaluationState,
    *,
    scores: Scores,
    summary: EvaluationSummary,
    now: float,
) -> tuple[list[int], list[int]]:
    """End an evaluation with what was computed of its scores; nothing where more came meanwhile or it has ended.

    Returns:
        its parts, and the evaluations that may give way: of the same set, begun before, and with nobody.
    """
    is_there = connection.execute(
        "SELECT 1 FROM evaluation_jobs j WHERE job = ? AND state = 'running' AND ? ="
        " (SELECT count(*) FROM evaluation_results r WHERE r.job = j.job) AND (? = 1 OR NOT EXISTS"
        " (SELECT 1 FROM evaluation_parts p WHERE p.job = j.job AND is_leased = 1))",
        (job, len(scores.rows), int(state is EvaluationState.DONE)),
    ).fetchone()
    if is_there is None:
        return [], []
    older = older_with_nobody(connection, job) if state is EvaluationState.DONE else []
    connection.execute(
        "UPDATE evaluation_jobs SET state = ?, ended = ?, summary = ?, sites = ? WHERE job = ?",
        (state.value, now, json.dumps(asdict(summary)), json.dumps(scores.sites), job),
    )
    parts = [part for (part,) in connection.execute("SELECT part FROM evaluation_parts WHERE job = ?", (job,))]
    for table in ("evaluation_results", "evaluation_parts"):
        connection.execute(f"DELETE FROM {table} WHERE job = ?", (job,))
    return parts, older


def older_with_nobody(connection: Connection, job: int) -> list[int]:
    """Evaluations of the same set that were begun for older versions, no part of which is with a site."""
    rows = connection.execute(
        "SELECT o.job FROM evaluation_jobs o JOIN evaluation_jobs n ON n.task_set = o.task_set"
        " WHERE n.job = ? AND o.version < n.version AND o.state = 'running' AND NOT EXISTS"
        " (SELECT 1 FROM evaluation_parts p WHERE p.job = o.job AND is_leased = 1)",
        (job,),
    ).fetchall()
    return [older for (older,) in rows]


def listed(connection: Connection, *, task_set: str = "", after_version: int = -1, limit: int = 1000) -> list[Listed]:
    """Evaluations by version and set; all of the last version or none of it, unless it is the first."""
    rows = connection.execute(
        f"SELECT {_ROW} FROM evaluation_jobs WHERE version > ? AND ? IN ('', task_set)"
        " ORDER BY version, task_set LIMIT ?",
        (after_version, task_set, limit + 1),
    ).fetchall()
    if len(rows) > limit:
        last = rows[-1][1]
        rows = [row for row in rows if row[1] != last] or rows[:limit]
    return [Listed(row=row, scores=None if row[_SUMMARY] else scores_of(connection, row[0])) for row in rows]


def newest_done(connection: Connection, sets: Sequence[str]) -> dict[str, Evaluation]:
    """The newest evaluation that is done, of each of the sets."""
    found = {}
    for name in sets:
        row = connection.execute(
            f"SELECT {_ROW} FROM evaluation_jobs WHERE task_set = ? AND state = 'done' ORDER BY version DESC LIMIT 1",
            (name,),
        ).fetchone()
        if row is not None:
            found[name] = Listed(row=row, scores=None).evaluation()
    return found


def _scores(result: PromptResult) -> str:
    return json.dumps([(one.reward, one.num_tokens, int(one.is_truncated)) for one in result.samples])


def _summary(values: dict[str, Any]) -> EvaluationSummary:
    average = values.pop("average")
    passes = values.pop("passes")
    return EvaluationSummary(
        **values,
        average=None if average is None else Estimate(**average),
        passes=tuple(PassEstimate(k=entry["k"], estimate=Estimate(**entry["estimate"])) for entry in passes),
    )
