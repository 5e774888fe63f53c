"""When assignments that are handed out run out: terms in memory, which affect liveness only.

Belongs to the store's thread: terms are read and written by store operations alone. The table of work says what is
leased, and a lease whose beginning this process does not know (it restarted, or an operation was undone) gets a fresh
term. Times are instants of the monotonic clock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from heterorl.common.types.rollout import WorkAssignment
from heterorl.coordinator.groups.work import Handed
from heterorl.coordinator.sites.sites import Holder, Sites, delay_s


class Deadlines:
    """The terms of assignments; `work_lease_s` is the term of a site without delay."""

    def __init__(self, *, sites: Sites, work_lease_s: float) -> None:
        self._sites = sites
        self._work_lease_s = work_lease_s
        self._leased_at: dict[int, float] = {}

    def begin(
        self, connection: sqlite3.Connection, handed: Sequence[Handed], holder: Holder, now: float
    ) -> tuple[WorkAssignment, ...]:
        """Start the terms of new leases; those that run go on, so that no site keeps one by asking again."""
        term_s = self._work_lease_s + delay_s(connection, holder)
        starts = [self._leased_at.setdefault(entry.assignment, now) for entry in handed]
        return tuple(
            WorkAssignment(
                id=entry.assignment,
                prompt_index=entry.prompt_index,
                seed=entry.seed,
                lease_s=max(0.0, start + term_s - now),
            )
            for entry, start in zip(handed, starts, strict=True)
        )

    def expired(self, connection: sqlite3.Connection, leased: Mapping[int, Holder], now: float) -> list[int]:
        """Those of the leased assignments whose term ended; they are forgotten, and count against their holders."""
        terms = {holder: self._work_lease_s + self._grace_s(connection, holder, now) for holder in set(leased.values())}
        self._leased_at = {assignment: self._leased_at.get(assignment, now) for assignment in leased}
        found = [number for number, start in self._leased_at.items() if start + terms[leased[number]] <= now]
        for assignment in found:
            del self._leased_at[assignment]
            self._sites.shares.note_expired(leased[assignment][0])
        return found

    def _grace_s(self, connection: sqlite3.Connection, holder: Holder, now: float) -> float:
        """What its delay adds to the terms of a site, while it says that it lives; one that died delivers nothing."""
        silence_s = self._sites.silence_s(holder, now)
        is_silent = silence_s is None or silence_s > self._work_lease_s
        return 0.0 if is_silent else delay_s(connection, holder)
