"""Deadlines of leased assignments, and assignments away with a silent site.

In memory. The assignments of a silent site that works ahead are away: they count against no site and go to others when
their term ends. A look reads only the holders that are due. A restart gives each lease a fresh term. Times are
monotonic seconds.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from heterorl.common.types.evaluation import HELD_OUT
from heterorl.common.types.rollout import WorkAssignment
from heterorl.coordinator.groups import work_assignments
from heterorl.coordinator.sites import incarnations, quotas
from heterorl.coordinator.sites.sites import Declared, Holder, Sites, declared
from heterorl.coordinator.store.database import Connection
from heterorl.coordinator.versions import lineage

_LOG = logging.getLogger(__name__)
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
        work_assignments.expire(connection, expired)
        quotas.note_expired(connection, holder[0], sum(each < HELD_OUT for each in expired))
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
