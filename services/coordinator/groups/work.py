"""Prompt groups handed out to samplers, as store operations.

Guarantees: every assignment is a row until its group is accepted, so no prompt is skipped but by a window of difficulty
(groups/difficulty.py) or because it gives no group (groups/returns.py); what expired or was given back for another
reason is handed out first, with the same prompt and seed; the newest holders whose lease ran out may still answer,
once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, GroupId
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.groups import difficulty
from heterorl.coordinator.groups.schedule import prompt_of, seed_of
from heterorl.coordinator.sites import quarantine
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.database import get_meta, set_meta
from heterorl.coordinator.store.dialect import NUMBERS

REOPENED = frozenset(
    {
        DropReason.STALE_AT_INGEST,
        DropReason.STALE_AT_LEASE,
        DropReason.STALE_AT_COMMIT,
        DropReason.INVALID,
        DropReason.UNKNOWN_VERSION,
        DropReason.WRONG_DIGEST,
        DropReason.LINEAGE_ABANDONED,
        DropReason.QUARANTINED,
        DropReason.LOST_MEMBERS,
        *quarantine.REJECTABLE,
    }
)
"""Drops after which the prompt is handed out again, so that no prompt is skipped. Not what the learner abandoned: a
group too long for it, one whose step is not finite or whose rewards are all equal would come back with the same prompt
and seed for ever."""
MAX_HOLDERS = 3
"""Sites that may answer an assignment: the one that holds it and the two before. A site that held it once and let it go
could otherwise wait for whoever generates now and answer first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """An assignment as handed out."""

    assignment: int
    prompt_index: int
    seed: int


def hand_out(
    connection: Connection,
    *,
    site: SiteId,
    incarnation: str,
    count: int,
    num_prompts: int,
    config: CoordinatorConfig,
    request_id: str = "",
) -> list[Handed]:
    """Lease `count` assignments to a site under a request's id: open ones first, then new ones of the window."""
    first = int(get_meta(connection, "next_assignment") or 0)
    rows = connection.execute(
        "SELECT assignment, prompt_index, seed, holders FROM work WHERE is_leased = 0 AND open_from <= ?"
        " ORDER BY assignment LIMIT ?",
        (first, count),
    ).fetchall()
    handed = []
    holder = _holder(site, incarnation)
    for assignment, prompt_index, sampling_seed, holders in rows:
        names_held = [*(name for name in json.loads(holders) if name != holder), holder][-MAX_HOLDERS:]
        connection.execute(
            "UPDATE work SET is_leased = 1, site = ?, incarnation = ?, holders = ?, request_id = ?"
            " WHERE assignment = ?",
            (site, incarnation, json.dumps(names_held), request_id, assignment),
        )
        handed.append(Handed(assignment=assignment, prompt_index=prompt_index, seed=sampling_seed))
    chosen, last = difficulty.choose(
        connection,
        first,
        count - len(handed),
        num_prompts=num_prompts,
        seed=config.seed,
        config=config.difficulty,
    )
    new = [
        Handed(assignment=assignment, prompt_index=prompt, seed=seed_of(assignment, seed=config.seed))
        for assignment, prompt in chosen
    ]
    names = json.dumps([holder])
    connection.executemany(
        "INSERT INTO work (assignment, prompt_index, seed, site, incarnation, is_leased, holders, request_id)"
        " VALUES (?, ?, ?, ?, ?, 1, ?, ?)",
        [(each.assignment, each.prompt_index, each.seed, site, incarnation, names, request_id) for each in new],
    )
    if new:
        set_meta(connection, "next_assignment", str(last))
    return [*handed, *new]


def handed_before(connection: Connection, *, site: SiteId, incarnation: str, request_id: str) -> list[Handed]:
    """What a request was given whose answer was lost, as far as the site still holds it."""
    if not request_id:
        return []
    rows = connection.execute(
        "SELECT assignment, prompt_index, seed FROM temp.out_work o JOIN work USING (assignment)"
        " WHERE o.site = ? AND o.incarnation = ? AND o.request_id = ? ORDER BY assignment",
        (site, incarnation, request_id),
    )
    return [Handed(assignment=number, prompt_index=prompt, seed=seed) for number, prompt, seed in rows]


def lookup(connection: Connection, assignment: int, group_id: GroupId) -> tuple[int | None, bool]:
    """(prompt of the assignment if this site ever held it, whether it has its group already)."""
    if assignment >= int(get_meta(connection, "next_assignment") or 0):
        return None, False
    row = connection.execute("SELECT prompt_index, holders FROM work WHERE assignment = ?", (assignment,)).fetchone()
    if row is None:
        return None, True
    return (int(row[0]) if _holder(group_id.site, group_id.incarnation) in json.loads(row[1]) else None), False


def answer(connection: Connection, assignment: int) -> None:
    """The assignment has its group."""
    row = connection.execute(
        "DELETE FROM work WHERE assignment = ? RETURNING prompt_index, seed", (assignment,)
    ).fetchone()
    assert row is not None, "admission checked that the assignment is open"


