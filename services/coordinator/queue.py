"""The durable queue of whole groups, as store operations.

Guarantees: a group has exactly one account of the ledger at every commit; an id takes effect once (by watermark, never
by time); oldest policies first; a group that became too stale is dropped, counted, and its prompt handed out again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import MalformedPayload
from services.common.types import Contract, DropReason, Group, GroupId, PushOutcome, PushStatus, QueuedGroup
from services.common.wire import bytes_digest, group_from_bytes, group_to_bytes
from services.coordinator import flavours, ledger, quarantine, watermark, work
from services.coordinator.admission import Facts, judge
from services.coordinator.config import CoordinatorConfig
from services.coordinator.quotas import Quotas
from services.coordinator.schedule import seed_of
from services.coordinator.turns import Turns

_WHERE_ID = "site = ? AND incarnation = ? AND sequence = ?"
_Wait = tuple[float, str]
RETRY_AFTER_S = 1.0
_LOG = logging.getLogger(__name__)
MAX_GAP = 100_000
"""Sequences that may be known beyond the first missing one; more would make the memory of duplicates unbounded."""

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
        *quarantine.REJECTABLE,
    }
)
"""Drops after which the prompt is handed out again, so that no prompt is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Operations that share the run's bounds; `quotas` and `turns` are of this process, all else is in the store."""

    config: CoordinatorConfig
    quotas: Quotas
    turns: Turns

    @classmethod
    def of(cls, config: CoordinatorConfig) -> Queue:
        """The queue of a configuration."""
        turns = Turns(order=config.lease_order, share=config.site_batch_share, window=config.groups_per_version)
        return cls(config=config, quotas=Quotas(config), turns=turns)

    def ingest(
        self,
        connection: sqlite3.Connection,
        groups: Sequence[Group],
        *,
        contract: Contract,
        head: int,
        now: float,
        instant: float,
    ) -> list[PushOutcome]:
        """Take groups in, each with its own outcome; `now` is wall time, `instant` the monotonic clock's."""
        return [
            self._ingest_one(connection, group, contract=contract, head=head, now=now, instant=instant)
            for group in groups
        ]

    def _ingest_one(
        self, connection: sqlite3.Connection, group: Group, *, contract: Contract, head: int, now: float, instant: float
    ) -> PushOutcome:
        data = group_to_bytes(group)
        digest = bytes_digest(data)
        if watermark.is_known(connection, group.id):
            return _duplicate(connection, group.id, digest)
        wait_s, busy = self._busy(connection, group.id, len(data), instant)
        if busy:
            return PushOutcome(id=group.id, status=PushStatus.RETRY, message=busy, retry_after_s=wait_s)
        reason, message = judge(group, self._facts(connection, group, len(data), contract=contract, head=head, now=now))
        connection.execute(
            "INSERT INTO groups (site, incarnation, sequence, digest, state, reason, assignment, oldest_version,"
            " num_bytes, arrived, payload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *_key(group.id),
                digest,
                "dropped" if reason else "pending",
                reason.value if reason else "",
                group.assignment,
                group.oldest_version,
                len(data),
                now,
                None if reason else data,
            ),
        )
        watermark.remember(connection, group.id)
        ledger.add(connection, ledger.ACKED, 1)
        site = "dropped" if reason else "accepted"
        connection.execute(
            f"UPDATE sites SET {site} = {site} + 1 WHERE site = ? AND incarnation = ?",
            (group.id.site, group.id.incarnation),
        )
        if reason is None:
            work.answer(connection, group.assignment)
            return PushOutcome(id=group.id, status=PushStatus.ACCEPTED)
        ledger.add(connection, ledger.account_of(reason), 1)
        if reason in REOPENED:
            work.reopen_held(connection, group.assignment, group.id)
        return PushOutcome(id=group.id, status=PushStatus.DROPPED, reason=reason, message=message)

    def _busy(self, connection: sqlite3.Connection, group_id: GroupId, num_bytes: int, instant: float) -> _Wait:
        known = watermark.read(connection, group_id)
        if not 0 < group_id.sequence <= known + MAX_GAP:
            text = f"sequence {group_id.sequence} is too far beyond {known}; push the earlier groups first"
            return RETRY_AFTER_S, text
        used = connection.execute(
            "SELECT coalesce(sum(num_bytes), 0) FROM groups WHERE state IN ('pending', 'leased') AND site = ?",
            (group_id.site,),
        ).fetchone()[0]
        limit = self.config.site_pending_bytes
        return self.quotas.take(
            group_id.site, num_bytes=num_bytes, pending_bytes=int(used), pending_limit=limit, now=instant
        )

    def _facts(
        self, connection: sqlite3.Connection, group: Group, num_bytes: int, *, contract: Contract, head: int, now: float
    ) -> Facts:
        version = connection.execute(
            "SELECT coalesce((SELECT f.state_root FROM flavour_versions f WHERE f.version = v.version"
            " AND f.state_root = ?), v.state_root), published FROM versions v WHERE version = ? AND is_abandoned = 0",
            (group.state_root, group.oldest_version),
        ).fetchone()
        prompt, is_answered = work.lookup(connection, group.assignment, group.id)
        return Facts(
            contract=contract,
            head_version=head,
            max_staleness_versions=self.config.max_staleness_versions,
            max_policy_age_s=self.config.max_policy_age_s,
            policy_age_s=max(0.0, now - version[1]) if version else 0.0,
            state_root=version[0] if version else None,
            assignment_prompt=prompt,
            is_answered=is_answered,
            quarantine=quarantine.conviction_of(connection, group.id.site),
            num_bytes=num_bytes,
            max_group_bytes=self.config.max_group_bytes,
            max_prompt_tokens=self.config.max_prompt_tokens,
        )

    def lease(self, connection: sqlite3.Connection, *, count: int, head: int, now: float) -> list[QueuedGroup]:
        """Lease up to `count` groups to the learner, oldest policy first; drops what is too stale on the way."""
        self._drop_stale(connection, head=head, now=now)
        leased: list[QueuedGroup] = []
        # Again while damaged groups leave room: whoever waits is woken by arrivals only.
        while rows := self._next(connection, count - len(leased)):
            for arrival, digest, data, arrived, published, assignment, *key in rows:
                group = _verified(data, digest)
                if group is None or len(data) > self.config.max_group_bytes:
                    _LOG.critical("group %s fails its digest or fits no message, and is not trained on", key)
                    drop(connection, [GroupId(site=key[0], incarnation=key[1], sequence=key[2])], DropReason.INVALID)
                    continue
                connection.execute("UPDATE groups SET state = 'leased' WHERE arrival = ?", (arrival,))
                age, waited = max(0.0, now - published), max(0.0, now - arrived)
                seed = seed_of(assignment, seed=self.config.seed)
                flavour = flavours.of_state(connection, group.oldest_version, group.state_root)
                leased.append(
                    QueuedGroup(group=group, policy_age_s=age, queue_age_s=waited, seed=seed, flavour=flavour)
                )
        return leased

    def _next(self, connection: sqlite3.Connection, count: int) -> list[tuple[Any, ...]]:
        if self.turns.is_plain or count < 1:
            return _oldest(connection, count)
        oldest = {
            site: (version, arrival)
            for site, version, arrival in connection.execute(
                # SQLite takes the bare column from the row that has the minimum.
                "SELECT site, min(oldest_version), arrival FROM (SELECT site, oldest_version, arrival FROM groups"
                " WHERE state = 'pending' ORDER BY oldest_version, arrival) GROUP BY site"
            )
        }
        return _oldest(connection, 1, site=self.turns.next(oldest)) if oldest else []

    def _drop_stale(self, connection: sqlite3.Connection, *, head: int, now: float) -> None:
        rows = connection.execute(
            "SELECT site, incarnation, sequence FROM groups JOIN versions ON versions.version = oldest_version"
            " WHERE state = 'pending' AND (oldest_version < ? OR published < ?)",
            (head - self.config.max_staleness_versions, now - self.config.max_policy_age_s),
        ).fetchall()
        drop(connection, [GroupId(site=a, incarnation=b, sequence=c) for a, b, c in rows], DropReason.STALE_AT_LEASE)

    def consume(
        self, connection: sqlite3.Connection, ids: Sequence[GroupId], *, version: int, parent: int
    ) -> tuple[list[GroupId], str]:
        """Move groups into a version; or move none, drop those too stale, and return the ones in the way."""
        if len(set(ids)) != len(ids):
            return list(ids), "a group is named twice"
        missing: list[GroupId] = []
        stale: list[GroupId] = []
        for group_id in ids:
            row = connection.execute(
                f"SELECT state, oldest_version FROM groups WHERE {_WHERE_ID}", _key(group_id)
            ).fetchone()
            if row is None or row[0] not in ("leased", "pending"):
                missing.append(group_id)
            elif parent - row[1] > self.config.max_staleness_versions:
                stale.append(group_id)
        if missing or stale:
            drop(connection, stale, DropReason.STALE_AT_COMMIT)
            return missing + stale, f"{len(missing)} groups are not available, {len(stale)} became too stale"
        connection.executemany(
            f"UPDATE groups SET state = 'consumed', version = ?, payload = NULL WHERE {_WHERE_ID}",
            [(version, *_key(group_id)) for group_id in ids],
        )
        ledger.add(connection, ledger.CONSUMED, len(ids))
        return [], ""


