"""Turns of trajectories under way, in the spool's file: what a process that starts again goes on from. Blocking.

A row is one turn of one member, sealed like a group with one rollout: what was given in front of the turn, then the
turn as it was drawn. A first turn has the prompt too.

Guarantees: the turns of a group leave in the transaction in which the group enters the outbox; a row whose bytes
changed is deleted and counted, and costs its member this turn and those behind it; together they take MAX_BYTES at
most, and turns that find no room are drawn again after a restart.
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
from heterorl.common.wire.seal import open_group, read_sealed, seal

_LOG = logging.getLogger(__name__)
MAX_BYTES = 256 << 20
"""Of the turns that are kept at once."""
MAX_RESUMED = 3
"""Starts that may take a group up without one more turn of it: it may be what ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTurn:
    """One turn of a member; `turn` has its one rollout, `number` counts from 0.

    `seed` is of the group's draws; `begun` is when the group was begun, by the clock of the outbox.
    """

    member: int
    number: int
    seed: int
    begun: float
    turn: Group

    @property
    def assignment(self) -> int:
        """Of the group."""
        return self.turn.assignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptGroup:
    """A group that an earlier process had under way: the turns of each member, without gaps from the first one on."""

    members: Mapping[int, Sequence[KeptTurn]]

    @property
    def first(self) -> KeptTurn:
        """One of its first turns."""
        return next(iter(self.members.values()))[0]

    @property
    def turns(self) -> list[KeptTurn]:
        """All of them."""
        return [turn for turns in self.members.values() for turn in turns]


class TurnStore:
    """The rows of one spool."""

    def __init__(self, transaction: Callable[[], AbstractContextManager[sqlite3.Connection]]) -> None:
        """Of the spool that this opens."""
        self._transaction = transaction
        self._is_full = False

    def keep(self, turns: Sequence[KeptTurn]) -> None:
        """Write turns; durable when it returns. Where there is no room they are not kept, which is said once."""
        rows = [(turn, seal(turn.turn).data) for turn in turns]
        try:
            with self._transaction() as connection:
                (size,) = connection.execute("SELECT coalesce(sum(length(payload)), 0) FROM turns").fetchone()
                if size + sum(len(data) for _, data in rows) > MAX_BYTES:
                    self._note_full(f"those that are kept take {size} bytes, at most {MAX_BYTES}")
                    return
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
            return
        self._is_full = False

    def forget(self, assignments: Collection[int]) -> None:
        """Delete the turns of groups that are given up.

        Raises:
            DiskFull: they are still there.
        """
        with self._transaction() as connection:
            self.drop(connection, assignments)

    def drop(self, connection: sqlite3.Connection, assignments: Collection[int]) -> None:
        """The same within a transaction."""
        rows = [(assignment,) for assignment in assignments]
        connection.executemany("DELETE FROM turns WHERE assignment = ?", rows)

    def take(self, *, since: float) -> list[KeptGroup]:
        """The groups that can go on, each counted as taken up once more.

        The others are deleted: taken up MAX_RESUMED times, damaged, or begun before `since`.
        """
        groups = []
        with self._transaction() as connection:
            rows = connection.execute("SELECT * FROM turns ORDER BY assignment, member, number").fetchall()
            for assignment, some in itertools.groupby(rows, key=lambda row: row[0]):
                mine = list(some)
                group = _group_of(mine)
                times = min(resumed for *_, resumed, _, _ in mine)
                if group is None or times >= MAX_RESUMED or group.first.begun < since:
                    self.drop(connection, [assignment])
                    continue
                groups.append(group)
                connection.execute("UPDATE turns SET resumed = resumed + 1 WHERE assignment = ?", (assignment,))
                # What stands behind a gap must not follow the turn that is drawn in its place.
                behind = "DELETE FROM turns WHERE assignment = ? AND member = ? AND number >= ?"
                members = {member for _, member, *_ in mine}
                counts = [(assignment, member, len(group.members.get(member, ()))) for member in members]
                connection.executemany(behind, counts)
        return groups

    def _note_full(self, problem: str) -> None:
        if not self._is_full:
            _LOG.warning("turns under way are not kept, a restart draws them again: %s", problem)
        self._is_full = True


def _group_of(rows: Iterable[tuple[Any, ...]]) -> KeptGroup | None:
    """What is left of a group's rows, which are in order; None where nothing is."""
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
    """xxh3-64 of a row, 8 bytes; its place is part of it."""
    place = f"{assignment}/{member}/{number}/{seed}/{begun!r}/".encode("ascii")
    return xxhash.xxh3_64_digest(place + data)


def _turn_of(
    assignment: int, member: int, number: int, seed: str, begun: float, payload: bytes, checksum: bytes
) -> KeptTurn | str:
    """The turn of a row, or what is wrong with it."""
    try:
        if checksum != _checksum(assignment, member, number, seed, begun, payload):
            return "its bytes changed on disk"
        turn = open_group(read_sealed(payload))
    except (TypeError, ValueError, MalformedPayload) as error:
        return str(error)
    return KeptTurn(member=member, number=number, seed=int(seed), begun=begun, turn=turn)
