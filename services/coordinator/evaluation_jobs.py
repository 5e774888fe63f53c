"""Evaluations of versions on sets, whose held-out prompts are assignments (groups/work_assignments.py).

A held-out prompt (HELD_OUT or more) is a row until it is answered or its evaluation ends. When all are out, an idle
site gets other sites' prompts; the first answer counts.

    open     planned; a newer one of its set replaces it while no site has begun it
    running  a site with the version and the set's data began it; each prompt is an assignment until it is answered
    over     every prompt is answered (done), or a newer one was begun and no site has the version (incomplete),
             or the operator removed the set (incomplete)

A version has at most one evaluation of each set. At the end of a run only the last version is evaluated. A prompt
counts once; scores are durable when they are acknowledged. The end keeps the summary and deletes the prompts.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from heterorl.common.errors import InvalidRequest
from heterorl.common.evaluation.evaluation_sets import PlannedSetConfig
from heterorl.common.evaluation.summary import summarize
from heterorl.common.types.common import Digest, SiteId, value_of_row
from heterorl.common.types.evaluation import (
    HELD_OUT,
    MAX_HELD_OUT,
    Evaluation,
    EvaluationDraws,
    EvaluationSet,
    EvaluationSpec,
    EvaluationState,
    EvaluationSummary,
    PromptResult,
    ScoredSample,
)
from heterorl.common.types.rollout import WorkAssignment
from heterorl.coordinator.groups import work_assignments
from heterorl.coordinator.groups.work_assignments import MAX_HOLDERS, holder_name, lease_rows
from heterorl.coordinator.sites.sites import Holder
from heterorl.coordinator.store.database import NAMES, Connection

_ROW = "job, task_set, version, state_root, draws, state FROM evaluation_jobs JOIN versions USING (version)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An evaluation that is not over."""

    id: int
    spec: EvaluationSpec
    is_begun: bool


def plan(
    connection: Connection, sets: Sequence[PlannedSetConfig], *, version: int, now: float, is_last: bool = False
) -> None:
    """Plan a published version's evaluations at wall time `now`; repeatable.
    `is_last`: the run ends with it."""
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
    """Delete the evaluations of abandoned versions."""
    for version in versions:
        for (job,) in connection.execute("SELECT job FROM evaluation_jobs WHERE version = ?", (version,)).fetchall():
            forget_prompts(connection, job)
        connection.execute("DELETE FROM evaluation_jobs WHERE version = ?", (version,))


def end_removed(connection: Connection, sets: Sequence[str], *, now: float) -> None:
    """End evaluations of removed sets; delete those not begun."""
    rows = connection.execute(
        f"SELECT job, state FROM evaluation_jobs WHERE state IN ('open', 'running') AND task_set NOT IN {NAMES}",
        (json.dumps(sets),),
    ).fetchall()
    for job, state in rows:
        if state == "open":
            connection.execute("DELETE FROM evaluation_jobs WHERE job = ?", (job,))
        else:
            found = scores_of(connection, job)
            end(connection, job, EvaluationState.INCOMPLETE, scores=found, summary=found.summed_up(), now=now)


def forget_prompts(connection: Connection, job: int) -> None:
    """Delete the prompts of an evaluation and their results."""
    connection.execute("DELETE FROM evaluation_results WHERE job = ?", (job,))
    forget(connection, numbers_of(job))


def is_pending(connection: Connection) -> bool:
    """Whether an evaluation is not over."""
    row = connection.execute("SELECT 1 FROM evaluation_jobs WHERE state IN ('open', 'running') LIMIT 1").fetchone()
    return row is not None


def numbers_of(job: int) -> range:
    """The assignments of an evaluation, one for each held-out prompt in order."""
    first = HELD_OUT + job * MAX_HELD_OUT
    return range(first, first + MAX_HELD_OUT)


def job_of(assignment: int) -> int:
    """The evaluation of an assignment."""
    return (assignment - HELD_OUT) // MAX_HELD_OUT


def find(connection: Connection, job: int) -> Job | None:
    """A running evaluation, or None."""
    row = connection.execute(f"SELECT {_ROW} WHERE job = ? AND state = 'running'", (job,)).fetchone()
    return None if row is None else _job(row)


