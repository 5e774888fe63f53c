"""Turns of unfinished trajectories, in the outbox's file, for the next process.

Calls block. A row is one turn of one member, sealed like a group of one rollout: given tokens, then the turn; a first
turn has the prompt too. The transaction that stores a group deletes its turns. A damaged row is deleted and counted;
the member draws this turn and later ones again. Turns take at most MAX_BYTES; more are not kept.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import xxhash

from heterorl.common.errors import DiskFull, MalformedPayload
from heterorl.common.process import metrics
from heterorl.common.types.rollout import Group
from heterorl.common.wire.sealed_groups import open_group, read_sealed, seal

_LOG = logging.getLogger(__name__)
MAX_BYTES = 256 << 20
"""Bytes of all kept turns."""
MAX_RESUMED = 3
"""Starts that may continue a group without a new turn of it: the group may kill the process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTurn:
    """A member's turn; `turn` has one rollout, `number` counts from 0.

    `seed` is the group's; `begun` is the start of the group, by the outbox's clock.
    """

    member: int
    number: int
    seed: int
    begun: float
    turn: Group

    @property
    def assignment(self) -> int:
        return self.turn.assignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptGroup:
    """A group of an earlier process: each member's first turns, without gaps."""

    members: Mapping[int, Sequence[KeptTurn]]

    @property
    def first(self) -> KeptTurn:
        return next(iter(self.members.values()))[0]

    @property
    def turns(self) -> list[KeptTurn]:
        return [turn for turns in self.members.values() for turn in turns]

    @property
    def newest_version(self) -> int:
        return max(span.version for kept in self.turns for rollout in kept.turn.rollouts for span in rollout.spans)


class TurnStore:
    """The turns table of one outbox."""

    def __init__(self, transaction: Callable[[], AbstractContextManager[sqlite3.Connection]]) -> None:
        self._transaction = transaction
        self._is_full = False

    def keep(self, turns: Sequence[KeptTurn]) -> bool:
        """Write turns durably; without room, log once, keep none and return False."""
        rows = [(turn, seal(turn.turn).data) for turn in turns]
        try:
            with self._transaction() as connection:
                (size,) = connection.execute("SELECT coalesce(sum(length(payload)), 0) FROM turns").fetchone()
                if size + sum(len(data) for _, data in rows) > MAX_BYTES:
                    self._note_full(f"those that are kept take {size} bytes, at most {MAX_BYTES}")
                    return False
                connection.executemany(
                    "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, 0, ?, ?)",
                    [
                        (
                            turn.assignment, turn.member, turn.number, str(turn.seed), turn.begun, data,
                            _checksum(turn.assignment, turn.member, turn.number, str(turn.seed), turn.begun, data),
                        )
                        for turn, data in rows
                    ],
                )  # fmt: skip
        except DiskFull as error:
            self._note_full(str(error))
            return False
        self._is_full = False
        return True

    def note_resumed(self, assignments: Collection[int]) -> None:
        """Count that groups go on; raises DiskFull."""
        rows = [(assignment,) for assignment in assignments]
        with self._transaction() as connection:
            connection.executemany("UPDATE turns SET resumed = resumed + 1 WHERE assignment = ?", rows)

    def forget(self, assignments: Collection[int]) -> None:
        """Delete turns of groups given up; raises DiskFull, then they stay."""
        with self._transaction() as connection:
            self.drop(connection, assignments)

    def drop(self, connection: sqlite3.Connection, assignments: Collection[int]) -> None:
        """The same within a transaction."""
        rows = [(assignment,) for assignment in assignments]
        connection.executemany("DELETE FROM turns WHERE assignment = ?", rows)

    def take(self, *, since: float) -> list[KeptGroup]:
        """Groups to continue.

        Deletes the others: resumed MAX_RESUMED times, damaged, or begun before `since`. Without room for these changes
        all turns stay for a later start.
        """
        try:
            with self._transaction() as connection:
                return self._taken(connection, since)
        except DiskFull as error:
            _LOG.error("KEPT TURNS ARE LEFT TO A LATER START, their prompts go to others as leases end: %s", error)
            return []

    def _taken(self, connection: sqlite3.Connection, since: float) -> list[KeptGroup]:
        groups = []
        rows = connection.execute("SELECT * FROM turns ORDER BY assignment, member, number").fetchall()
        for assignment, some in itertools.groupby(rows, key=lambda row: row[0]):
            mine = list(some)
            group = _group_of(mine)
            times = min(resumed for *_, resumed, _, _ in mine)
            problem = ""
            if group is None:
                problem = "no first turn of it is whole"
            elif times >= MAX_RESUMED:
                problem = f"{times} starts continued it without a new turn"
            elif group.first.begun < since:
                problem = "it began more than task.trajectory_s ago"
            if group is None or problem:
                _LOG.warning("assignment %d is returned: %s", assignment, problem)
                self.drop(connection, [assignment])
                continue
            groups.append(group)
            # Turns after a gap must not follow the turn that is drawn again.
            behind = "DELETE FROM turns WHERE assignment = ? AND member = ? AND number >= ?"
            members = {member for _, member, *_ in mine}
            counts = [(assignment, member, len(group.members.get(member, ()))) for member in members]
            connection.executemany(behind, counts)
        return groups

    def _note_full(self, problem: str) -> None:
        if not self._is_full:
            _LOG.warning("turns in flight are not kept, a restart draws them again: %s", problem)
        self._is_full = True


def _group_of(rows: Iterable[tuple[Any, ...]]) -> KeptGroup | None:
    members: dict[int, list[KeptTurn]] = {}
    for assignment, member, number, seed, begun, _, payload, checksum in rows:
        turn = _turn_of(assignment, member, number, seed, begun, payload, checksum)
        if isinstance(turn, str):
            metrics.OUTBOX_SET_ASIDE.labels("turn").inc()
            _LOG.error(
                "TURN %s OF ASSIGNMENT %s, MEMBER %s IS DAMAGED (%s): it is drawn again, with those behind it; "
                "check this disk",
                number, assignment, member, turn,
            )  # fmt: skip
        elif number == len(members.get(member, ())):
            members.setdefault(member, []).append(turn)
    return KeptGroup(members=members) if members else None


def _checksum(assignment: int, member: int, number: int, seed: str, begun: float, data: bytes) -> bytes:
    """xxh3-64 of a row and its place, 8 bytes."""
    place = f"{assignment}/{member}/{number}/{seed}/{begun!r}/".encode("ascii")
    return xxhash.xxh3_64_digest(place + data)


def _turn_of(
    assignment: int, member: int, number: int, seed: str, begun: float, payload: bytes, checksum: bytes
) -> KeptTurn | str:
    try:
        if checksum != _checksum(assignment, member, number, seed, begun, payload):
            return "its bytes changed on disk"
        turn = open_group(read_sealed(payload))
    except (TypeError, ValueError, MalformedPayload) as error:
        return str(error)
    return KeptTurn(member=member, number=number, seed=int(seed), begun=begun, turn=turn)
