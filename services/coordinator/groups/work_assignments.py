"""Assignments: prompts leased to sites, terms, prompts returned without a group.

Store operations.

    work        holders, returned (JSON: counted returns by site), open_from (assignments below it are new ones first)
    returners   site, accepted (its groups at its newest counted return), num_returns (counted since such a group)
    ledger      closed/<reason>    assignments closed without a group

An assignment is a row until its group is accepted, so no prompt is lost. Expired or returned ones are handed out first,
with the same prompt and seed. The newest MAX_HOLDERS holders may still answer, once.

A row that gives no group, or an invalid or late one, waits for one version's assignments, then for twice as many, ...
After MAX_RETURNS counted returns it is closed, and a late group is dropped as surplus.

Terms are in memory, in monotonic seconds; a restart gives each lease a fresh one. The assignments of a silent site that
works ahead are away: they count against no site and go to others when their term ends.

A hostile site could close prompts by returning them. So only the newest holder's return counts, at most MAX_IN_ROW
times until a group of that site is taken. While several sites want work, two must have returned a prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.types.common import SiteId
from heterorl.common.types.evaluation import HELD_OUT
from heterorl.common.types.rollout import DropReason, GroupId, ReturnReason, WorkAssignment
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups import ledger, schedule
from heterorl.coordinator.groups.schedule import prompt_of, seed_of
from heterorl.coordinator.sites import incarnations
from heterorl.coordinator.sites.sites import Declared, Holder, Sites, declared
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import NUMBERS, Connection, get_meta, set_meta
from heterorl.coordinator.versions import lineage

_LOG = logging.getLogger(__name__)
REOPENED = {
    DropReason.STALE_AT_LEASE, DropReason.STALE_AT_COMMIT, DropReason.INVALID, DropReason.UNKNOWN_VERSION,
    DropReason.WRONG_DIGEST, DropReason.LINEAGE_ABANDONED, DropReason.QUARANTINED, DropReason.LOST_MEMBERS,
}  # fmt: skip
"""Drops after which the prompt is handed out again. After a drop of the learner (failed check, too long, not finite,
equal rewards) the same prompt and seed would fail again, and a site that does not cheat would be blamed."""
RETURNED = {
    DropReason.INVALID: ReturnReason.GROUP_INVALID, DropReason.STALE_AT_INGEST: ReturnReason.GROUP_STALE
}  # fmt: skip
"""Drops at arrival that count as a return: every group of the row may meet the same end."""
MAX_HOLDERS = 3
"""Sites that may answer an assignment: the holder and the two before it."""
MAX_EVALUATORS = 64
"""The same of a held-out prompt: a refusal would end the evaluation of a slow site, and the first answer counts."""
REOPENED_AT_ONCE = 256
"""Rows of one statement. SQLite takes longer for each one the more pages its operation has changed before."""


def hand_out(
    connection: Connection, holder: Holder, *, count: int, num_prompts: int, config: CoordinatorConfig, request_id: str
) -> list[WorkAssignment]:
    """Lease `count` assignments to a site under a request's id.
    Open ones come first, then new ones of the window. `Deadlines.begin` states their `lease_s`."""
    first = int(get_meta(connection, "next_assignment") or 0)
    rows = connection.execute(
        "SELECT assignment, prompt_index, seed, holders FROM work WHERE is_leased = 0 AND open_from <= ?"
        " AND assignment < ? ORDER BY assignment LIMIT ?",
        (first, HELD_OUT, count),
    ).fetchall()
    handed = lease_rows(connection, rows, holder, request_id)
    chosen, last = schedule.choose_prompts(
        connection, first, count - len(handed), num_prompts=num_prompts, seed=config.seed, config=config.difficulty
    )
    new = [
        WorkAssignment(id=assignment, prompt_index=prompt, seed=seed_of(assignment, seed=config.seed), lease_s=0.0)
        for assignment, prompt in chosen
    ]
    names = json.dumps([holder_name(*holder)])
    connection.executemany(
        "INSERT INTO work (assignment, prompt_index, seed, site, incarnation, is_leased, holders, request_id)"
        " VALUES (?, ?, ?, ?, ?, 1, ?, ?)",
        [(each.id, each.prompt_index, each.seed, *holder, names, request_id) for each in new],
    )
    if new:
        set_meta(connection, "next_assignment", str(last))
    return [*handed, *new]


def handed_before(connection: Connection, holder: Holder, request_id: str) -> list[WorkAssignment]:
    """Assignments of a repeated request that the site still holds."""
    if not request_id:
        return []
    rows = connection.execute(
        "SELECT assignment, prompt_index, seed FROM temp.out_work o JOIN work USING (assignment)"
        " WHERE o.site = ? AND o.incarnation = ? AND o.request_id = ? ORDER BY assignment",
        (*holder, request_id),
    )
    return [WorkAssignment(id=number, prompt_index=prompt, seed=seed, lease_s=0.0) for number, prompt, seed in rows]


def lookup(connection: Connection, wanted: Sequence[tuple[int, GroupId]]) -> dict[int, tuple[int | None, bool]]:
    """Each assignment's prompt, and whether it has its group.
    The prompt is None unless the named group's site held it."""
    following = int(get_meta(connection, "next_assignment") or 0)
    numbers = json.dumps([assignment for assignment, _ in wanted])
    rows = {
        assignment: (prompt, holders)
        for assignment, prompt, holders in connection.execute(
            f"SELECT assignment, prompt_index, holders FROM work WHERE assignment IN {NUMBERS}", (numbers,)
        ).fetchall()
    }
    found: dict[int, tuple[int | None, bool]] = {}
    for assignment, group_id in wanted:
        prompt, holders = rows.get(assignment, (None, "[]"))
        is_holder = holder_name(group_id.site, group_id.incarnation) in json.loads(holders)
        found[assignment] = (
            int(prompt) if is_holder and assignment < following else None,
            prompt is None and assignment < following,
        )
    return found