def hand_out(
    connection: Connection,
    holder: Holder,
    *,
    policy_version: int,
    sets: Mapping[str, EvaluationSet],
    request_id: str,
    only: int | None,
    count: int,
    digests: Mapping[str, str],
) -> tuple[Job | None, list[WorkAssignment], str]:
    """Lease held-out prompts of the site's version; returns evaluation, prompts and reason.

    At the end of the run `only` is the version to evaluate; an evaluation without prompts is the one to wait for.
    `digests` are the configured task digests of sets; for other sets the first site's digest counts.
    """
    again = work_assignments.handed_before(connection, holder, request_id)
    if again:
        return find(connection, job_of(again[0].id)), again, "given to this request before"
    rows = connection.execute(
        f"SELECT {_ROW} WHERE state IN ('open', 'running') AND is_abandoned = 0 ORDER BY state DESC, job"
    ).fetchall()
    jobs = [_job(row) for row in rows]
    if not jobs:
        return None, [], "nothing is to be evaluated"
    has_set = [job for job in jobs if job.spec.task_set in sets]
    if not has_set:
        return None, [], f"the site has no set that is to be evaluated, such as {jobs[0].spec.task_set}"
    known = {**dict(connection.execute("SELECT task_set, task_digest FROM evaluation_sets").fetchall()), **digests}
    stated = {name: each.task_digest for name, each in sets.items()}
    right = [job for job in has_set if known.get(job.spec.task_set) in (None, stated[job.spec.task_set])]
    if not right:
        name = has_set[0].spec.task_set
        return None, [], f"the task of set {name} is another one at this site than the run evaluates"
    usable = [job for job in right if job.spec.version == policy_version and only in (None, job.spec.version)]
    for job in usable:
        if not job.is_begun:
            _begin(connection, job, sets[job.spec.task_set])
    # A prompt that another site holds only when no set has an open one.
    for from_others in (False, True):
        for job in usable:
            handed = hand_out_held_out(
                connection, numbers_of(job.id), from_others=from_others, holder=holder, count=count,
                request_id=request_id,
            )  # fmt: skip
            if handed:
                return job, handed, "of the version that the site has"
    newer = [job for job in right if policy_version < job.spec.version == only]
    return newer[0] if newer else None, [], "no prompt is left of the version that the site has"


def over(
    connection: Connection, *, in_use: Callable[[], Collection[int]] | None, is_ending: bool
) -> list[tuple[int, EvaluationState]]:
    """Evaluations that are over and not summed up, and how they ended.

    `in_use` gives the versions that sites have (None: unknown). `is_ending`: the run waits only for the last version.
    """
    rows = connection.execute(
        "SELECT job, version, EXISTS (SELECT 1 FROM evaluation_jobs n WHERE n.task_set = j.task_set"
        " AND n.version > j.version AND n.state IN ('running', 'done')) FROM evaluation_jobs j WHERE state = 'running'"
    ).fetchall()
    ended = []
    for job, version, is_followed in rows:
        if not has_any(connection, numbers_of(job)):
            ended.append((job, EvaluationState.DONE))
        elif is_followed and (is_ending or (in_use is not None and version not in in_use())):
            ended.append((job, EvaluationState.INCOMPLETE))
    return ended


def draws_of(text: str) -> EvaluationDraws:
    """The draws in a column of the store."""
    return EvaluationDraws(**json.loads(text))


def _begin(connection: Connection, job: Job, stated: EvaluationSet) -> None:
    """Open assignments for the prompts; the first site's task becomes the set's."""
    draws = job.spec.draws
    wanted = min(draws.num_prompts, stated.num_prompts)
    connection.execute(
        "INSERT INTO evaluation_sets VALUES (?, ?) ON CONFLICT DO NOTHING", (job.spec.task_set, stated.task_digest)
    )
    connection.execute(
        "UPDATE evaluation_jobs SET state = 'running', wanted = ?, task_digest = ? WHERE job = ?",
        (wanted, stated.task_digest, job.id),
    )
    open_held_out(connection, numbers_of(job.id)[:wanted], seed=draws.seed)


def _job(row: tuple[Any, ...]) -> Job:
    job, task_set, version, root, draws, state = row
    spec = EvaluationSpec(task_set=task_set, version=version, state_root=Digest(root), draws=draws_of(draws))
    return Job(id=job, spec=spec, is_begun=state == "running")


