"""What came of evaluations: counted once, ended, listed; as store operations.

Guarantees: a prompt of an evaluation counts once, whoever delivers it and however often; scores are durable when they
are acknowledged; when an evaluation is over its prompts are forgotten and their summary stays. Statistics are computed
without a connection, so that nobody waits for the store meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from heterorl.common.errors import InvalidRequest
from heterorl.common.evaluation.summary import summarize
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.evaluation import (
    Estimate,
    Evaluation,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
    PromptResult,
    ScoredSample,
)
from heterorl.coordinator.evaluations.jobs import Job, draws_of, find, forget_prompts, job_of
from heterorl.coordinator.groups import work
from heterorl.coordinator.sites.sites import Holder
from heterorl.coordinator.store.engine import Connection

_ROW = "job, version, task_set, draws, state, wanted, task_digest, planned, ended, summary, sites"
_SUMMARY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A result that had not been counted before, and the evaluation that it is of."""

    job: Job
    result: PromptResult


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
    connection: Connection, holder: Holder, *, state_root: Digest, results: Sequence[PromptResult]
) -> list[Counted]:
    """Count what a site delivers of prompts that are not answered; what is over counts no more.

    Raises:
        InvalidRequest: a prompt was never this site's, or was drawn with other weights or otherwise.
    """
    jobs: dict[int, Job | None] = {}
    new = []
    for result in results:
        number = job_of(result.assignment)
        if number not in jobs:
            jobs[number] = find(connection, number)
        job = jobs[number]
        prompt, is_over = work.held_out_of(connection, result.assignment, holder)
        if is_over or job is None:
            continue
        spec = job.spec
        if prompt != result.prompt_index:
            raise InvalidRequest(
                f"results: assignment {result.assignment} was not given to the site for prompt {result.prompt_index}"
            )
        if state_root != spec.state_root:
            raise InvalidRequest(f"state_root: the prompt is of version {spec.version}, which has another one")
        if len(result.samples) != spec.draws.num_samples:
            raise InvalidRequest(f"results: {len(result.samples)} completions, {spec.draws.num_samples} are wanted")
        work.answer(connection, [result.assignment])
        connection.execute(
            "INSERT INTO evaluation_results VALUES (?, ?, ?, ?)", (job.id, prompt, holder[0], _scores(result))
        )
        new.append(Counted(job=job, result=result))
    return new


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
) -> None:
    """End an evaluation with what was computed of its scores; not where more came meanwhile, or it has ended."""
    is_there = connection.execute(
        "SELECT 1 FROM evaluation_jobs j WHERE job = ? AND state = 'running'"
        " AND ? = (SELECT count(*) FROM evaluation_results r WHERE r.job = j.job)",
        (job, len(scores.rows)),
    ).fetchone()
    if is_there is None:
        return
    connection.execute(
        "UPDATE evaluation_jobs SET state = ?, ended = ?, summary = ?, sites = ? WHERE job = ?",
        (state.value, now, json.dumps(asdict(summary)), json.dumps(scores.sites), job),
    )
    forget_prompts(connection, job)


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