def answer(connection: Connection, assignments: Sequence[int]) -> None:
    """Remove assignments that have their groups; each is named once."""
    cursor = connection.execute(f"DELETE FROM work WHERE assignment IN {NUMBERS}", (json.dumps(assignments),))
    assert cursor.rowcount == len(assignments), "admission checked that the assignments are open"


def reopen(connection: Connection, assignments: Sequence[int]) -> None:
    """Hand the assignments of dropped groups out again.
    Prompts and seeds follow from the run's seed."""
    (num_prompts, seed) = (int(get_meta(connection, key) or 0) for key in ("num_prompts", "seed"))
    for first in range(0, len(assignments), REOPENED_AT_ONCE):
        some = [
            (each, prompt_of(each, num_prompts=num_prompts, seed=seed), seed_of(each, seed=seed))
            for each in assignments[first : first + REOPENED_AT_ONCE]
        ]
        marks = ", ".join(["(?, ?, ?, '', '', 0, '[]')"] * len(some))
        connection.execute(
            "INSERT INTO work (assignment, prompt_index, seed, site, incarnation, is_leased, holders)"
            f" VALUES {marks} ON CONFLICT DO NOTHING",
            list(itertools.chain.from_iterable(some)),
        )


def put_behind(connection: Connection, assignment: int, *, at_least: int) -> None:
    """Put an open assignment behind as many new ones as followed it.
    So a failing row comes ever more rarely."""
    following = int(get_meta(connection, "next_assignment") or 0)
    connection.execute(
        "UPDATE work SET open_from = ? WHERE assignment = ? AND is_leased = 0",
        (following + max(at_least, following - assignment), assignment),
    )


def give_back(connection: Connection, holder: Holder, assignments: Sequence[int]) -> None:
    """Open the holder's assignments; it may not answer them any more."""
    wanted = json.dumps([assignment for assignment in assignments if assignment < 2**63])
    rows = connection.execute(
        "SELECT assignment, holders FROM work WHERE site = ? AND incarnation = ? AND is_leased = 1"
        f" AND assignment IN {NUMBERS}",
        (*holder, wanted),
    ).fetchall()
    own = holder_name(*holder)
    connection.executemany(
        "UPDATE work SET is_leased = 0, holders = ? WHERE assignment = ?",
        [(json.dumps([name for name in json.loads(names) if name != own]), each) for each, names in rows],
    )