def _oldest(connection: sqlite3.Connection, count: int, *, site: str = "") -> list[tuple[Any, ...]]:
    return connection.execute(
        "SELECT arrival, digest, payload, arrived, published, assignment, site, incarnation, sequence"
        " FROM groups JOIN versions ON versions.version = oldest_version WHERE state = 'pending' AND ? IN ('', site)"
        " ORDER BY oldest_version, arrival LIMIT ?",
        (site, count),
    ).fetchall()


def drop(connection: sqlite3.Connection, ids: Sequence[GroupId], reason: DropReason) -> int:
    """Give pending or leased groups up for a reason; prompts are handed out again where the reason allows.

    Returns:
        How many of them were pending or leased.
    """
    num_dropped = 0
    for group_id in ids:
        row = connection.execute(
            "UPDATE groups SET state = 'dropped', reason = ?, payload = NULL WHERE state IN ('pending', 'leased')"
            f" AND {_WHERE_ID} RETURNING assignment",
            (reason.value, *_key(group_id)),
        ).fetchone()
        if row is not None:
            num_dropped += 1
            ledger.add(connection, ledger.account_of(reason), 1)
            if reason in REOPENED:
                work.reopen(connection, row[0])
    return num_dropped


def abandon_consumed(connection: sqlite3.Connection, versions: Sequence[int]) -> None:
    """Groups of abandoned versions were trained on for nothing: count them, hand their prompts out again."""
    for version in versions:
        rows = connection.execute(
            "UPDATE groups SET state = 'dropped', reason = ? WHERE version = ? AND state = 'consumed'"
            " RETURNING assignment",
            (DropReason.LINEAGE_ABANDONED.value, version),
        ).fetchall()
        ledger.add(connection, ledger.CONSUMED, -len(rows))
        ledger.add(connection, ledger.account_of(DropReason.LINEAGE_ABANDONED), len(rows))
        for (assignment,) in rows:
            work.reopen(connection, assignment)


