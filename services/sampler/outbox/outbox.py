"""The durable outbox: groups on disk between generation and acknowledgement.

A group is on disk before its assignment is forgotten, and stays until a final outcome. Reads are bounded by the caller.
Sequences are dense within an incarnation, which belongs to one outbox file and one site name. A group whose bytes
changed on disk is delivered as an empty one, which the coordinator refuses and counts. One process owns an outbox.
Blocking; call from threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from heterorl.common.errors import ConfigError, DiskFull, MalformedPayload
from heterorl.common.process import metrics
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import make_directory
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import Group, GroupId, SealedGroup
from heterorl.common.wire.sealed_groups import read_sealed, seal
from heterorl.sampler.delay import DelayConfig, group_delay_s
from heterorl.sampler.outbox.outbox_file import NAME, lock_outbox, open_outbox_file, set_aside, typed
from heterorl.sampler.outbox.turn_store import TurnStore

_LOG = logging.getLogger(__name__)
MAX_SEQUENCE = 2**48
"""Largest sequence that a coordinator may state; no run comes so far."""
NO_ASSIGNMENT = (1 << 63) - 1
"""The assignment of an empty group: no run comes so far, so none is given back with it."""


class Outbox:
    """SQLite file of a site; without `site`, its owner stays."""

    def __init__(self, directory: Path, *, site: str = "") -> None:
        make_directory(directory)
        self._lock_file = lock_outbox(directory / "lock")
        self._mutex = threading.Lock()
        self._path = directory / NAME
        self._spooled: dict[int, float] = {}
        # In memory: a loop asks at every completion, also during a write.
        self._level = Level(num_groups=0, num_bytes=0)
        self.next_sequence = 1
        """Sequence of the next group."""
        self._site = ""
        self.incarnation = ""
        try:
            self._connection = open_outbox_file(directory)
            try:
                self._own(site)
                self.turns = TurnStore(self._transaction)
            except BaseException:
                self._connection.close()
                raise
        except BaseException:
            self._lock_file.close()
            raise

    def lowest_sequence(self) -> int:
        with self._reading():
            # The next sequence is read first: groups put later are not below it.
            following = self.next_sequence
            (lowest,) = self._connection.execute("SELECT min(sequence) FROM groups").fetchone()
        return following if lowest is None else min(following, int(lowest))

    def assignments(self) -> tuple[int, ...] | None:
        """Assignments of its groups and turns; None if unknown."""
        with self._reading():
            rows = self._connection.execute(
                "SELECT assignment FROM groups UNION ALL SELECT DISTINCT assignment FROM turns"
            ).fetchall()
        known = tuple(assignment for (assignment,) in rows if assignment is not None)
        return known if len(known) == len(rows) else None

    def skip_to(self, sequence: int) -> None:
        """Use no sequence below `sequence`, which the coordinator knows.

        Raises MalformedPayload: no run comes so far; the outbox is unchanged.
        """
        if sequence > MAX_SEQUENCE:
            raise MalformedPayload(f"the coordinator knows of sequence {sequence}", action="distrust the coordinator")
        if sequence > self.next_sequence:
            self._write("UPDATE meta SET value = ? WHERE key = 'next_sequence'", [(str(sequence),)])
            self.next_sequence = sequence

    def put(self, groups: Sequence[Group], *, release: Sequence[float]) -> None:
        """Store groups and delete their turns; durable when it returns.

        Sequences continue from `next_sequence`. Raises DiskFull: the outbox is unchanged.
        """
        first = self.next_sequence
        assert [group.id.sequence for group in groups] == list(range(first, first + len(groups))), "sequences are dense"
        rows = []
        for group, at in zip(groups, release, strict=True):
            # Sealed here: a group that waited for the disk got a new number.
            data = seal(group).data
            rows.append(
                (group.id.sequence, at, len(data), data, checksum_of(group.id.sequence, data), group.assignment)
            )
        self._site = self._site or (groups[0].id.site if groups else "")
        with self._transaction():
            if self._site:
                self._connection.execute("INSERT OR IGNORE INTO meta VALUES ('site', ?)", (self._site,))
            self._connection.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)", rows)
            self.turns.drop(self._connection, [group.assignment for group in groups])
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'next_sequence'", (str(first + len(rows)),))
        self.next_sequence = first + len(rows)
        self._change_level(len(rows), sum(row[2] for row in rows))

    def due(self, now: float, *, limit: int, max_bytes: int) -> tuple[list[SealedGroup], float | None]:
        """Groups due at `now`, oldest first, and when the next is due.

        At most `limit` groups and `max_bytes`, but always one group if any is due.
        """
        chosen: list[tuple[int, bytes, bytes]] = []
        num_bytes = 0
        with self._reading():
            rows = self._connection.execute(
                "SELECT num_bytes, sequence, payload, checksum FROM groups WHERE release <= ? ORDER BY sequence"
                " LIMIT ?",
                (now, limit),
            )
            for size, *row in rows:
                num_bytes += size
                if chosen and num_bytes > max_bytes:
                    break
                chosen.append((row[0], row[1], row[2]))
            rows.close()
            later = self._connection.execute("SELECT min(release) FROM groups WHERE release > ?", (now,)).fetchone()
        return [self._read(*row) for row in chosen], later[0]

    def release_by(self, instant: float) -> None:
        """Make groups that are due later due at `instant`.
        Rows that are due stay as they are: writing one rewrites its group."""
        self._write("UPDATE groups SET release = ? WHERE release > ?", [(instant, instant)])

    def note_spooled(self, sequences: Sequence[int], now: float) -> None:
        """Remember when groups were stored, until deletion or the process's end."""
        self._spooled.update(dict.fromkeys(sequences, now))

    def delete(self, sequences: Sequence[int], *, now: float | None = None) -> list[float]:
        """Delete settled groups; returns their seconds in the outbox, where known."""
        with self._transaction():
            statement = "DELETE FROM groups WHERE sequence = ? RETURNING num_bytes"
            sizes = [
                size
                for sequence in sequences
                for (size,) in self._connection.execute(statement, (sequence,)).fetchall()
            ]
        self._change_level(-len(sizes), -sum(sizes))
        starts = [self._spooled.pop(sequence) for sequence in sequences if sequence in self._spooled]
        return [] if now is None else [max(0.0, now - start) for start in starts]

    def put_aside(self, sequence: int, problem: str) -> bool:
        """Keep a group's bytes and deliver an empty one; False: disk full."""
        with self._reading():
            statement = "SELECT payload, checksum FROM groups WHERE sequence = ?"
            payload, checksum = self._connection.execute(statement, (sequence,)).fetchone()
        return self._set_row_aside(sequence, payload, checksum, problem, is_refused=True)

    def level(self) -> Level:
        return self._level

    def close(self) -> None:
        with self._mutex:
            self._connection.close()
        self._lock_file.close()

    def _own(self, site: str) -> None:
        """Make the file this site's.
        Raises ConfigError: it holds groups of another site.

        The coordinator counts sequences by name and incarnation, so another name begins another incarnation.
        """
        owner = self._stored("site")
        self._count()
        if site and owner and owner != site:
            if self.level().num_groups:
                problem = f"{self._path} holds {self.level().num_groups} groups of site {owner}"
                action = f'start a sampler with site = "{owner}" to deliver them, or move the file away'
                raise ConfigError("site", problem, action=action)
            self._connection.close()
            set_aside(self._path, "renamed")
            self._connection = open_outbox_file(self._path.parent)
            self._count()
        self.incarnation = self._meta("incarnation", uuid.uuid4().hex[:16])
        self.next_sequence = int(self._meta("next_sequence", "1"))
        self._site = site or owner
        if self._site:
            self._meta("site", self._site)

    def _read(self, sequence: int, payload: bytes, checksum: bytes) -> SealedGroup:
        found = group_of(sequence, payload, checksum)
        if isinstance(found, SealedGroup):
            return found
        self._set_row_aside(sequence, payload, checksum, found)
        return self._empty(sequence)

    def _set_row_aside(
        self, sequence: int, payload: bytes, checksum: bytes, problem: str, *, is_refused: bool = False
    ) -> bool:
        metrics.OUTBOX_SET_ASIDE.labels("refused" if is_refused else "row").inc()
        what, advice = ("REFUSED", "see what the reward returns") if is_refused else ("DAMAGED", "check this disk")
        _LOG.error(
            "GROUP %d OF THE OUTBOX IS %s (%s): it is not delivered, an empty one takes its place; its bytes are "
            "in table set_aside of %s; %s",
            sequence, what, problem, self._path, advice,
        )  # fmt: skip
        data = self._empty(sequence).data
        # On a full disk the row stays and is judged again.
        with contextlib.suppress(DiskFull):
            with self._transaction():
                (before,) = self._connection.execute(
                    "SELECT num_bytes FROM groups WHERE sequence = ?", (sequence,)
                ).fetchone()
                self._connection.execute(
                    "INSERT OR REPLACE INTO set_aside VALUES (?, ?, ?, ?)", (sequence, problem[:500], payload, checksum)
                )
                self._connection.execute(
                    "UPDATE groups SET num_bytes = ?, payload = ?, checksum = ? WHERE sequence = ?",
                    (len(data), data, checksum_of(sequence, data), sequence),
                )
            self._change_level(0, len(data) - before)
            return True
        return False

    def _empty(self, sequence: int) -> SealedGroup:
        return seal(empty_group(GroupId(site=SiteId(self._site), incarnation=self.incarnation, sequence=sequence)))

    def _count(self) -> None:
        with self._reading():
            row = self._connection.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM groups").fetchone()
        self._level = Level(num_groups=row[0], num_bytes=row[1])

    def _change_level(self, num_groups: int, num_bytes: int) -> None:
        with self._mutex:
            before = self._level
            self._level = Level(num_groups=before.num_groups + num_groups, num_bytes=before.num_bytes + num_bytes)

    def _stored(self, key: str) -> str:
        with self._reading():
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return "" if row is None else str(row[0])

    def _meta(self, key: str, default: str) -> str:
        found = self._stored(key)
        if not found:
            self._write("INSERT INTO meta VALUES (?, ?)", [(key, default)])
        return found or default

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._transaction():
            self._connection.executemany(statement, rows)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._mutex:
            try:
                yield
            except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
                # Programming errors.
                raise
            except sqlite3.Error as error:
                raise typed(error, self._path) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """An atomic transaction; a full disk leaves the file as it was."""
        with self._reading():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk has rolled back already; any other error has not.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