def lookup_all(connection: Connection, wanted: Sequence[tuple[int, GroupId]]) -> dict[int, tuple[int | None, bool]]:
    """What `lookup` says of many assignments, of which each is named with one group."""
    following = int(get_meta(connection, "next_assignment") or 0)
    numbers = json.dumps([assignment for assignment, _ in wanted])
    rows = {
        assignment: (prompt, holders)
        for assignment, prompt, holders in connection.execute(
            f"SELECT assignment, prompt_index, holders FROM work WHERE assignment IN {NUMBERS}",
            (numbers,),
        ).fetchall()
    }
    found: dict[int, tuple[int | None, bool]] = {}
    for assignment, group_id in wanted:
        prompt, holders = rows.get(assignment, (None, "[]"))
        is_holder = _holder(group_id.site, group_id.incarnation) in json.loads(holders)
        found[assignment] = (
            int(prompt) if is_holder else None,
            prompt is None and assignment < following,
        )
    return found


def answer_all(connection: Connection, assignments: Sequence[int]) -> None:
    """The assignments have their groups; each is named once."""
    cursor = connection.execute(f"DELETE FROM work WHERE assignment IN {NUMBERS}", (json.dumps(assignments),))
    assert cursor.rowcount == len(assignments), "admission checked that the assignments are open"


def reopen(connection: Connection, assignments: Sequence[int]) -> None:
    """Hand the assignments of dropped groups out again; prompts and seeds follow from the run's seed."""
    (num_prompts, seed) = (int(get_meta(connection, key) or 0) for key in ("num_prompts", "seed"))
    connection.executemany(
        "INSERT INTO work (assignment, prompt_index, seed, site, incarnation, is_leased, holders)"
        " VALUES (?, ?, ?, '', '', 0, '[]') ON CONFLICT DO NOTHING",
        [(each, prompt_of(each, num_prompts=num_prompts, seed=seed), seed_of(each, seed=seed)) for each in assignments],
    )


def reopen_held(connection: Connection, assignment: int, group_id: GroupId) -> None:
    """Take an assignment back from the site whose answer was refused; others' assignments stay."""
    give_back(connection, site=group_id.site, incarnation=group_id.incarnation, assignments=[assignment])


def put_behind(connection: Connection, assignment: int, *, at_least: int) -> None:
    """Let as many new assignments go before an open one as came after it: a row that fails again and again is handed
    out ever more rarely, and never alone."""
    following = int(get_meta(connection, "next_assignment") or 0)
    connection.execute(
        "UPDATE work SET open_from = ? WHERE assignment = ? AND is_leased = 0",
        (following + max(at_least, following - assignment), assignment),
    )


def give_back(connection: Connection, *, site: SiteId, incarnation: str, assignments: Sequence[int]) -> None:
    """Open assignments that the site holds and will not answer, nor may any more; those of others stay."""
    holder = _holder(site, incarnation)
    wanted = json.dumps([assignment for assignment in assignments if assignment < 2**63])
    rows = connection.execute(
        "SELECT assignment, holders FROM work WHERE site = ? AND incarnation = ? AND is_leased = 1"
        f" AND assignment IN {NUMBERS}",
        (site, incarnation, wanted),
    ).fetchall()
    connection.executemany(
        "UPDATE work SET is_leased = 0, holders = ? WHERE assignment = ?",
        [(json.dumps([name for name in json.loads(names) if name != holder]), each) for each, names in rows],
    )


def held_by(
    connection: Connection, assignment: int, *, site: SiteId, incarnation: str
) -> tuple[int, dict[str, int]] | None:
    """(prompt, counted returns by site) of an assignment that a site holds; None where it does not."""
    row = connection.execute(
        "SELECT prompt_index, returned FROM work WHERE assignment = ? AND site = ? AND incarnation = ?"
        " AND is_leased = 1",
        (min(assignment, 2**63 - 1), site, incarnation),
    ).fetchone()
    return None if row is None else (int(row[0]), json.loads(row[1]))


def keep_only(connection: Connection, held: Collection[int], *, site: SiteId, incarnation: str) -> None:
    """Open what the incarnation holds beside `held`: its process begins anew and has lost the rest."""
    rows = connection.execute(
        "SELECT assignment FROM temp.out_work WHERE site = ? AND incarnation = ?", (site, incarnation)
    ).fetchall()
    kept = set(held)
    lost = [assignment for (assignment,) in rows if assignment not in kept]
    give_back(connection, site=site, incarnation=incarnation, assignments=lost)


def open_held(connection: Connection, site: SiteId) -> None:
    """Open all assignments that a site holds, which it may still answer."""
    rows = connection.execute("SELECT assignment FROM temp.out_work WHERE site = ?", (site,)).fetchall()
    expire(connection, [assignment for (assignment,) in rows])


def expire(connection: Connection, assignments: Sequence[int]) -> None:
    """Open assignments whose lease ran out; their holders may still answer."""
    connection.execute(
        f"UPDATE work SET is_leased = 0 WHERE is_leased = 1 AND assignment IN {NUMBERS}", (json.dumps(assignments),)
    )


def _holder(site: str, incarnation: str) -> str:
    return f"{site}/{incarnation}"