def held_by(
    connection: Connection, assignments: Sequence[int], holder: Holder
) -> list[tuple[int, int, dict[str, int]]]:
    """Training assignments among these that the holder has, in order.
    Each comes with its prompt and its counted returns by site."""
    rows = connection.execute(
        "SELECT assignment, prompt_index, returned FROM work WHERE site = ? AND incarnation = ? AND is_leased = 1"
        f" AND assignment IN {NUMBERS} ORDER BY assignment",
        (*holder, json.dumps([each for each in assignments if each < HELD_OUT])),
    ).fetchall()
    return [(assignment, prompt, json.loads(returned)) for assignment, prompt, returned in rows]


def keep_only(connection: Connection, held: Collection[int], holder: Holder) -> None:
    """Open the holder's assignments outside `held`, which its restarted process lost."""
    rows = connection.execute(
        "SELECT assignment FROM temp.out_work WHERE site = ? AND incarnation = ?", holder
    ).fetchall()
    kept = set(held)
    lost = [assignment for (assignment,) in rows if assignment not in kept]
    give_back(connection, holder, lost)


def open_held(connection: Connection, site: SiteId) -> None:
    """Open all assignments of a site; it may still answer them."""
    rows = connection.execute("SELECT assignment FROM temp.out_work WHERE site = ?", (site,)).fetchall()
    expire(connection, [assignment for (assignment,) in rows])


def expire(connection: Connection, assignments: Sequence[int]) -> None:
    """Open assignments whose lease expired; their holders may still answer them."""
    connection.execute(
        f"UPDATE work SET is_leased = 0 WHERE is_leased = 1 AND assignment IN {NUMBERS}", (json.dumps(assignments),)
    )


def holder_name(site: str, incarnation: str) -> str:
    """A holder's name in `work.holders`."""
    return f"{site}/{incarnation}"


def lease_rows(
    connection: Connection, rows: Sequence[tuple[int, int, int, str]], to: Holder, request_id: str
) -> list[WorkAssignment]:
    """Lease rows to a holder; the earliest of too many leaves."""
    holder = holder_name(*to)
    for assignment, _, _, holders in rows:
        most = MAX_EVALUATORS if assignment >= HELD_OUT else MAX_HOLDERS
        names = [*(name for name in json.loads(holders) if name != holder), holder][-most:]
        connection.execute(
            "UPDATE work SET is_leased = 1, site = ?, incarnation = ?, holders = ?, request_id = ?"
            " WHERE assignment = ?",
            (*to, json.dumps(names), request_id, assignment),
        )
    return [WorkAssignment(id=number, prompt_index=prompt, seed=seed, lease_s=0.0) for number, prompt, seed, _ in rows]


MAX_RETURNS = 3
MAX_IN_ROW = 32
"""Returns of a site that count until a group of it is taken."""
_MAX_DOUBLINGS = 16


def is_hopeless(returned: Mapping[str, int], *, is_shared: bool) -> bool:
    """Whether counted returns by site close an assignment.
    `is_shared` while several sites want work."""
    return sum(returned.values()) >= MAX_RETURNS and (len(returned) > 1 or not is_shared)