@dataclass(kw_only=True, eq=False, repr=False)
class OutboxWriter:
    """Writes groups into an outbox; `problem`, if any, is why generation pauses."""

    outbox: Outbox
    delay: DelayConfig
    seed: int
    clock: Clock
    now: Callable[[], float]
    rng: random.Random
    numbering: asyncio.Lock

    def __post_init__(self) -> None:
        self._backoff = Backoff(clock=self.clock, rng=self.rng)
        self._waiting: tuple[Group, ...] = ()
        self._retry_at = 0.0
        self.problem = ""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def assignments(self) -> list[int]:
        return [group.assignment for group in self._waiting]

    @property
    def retry_s(self) -> float:
        return self._retry_at - self.clock.monotonic()

    def add(self, groups: Sequence[Group]) -> None:
        self._waiting += tuple(groups)

    async def retry(self) -> None:
        if self._waiting:
            async with self.numbering:
                await self._put(self._waiting)

    async def _put(self, waiting: Sequence[Group]) -> None:
        first = self.outbox.next_sequence
        groups = [
            dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=first + number))
            for number, group in enumerate(waiting)
        ]
        now = self.now()
        sequences = [group.id.sequence for group in groups]
        release = [now + group_delay_s(self.delay, seed=self.seed, sequence=sequence) for sequence in sequences]
        self.outbox.note_spooled(sequences, now)
        try:
            await asyncio.to_thread(self.outbox.put, groups, release=release)
        except DiskFull as error:
            if not self.problem:
                _LOG.error("GENERATION PAUSES, %d groups wait in memory: %s", len(groups), error)
            self.problem = str(error)
            self._retry_at = self.clock.monotonic() + self._backoff.delay_s()
            return
        if self.problem:
            _LOG.info("the disk has room again: %d groups are spooled, generation goes on", len(groups))
        self.problem, self._waiting = "", self._waiting[len(groups) :]
        self._backoff.reset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Number and bytes of stored groups."""

    num_groups: int
    num_bytes: int


def checksum_of(sequence: int, data: bytes) -> bytes:
    """xxh3-64 of a row and its sequence, 8 bytes."""
    return xxhash.xxh3_64_digest(data, seed=sequence)


def group_of(sequence: int, payload: bytes, checksum: bytes) -> SealedGroup | str:
    """The group of a row, or the problem with it."""
    if checksum != checksum_of(sequence, payload):
        return "its bytes changed on disk"
    try:
        group = read_sealed(payload)
    except MalformedPayload as error:
        return str(error)
    return group if group.id.sequence == sequence else "it is another group"


def empty_group(group_id: GroupId) -> Group:
    """A group without rollouts: the coordinator refuses it, which settles its sequence."""
    return Group(
        id=group_id, assignment=NO_ASSIGNMENT, prompt_index=0, prompt_token_ids=np.zeros(0, np.int32), rollouts=(),
        oldest_version=0, state_root=Digest(""), generation_s=0.0,
    )  # fmt: skip
