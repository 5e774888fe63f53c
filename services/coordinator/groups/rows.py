"""Groups of one operation taken in together: what they share is asked once and written once; as store operations.

The usual group continues its site's watermark, lost no member and is accepted. Such groups only gather here: rows,
accounts, marks and answered work are written when the operation ends, or before anything else looks at the store. Every
other group goes the way of one group alone (heterorl.coordinator.groups.intake).

Guarantees: outcomes and the store afterwards are those of the same groups taken one after another.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GroupId, PushOutcome, PushStatus, SealedGroup
from heterorl.coordinator.groups import intake, ledger, work
from heterorl.coordinator.groups.admission import Facts, judge, size_problem
from heterorl.coordinator.groups.intake import Arrival, Surroundings
from heterorl.coordinator.sites import lost_members, watermark
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.connection import Connection

ROWS_AT_ONCE = 64
_Incarnation = tuple[SiteId, str]


def take_all(connection: Connection, groups: Sequence[Arrival], around: Surroundings) -> list[PushOutcome]:
    """Take groups in, each with its own outcome."""
    rows = _Rows(connection, around)
    rows.look_up(groups)
    outcomes = [rows.take(arrived) for arrived in groups]
    rows.write()
    return outcomes


class _Rows:
    """Groups that are accepted and not yet written, and what was read for them."""

    def __init__(self, connection: Connection, around: Surroundings) -> None:
        self._connection = connection
        self._around = around
        self._accepted: list[Arrival] = []
        self._answered: set[int] = set()
        self._marks: dict[_Incarnation, int | None] = {}
        self._waiting_bytes: dict[SiteId, int] = {}
        self._facts: dict[tuple[object, ...], Facts] = {}
        self._work: dict[int, tuple[int | None, bool]] = {}
        self._asked: dict[int, GroupId] = {}

    def look_up(self, groups: Sequence[Arrival]) -> None:
        """Read the assignments of groups that may be usual; each once."""
        wanted = {arrived.assignment: arrived.id for arrived in groups if arrived.sealed is not None}
        self._work = work.lookup_all(self._connection, list(wanted.items()))
        self._asked = wanted

    def take(self, arrived: Arrival) -> PushOutcome:
        """Take one group in."""
        group, key = arrived.sealed, (arrived.id.site, arrived.id.incarnation)
        if key not in self._marks:
            self._marks[key] = watermark.dense(self._connection, *key)
        mark = self._marks[key]
        is_usual = group is not None and mark is not None and arrived.id.sequence == mark + 1 and not arrived.problem
        if (
            not is_usual
            or arrived.lost
            or group is None
            or mark is None
            or size_problem(arrived.num_bytes, self._around.config.max_group_bytes)
        ):
            self.write()
            return intake.take(self._connection, arrived, self._around)
        site = arrived.id.site
        if site not in self._waiting_bytes:
            self._waiting_bytes[site] = tallies.waiting_bytes(self._connection, site)
        wait_s, busy = intake.quota(arrived, self._around, pending_bytes=self._waiting_bytes[site])
        if busy:
            return PushOutcome(id=arrived.id, status=PushStatus.RETRY, message=busy, retry_after_s=wait_s)
        reason, message = judge(group, self._surroundings(group))
        if reason is not None:
            self.write()
            return intake.record(self._connection, arrived, reason, message, self._around)
        self._accepted.append(arrived)
        self._answered.add(arrived.assignment)
        self._marks[key] = mark + 1
        self._waiting_bytes[site] += arrived.num_bytes
        return PushOutcome(id=arrived.id, status=PushStatus.ACCEPTED)

    def write(self) -> None:
        """Write what was accepted, and forget all that was read."""
        connection = self._connection
        if self._accepted:
            # A statement for each would let go of the interpreter for each, and wait for it again.
            for first in range(0, len(self._accepted), ROWS_AT_ONCE):
                part = self._accepted[first : first + ROWS_AT_ONCE]
                some = [intake.row_of(arrived, None, self._around) for arrived in part]
                connection.execute(intake.insert(len(some)), list(itertools.chain.from_iterable(some)))
            work.answer_all(connection, [arrived.assignment for arrived in self._accepted])
            counts = Counter((arrived.id.site, arrived.id.incarnation) for arrived in self._accepted)
            connection.executemany(
                "UPDATE sites SET accepted = accepted + ?, watermark = ? WHERE site = ? AND incarnation = ?",
                [(count, self._marks[key], *key) for key, count in counts.items()],
            )
            for site, count in Counter(arrived.id.site for arrived in self._accepted).items():
                lost_members.note(connection, site, 0.0, groups=count)
            ledger.add(connection, ledger.ACKED, len(self._accepted))
        # Of what was looked up, too: whatever comes next may change it.
        for kept in (self._accepted, self._answered, self._marks, self._waiting_bytes, self._facts, self._asked):
            kept.clear()

    def _surroundings(self, group: SealedGroup) -> Facts:
        """What surrounds a group; groups of the same site, version and spans have all but the assignment in common."""
        if self._asked.get(group.assignment) == group.id:
            prompt, is_answered = self._work[group.assignment]
        else:
            prompt, is_answered = work.lookup(self._connection, group.assignment, group.id)
        is_answered = is_answered or group.assignment in self._answered
        key = (group.id.site, group.oldest_version, group.state_root, group.versions)
        facts = self._facts.get(key)
        if facts is None:
            facts = intake.facts_of(
                self._connection, group, self._around, prompt=prompt, is_answered=is_answered
            )  # fmt: skip
            self._facts[key] = facts
            return facts
        return dataclasses.replace(facts, assignment_prompt=prompt, is_answered=is_answered)