def take_back(
    connection: Connection, holder: Holder, assignments: Sequence[int], reason: ReturnReason | None, *, at_least: int
) -> None:
    """Take assignments back from their holder; may close some.

    `reason` is why their rows give no group; returns with None are not counted. Returned ones wait for `at_least` new
    ones.
    """
    site = SiteId(holder[0])
    # A held-out prompt that cannot be drawn is answered without a score.
    give_back(connection, holder, [each for each in assignments if reason is None or each >= HELD_OUT])
    if reason is None:
        return
    is_shared = tallies.read(connection, "wanting") > 1
    accepted, in_row = _standing(connection, site)
    following = int(get_meta(connection, "next_assignment") or 0)
    for assignment, prompt, returned in held_by(connection, assignments, holder):
        if in_row < MAX_IN_ROW:
            in_row += 1
            returned[site] = returned.get(site, 0) + 1
            if is_hopeless(returned, is_shared=is_shared):
                answer(connection, [assignment])
                ledger.add(connection, ledger.closed_account_of(reason), 1)
                _LOG.warning(
                    "assignment %d is closed, correct prompt %d: no group in %d tries or more (last site=%s,"
                    " reason=%s); `heterorl check-config learner --prompt %d` shows its text",
                    assignment, prompt, MAX_RETURNS, site, reason.value, prompt,
                )  # fmt: skip
                continue
        give_back(connection, holder, [assignment])
        doublings = min(max(0, sum(returned.values()) - 1), _MAX_DOUBLINGS)
        connection.execute(
            "UPDATE work SET returned = ?, open_from = ? WHERE assignment = ?",
            (json.dumps(returned), following + (at_least << doublings), assignment),
        )
    connection.execute(
        "INSERT INTO returners VALUES (?, ?, ?) ON CONFLICT (site)"
        " DO UPDATE SET accepted = excluded.accepted, num_returns = excluded.num_returns",
        (site, accepted, in_row),
    )


def _standing(connection: Connection, site: SiteId) -> tuple[int, int]:
    (accepted,) = connection.execute("SELECT coalesce(sum(accepted), 0) FROM sites WHERE site = ?", (site,)).fetchone()
    row = connection.execute("SELECT accepted, num_returns FROM returners WHERE site = ?", (site,)).fetchone()
    in_row = int(row[1]) if row is not None and row[0] == accepted else 0
    return int(accepted), in_row


_HOLDER = "site = ? AND incarnation = ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Duration of an assignment from hand-out, and whether its holder is away."""

    seconds: float
    is_away: bool = False


def term_of(said: Declared, *, lease_s: float, is_silent: bool, is_replaced: bool) -> Term:
    """The term of a holder's assignments.
    `is_silent`: not seen for `lease_s`; `is_replaced` by a newer incarnation."""
    if is_silent and (is_replaced or said.ahead_s <= 0):
        # Its delay does not count: a dead process cannot deliver.
        return Term(seconds=lease_s)
    return Term(seconds=lease_s + said.delay_s + said.ahead_s, is_away=is_silent)


def next_look(said: Declared, term: Term, *, oldest: float, seen: float, lease_s: float, is_silent: bool) -> float:
    """Next instant when a holder's assignments may expire or go away."""
    ends = oldest + term.seconds
    if is_silent or (said.delay_s <= 0 and said.ahead_s <= 0):
        return ends
    if said.ahead_s > 0:
        return min(ends, seen + lease_s)
    return min(ends, max(seen, oldest) + lease_s)