_LISTED = "job, version, task_set, draws, state, wanted, task_digest, planned, ended, summary, sites"
_SUMMARY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The stored scores of an evaluation."""

    draws: str
    rows: list[tuple[int, str]]
    sites: list[tuple[str, int]]

    def summed_up(self) -> EvaluationSummary:
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
    """A stored evaluation: the summary if it has ended, else its scores."""

    row: tuple[Any, ...]
    scores: Scores | None

    def evaluation(self) -> Evaluation:
        version, task_set, draws, state, wanted, task_digest, planned, ended, summary_text, sites_text = self.row[1:]
        if self.scores is None:
            summary, sites = value_of_row(EvaluationSummary, json.loads(summary_text)), json.loads(sites_text)
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
) -> list[tuple[Job, PromptResult]]:
    """Count a site's results of unanswered prompts; finished evaluations are ignored.
    Raises InvalidRequest: the prompt was not leased to this site, or other weights or draws were used."""
    jobs: dict[int, Job | None] = {}
    new = []
    for result in results:
        number = job_of(result.assignment)
        if number not in jobs:
            jobs[number] = find(connection, number)
        job = jobs[number]
        prompt, is_over = held_out_of(connection, result.assignment, holder)
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
        work_assignments.answer(connection, [result.assignment])
        scores = json.dumps([(one.reward, one.num_tokens, int(one.is_truncated)) for one in result.samples])
        connection.execute("INSERT INTO evaluation_results VALUES (?, ?, ?, ?)", (job.id, prompt, holder[0], scores))
        new.append((job, result))
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
    connection: Connection, job: int, state: EvaluationState, *, scores: Scores, summary: EvaluationSummary, now: float
) -> None:
    """End an evaluation with its scores' summary.
    Nothing happens if it has ended or more scores came."""
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
    """Evaluations by version and set.
    A full page ends with a whole version, if it has more than one."""
    rows = connection.execute(
        f"SELECT {_LISTED} FROM evaluation_jobs WHERE version > ? AND ? IN ('', task_set)"
        " ORDER BY version, task_set LIMIT ?",
        (after_version, task_set, limit + 1),
    ).fetchall()
    if len(rows) > limit:
        last = rows[-1][1]
        rows = [row for row in rows if row[1] != last] or rows[:limit]
    return [Listed(row=row, scores=None if row[_SUMMARY] else scores_of(connection, row[0])) for row in rows]


def newest_done(connection: Connection, sets: Sequence[str]) -> dict[str, Evaluation]:
    """The newest finished evaluation of each set."""
    found = {}
    for name in sets:
        row = connection.execute(
            f"SELECT {_LISTED} FROM evaluation_jobs WHERE task_set = ? AND state = 'done'"
            " ORDER BY version DESC LIMIT 1",
            (name,),
        ).fetchone()
        if row is not None:
            found[name] = Listed(row=row, scores=None).evaluation()
    return found


MAX_SEEN = 64
"""Unanswered held-out prompts that a question looks at, twice, if none is open."""


def open_held_out(connection: Connection, numbers: range, *, seed: int) -> None:
    """Open an assignment for each held-out prompt of an evaluation."""
    connection.executemany(
        "INSERT INTO work (assignment, prompt_index, seed, site, incarnation, is_leased, holders)"
        " VALUES (?, ?, ?, '', '', 0, '[]')",
        [(number, index, seed) for index, number in enumerate(numbers)],
    )


def hand_out_held_out(
    connection: Connection, numbers: range, *, holder: Holder, count: int, request_id: str, from_others: bool
) -> list[WorkAssignment]:
    """Lease open held-out prompts of an evaluation.
    With `from_others`, some that fewer than MAX_HOLDERS other sites had."""
    if from_others:
        rows = _held_by_others(connection, numbers, holder=holder, count=count, request_id=request_id)
    else:
        rows = connection.execute(
            "SELECT assignment, prompt_index, seed, holders FROM work WHERE is_leased = 0 AND assignment >= ?"
            " AND assignment < ? ORDER BY assignment LIMIT ?",
            (numbers.start, numbers.stop, count),
        ).fetchall()
    return lease_rows(connection, rows, holder, request_id)


def _held_by_others(
    connection: Connection, numbers: range, *, holder: Holder, count: int, request_id: str
) -> list[tuple[int, int, int, str]]:
    """Unanswered prompts that the site may take as well.

    It looks at the MAX_SEEN lowest ones, then at as many from a place that the request's id decides: every site may
    hold all of them, and each question is answered on the store's thread.
    """
    found: list[tuple[int, int, int, str]] = []
    first = numbers.start
    for _ in range(2):
        seen = connection.execute(
            "SELECT assignment, prompt_index, seed, holders FROM work WHERE assignment >= ? AND assignment < ?"
            " ORDER BY assignment LIMIT ?",
            (first, numbers.stop, MAX_SEEN),
        ).fetchall()
        others = [(row, json.loads(row[3])) for row in seen]
        found += [row for row, names in others if holder_name(*holder) not in names and len(names) < MAX_HOLDERS]
        if len(found) >= count or len(seen) < MAX_SEEN:
            break
        (last,) = connection.execute(
            "SELECT max(assignment) FROM work WHERE assignment < ?", (numbers.stop,)
        ).fetchone()
        first = seen[-1][0] + 1
        first += zlib.crc32(f"{holder_name(*holder)}/{request_id}".encode()) % max(1, last - first + 1)
    return found[:count]


def held_out_of(connection: Connection, assignment: int, holder: Holder) -> tuple[int | None, bool]:
    """The prompt of a held-out assignment if the site held it.
    Also returns whether the assignment is answered or over."""
    row = connection.execute("SELECT prompt_index, holders FROM work WHERE assignment = ?", (assignment,)).fetchone()
    if row is None:
        return None, True
    return (int(row[0]) if holder_name(*holder) in json.loads(row[1]) else None), False


def has_any(connection: Connection, numbers: range) -> bool:
    """Whether one of these assignments is unanswered."""
    row = connection.execute(
        "SELECT 1 FROM work WHERE assignment >= ? AND assignment < ? LIMIT 1", (numbers.start, numbers.stop)
    ).fetchone()
    return row is not None


def forget(connection: Connection, numbers: range) -> None:
    """Forget assignments of held-out prompts."""
    connection.execute("DELETE FROM work WHERE assignment >= ? AND assignment < ?", (numbers.start, numbers.stop))