def return_leased(connection: sqlite3.Connection, *, held: Iterable[GroupId] = ()) -> int:
    """Put the learner's groups back into the queue, except those it still holds and those of quarantined sites."""
    keep = {_key(group_id) for group_id in held}
    rows = connection.execute("SELECT site, incarnation, sequence FROM groups WHERE state = 'leased'").fetchall()
    back = [tuple(row) for row in rows if tuple(row) not in keep]
    connection.executemany(f"UPDATE groups SET state = 'pending' WHERE {_WHERE_ID}", back)
    for site in quarantine.convicted_sites(connection):
        drop(connection, quarantine.pending_groups(connection, site), DropReason.QUARANTINED)
    return len(back)


def _key(group_id: GroupId) -> tuple[str, str, int]:
    return group_id.site, group_id.incarnation, group_id.sequence


def _verified(data: bytes, digest: str) -> Group | None:
    if bytes_digest(data) != digest:
        return None
    try:
        return group_from_bytes(data)
    except MalformedPayload:
        return None


def _duplicate(connection: sqlite3.Connection, group_id: GroupId, digest: str) -> PushOutcome:
    row = connection.execute(f"SELECT digest FROM groups WHERE {_WHERE_ID}", _key(group_id)).fetchone()
    if row is not None and row[0] != digest:
        # Not a new group, so the ledger does not move: the first content stands.
        text = "this id was pushed before with other content, which stands"
        return PushOutcome(id=group_id, status=PushStatus.DROPPED, reason=DropReason.CONFLICT, message=text)
    return PushOutcome(id=group_id, status=PushStatus.DUPLICATE, message="known already")