class Deadlines:
    """The terms of assignments.
    `work_lease_s` is the term of a site without delay, `started` this process's begin."""

    def __init__(self, *, sites: Sites, work_lease_s: float, started: float) -> None:
        self._sites = sites
        self._work_lease_s = work_lease_s
        self._started = started
        # The run's contract never changes.
        self._trajectory_s: float | None = None

    def begin(
        self, connection: Connection, handed: Sequence[WorkAssignment], holder: Holder, now: float
    ) -> tuple[WorkAssignment, ...]:
        """Start the terms of new leases.
        Running terms stay, so no site keeps an assignment by asking again."""
        if not handed:
            return ()
        said = self._said(connection, holder)
        term_s = self._work_lease_s + said.delay_s + said.ahead_s
        connection.execute(f"UPDATE temp.out_work SET since = ? WHERE {_HOLDER} AND since IS NULL", (now, *holder))
        if said.ahead_s > 0:
            # Its earlier assignments may be away. The new ones are not, so the next look is at most one lease from now.
            connection.execute(
                f"UPDATE temp.holder SET due = ? WHERE {_HOLDER} AND due > ?",
                (now + self._work_lease_s, *holder, now + self._work_lease_s),
            )
        starts = (
            connection.execute("SELECT since FROM temp.out_work WHERE assignment = ?", (entry.id,)).fetchone()
            for entry in handed
        )
        return tuple(
            dataclasses.replace(entry, lease_s=max(0.0, term_s - (now - start)))
            for entry, (start,) in zip(handed, starts, strict=True)
        )

    def look(self, connection: Connection, now: float) -> None:
        """Reopen expired assignments; mark silent sites' assignments as away.
        Expired ones count against their holders."""
        due = connection.execute("SELECT site, incarnation FROM temp.holder WHERE due <= ?", (now,)).fetchall()
        for site, incarnation in due:
            self._look_at(connection, (site, incarnation), now)

    def holdings(self, connection: Connection, now: float) -> dict[Holder, tuple[int, int]]:
        """Each holder's assignments but held-out prompts, and how many are away now."""
        found = {}
        prompts = connection.execute(
            "SELECT site, incarnation, count(*), sum(is_away) FROM temp.out_work WHERE assignment >= ?"
            " GROUP BY site, incarnation",
            (HELD_OUT,),
        )
        held_out = {(site, incarnation): (count, gone) for site, incarnation, count, gone in prompts}
        rows = connection.execute("SELECT site, incarnation, held, away FROM temp.holder").fetchall()
        for site, incarnation, held, away in rows:
            holder = site, incarnation
            count, gone = held_out.get(holder, (0, 0))
            held, away = held - count, away - gone
            _, is_silent = self._silence(holder, now)
            is_away = is_silent and self._term(connection, holder, is_silent=True).is_away
            found[holder] = held, held if is_away else away
        return found

    def _look_at(self, connection: Connection, holder: Holder, now: float) -> None:
        connection.execute(f"UPDATE temp.out_work SET since = ? WHERE {_HOLDER} AND since IS NULL", (now, *holder))
        seen, is_silent = self._silence(holder, now)
        term = self._term(connection, holder, is_silent=is_silent)
        expired, oldest = [], math.inf
        rows = connection.execute(f"SELECT assignment, since FROM temp.out_work WHERE {_HOLDER} ORDER BY since", holder)
        for assignment, since in rows:
            if since + term.seconds > now:
                oldest = since
                break
            expired.append(assignment)
        rows.close()
        expire(connection, expired)
        tallies.note_expired(connection, holder[0], sum(each < HELD_OUT for each in expired))
        if oldest == math.inf:
            return
        if term.is_away:
            gone = connection.execute(
                f"UPDATE temp.out_work SET is_away = 1 WHERE {_HOLDER} AND is_away = 0", holder
            ).rowcount
            if gone:
                _LOG.info(
                    "site %s is silent: its %d assignments count against no site and go to others at their deadline",
                    holder[0], gone,
                )  # fmt: skip
        said = self._said(connection, holder)
        again = next_look(said, term, oldest=oldest, seen=seen, lease_s=self._work_lease_s, is_silent=is_silent)
        connection.execute(f"UPDATE temp.holder SET due = ? WHERE {_HOLDER}", (again, *holder))

    def _term(self, connection: Connection, holder: Holder, *, is_silent: bool) -> Term:
        is_replaced = is_silent and incarnations.is_replaced(connection, *holder)
        said = self._said(connection, holder)
        return term_of(said, lease_s=self._work_lease_s, is_silent=is_silent, is_replaced=is_replaced)

    def _said(self, connection: Connection, holder: Holder) -> Declared:
        """A holder's declaration; the contract's trajectory time counts as delay."""
        if self._trajectory_s is None and (contract := lineage.read_contract(connection)) is not None:
            self._trajectory_s = contract.trajectory_s
        said = declared(connection, holder)
        return dataclasses.replace(said, delay_s=said.delay_s + (self._trajectory_s or 0.0))

    def _silence(self, holder: Holder, now: float) -> tuple[float, bool]:
        """When a holder was seen last, and whether it is silent.
        One never seen is silent a lease after the start."""
        seen = self._sites.seen_at(holder)
        if seen is None:
            return self._started, now - self._started >= self._work_lease_s
        return seen, now - seen > self._work_lease_s
