"""Parts of evaluations handed out to sites and taken back, as store operations.

Guarantees: a part is with one site at a time; a site that ever had it may still answer, and what it answers counts if
nobody answered before. Terms lie in memory and affect liveness only: after a restart each begins anew.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from heterorl.common.types.common import Digest
from heterorl.common.types.evaluation import PART_SAMPLES, EvaluationPart, EvaluationSet
from heterorl.coordinator.evaluations.choice import Job
from heterorl.coordinator.evaluations.plan import draws_of
from heterorl.coordinator.store.engine import NUMBERS, Connection

_COLUMNS = "part, job, first, count, task_set, version, draws"


@dataclass(slots=True)
class Terms:
    """Since when parts are out, evaluations stand still, and nothing came back of them; instants of the monotonic
    clock."""

    out: dict[int, float] = field(default_factory=dict)
    moved: dict[int, float] = field(default_factory=dict)
    answered: dict[int, float] = field(default_factory=dict)

    def forget(self, job: int, parts: Iterable[int]) -> None:
        """Forget an evaluation that has ended."""
        self.moved.pop(job, None)
        self.answered.pop(job, None)
        for part in parts:
            self.out.pop(part, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessee:
    """Who asks, when, and for how long it is given something."""

    site: str
    incarnation: str
    terms: Terms
    lease_s: float
    now: float


def jobs(connection: Connection, terms: Terms, *, now: float) -> list[Job]:
    """All evaluations that are not done."""
    rows = connection.execute(
        "SELECT job, version, task_set, state, EXISTS (SELECT 1 FROM evaluation_parts p WHERE p.job = j.job"
        " AND is_leased = 0 AND is_done = 0) FROM evaluation_jobs j JOIN versions v USING (version)"
        " WHERE state IN ('open', 'running') AND v.is_abandoned = 0 ORDER BY job"
    ).fetchall()
    known = {row[0] for row in rows}
    terms.moved = {job: at for job, at in terms.moved.items() if job in known}
    terms.answered = {job: at for job, at in terms.answered.items() if job in known}
    return [
        Job(
            id=job,
            version=version,
            task_set=task_set,
            is_begun=state == "running",
            has_open=state == "open" or bool(has_open),
            idle_s=now - terms.moved.setdefault(job, now),
            silent_s=now - terms.answered.setdefault(job, now) if state == "running" else 0.0,
        )
        for job, version, task_set, state, has_open in rows
    ]


def digests(connection: Connection) -> dict[str, str]:
    """Digest of each set's task: as configured, or as the first site stated it."""
    return dict(connection.execute("SELECT task_set, task_digest FROM evaluation_sets").fetchall())


def begin(connection: Connection, job: Job, stated: EvaluationSet) -> None:
    """Cut an evaluation into parts, as long as the task has prompts; the first site's task becomes the set's."""
    (text,) = connection.execute("SELECT draws FROM evaluation_jobs WHERE job = ?", (job.id,)).fetchone()
    draws = draws_of(text)
    wanted = min(draws.num_prompts, stated.num_prompts)
    connection.execute(
        "INSERT INTO evaluation_sets VALUES (?, ?) ON CONFLICT DO NOTHING", (job.task_set, stated.task_digest)
    )
    connection.execute(
        "UPDATE evaluation_jobs SET state = 'running', wanted = ?, task_digest = ? WHERE job = ?",
        (wanted, stated.task_digest, job.id),
    )
    size = max(1, PART_SAMPLES // draws.num_samples)
    connection.executemany(
        "INSERT INTO evaluation_parts (job, first, count) VALUES (?, ?, ?)",
        [(job.id, first, min(size, wanted - first)) for first in range(0, wanted, size)],
    )


def hand_out(connection: Connection, job: int, lessee: Lessee, *, count: int) -> tuple[EvaluationPart, ...]:
    """Lease the first parts of an evaluation that are with nobody."""
    rows = connection.execute(
        "SELECT part, holders FROM evaluation_parts WHERE job = ? AND is_leased = 0 AND is_done = 0 ORDER BY part"
        " LIMIT ?",
        (job, count),
    ).fetchall()
    holder = f"{lessee.site}/{lessee.incarnation}"
    for part, holders in rows:
        names = json.dumps([*(name for name in json.loads(holders) if name != holder), holder])
        connection.execute(
            "UPDATE evaluation_parts SET is_leased = 1, site = ?, incarnation = ?, holders = ? WHERE part = ?",
            (lessee.site, lessee.incarnation, names, part),
        )
        lessee.terms.out[part] = lessee.now
    if rows:
        lessee.terms.moved[job] = lessee.now
    return _parts(connection, [part for part, _ in rows], lessee)


def held(connection: Connection, lessee: Lessee, *, known: Collection[int]) -> tuple[EvaluationPart, ...]:
    """Parts of one evaluation that are with a site and that it does not know of: the answer was lost, or it died."""
    rows = connection.execute(
        "SELECT part, job FROM evaluation_parts WHERE site = ? AND incarnation = ? AND is_leased = 1 ORDER BY part",
        (lessee.site, lessee.incarnation),
    ).fetchall()
    lost = [(part, job) for part, job in rows if part not in set(known)]
    of_first = [part for part, job in lost if job == lost[0][1]]
    for part in of_first:
        lessee.terms.out.setdefault(part, lessee.now)
    return _parts(connection, of_first, lessee)


def num_held(connection: Connection, *, site: str, incarnation: str) -> int:
    """Parts that are with a site."""
    (count,) = connection.execute(
        "SELECT count(*) FROM evaluation_parts WHERE site = ? AND incarnation = ? AND is_leased = 1",
        (site, incarnation),
    ).fetchone()
    return int(count)


def out(connection: Connection) -> list[tuple[int, str, str]]:
    """Every part that is with a site, and whose it is."""
    return connection.execute("SELECT part, site, incarnation FROM evaluation_parts WHERE is_leased = 1").fetchall()


def take_back(connection: Connection, parts: Sequence[int], terms: Terms) -> None:
    """Open parts that are with a site; it may still answer."""
    connection.executemany("UPDATE evaluation_parts SET is_leased = 0 WHERE part = ?", [(part,) for part in parts])
    for part in parts:
        terms.out.pop(part, None)


def give_back(connection: Connection, parts: Sequence[int], *, site: str, incarnation: str, terms: Terms) -> set[int]:
    """Open parts that this site holds; returns the evaluations that they are of."""
    jobs = set()
    for part in parts:
        row = connection.execute(
            "UPDATE evaluation_parts SET is_leased = 0 WHERE part = ? AND site = ? AND incarnation = ?"
            " AND is_leased = 1 RETURNING job",
            (min(part, 2**63 - 1), site, incarnation),
        ).fetchone()
        if row is not None:
            jobs.add(int(row[0]))
            terms.out.pop(part, None)
    return jobs


def _parts(connection: Connection, numbers: Sequence[int], lessee: Lessee) -> tuple[EvaluationPart, ...]:
    rows = connection.execute(
        f"SELECT {_COLUMNS}, state_root FROM evaluation_parts JOIN evaluation_jobs USING (job)"
        f" JOIN versions USING (version) WHERE part IN {NUMBERS} ORDER BY part",
        (json.dumps(list(numbers)),),
    ).fetchall()
    return tuple(
        EvaluationPart(
            id=part,
            task_set=task_set,
            version=version,
            state_root=Digest(root),
            draws=draws_of(draws),
            first_prompt=first,
            num_prompts=count,
            lease_s=max(0.0, lessee.terms.out[part] + lessee.lease_s - lessee.now),
        )
        for part, _, first, count, task_set, version, draws, root in rows
    )
