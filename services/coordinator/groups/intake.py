"""Intake of pushed groups as store operations: duplicates, quotas, validation, rows.

One transaction writes the row, account and watermark of each final outcome, also for an unreadable group. The watermark
lets an id take effect once. `_IngestBatch` collects the usual groups, which continue their site's watermark and lost no
member; each other group is written at once. The result is the same as for groups taken one after another.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from heterorl.common.errors import MalformedPayload
from heterorl.common.types.common import Contract, SiteId
from heterorl.common.types.rollout import DropReason, FinishReason, Group, GroupId, PushOutcome, PushStatus, SealedGroup
from heterorl.common.types.sample import kind_of
from heterorl.common.wire.common_messages import MAX_INT64, bytes_digest, group_id_from_pb
from heterorl.common.wire.sealed_groups import (
    FINISH_OF,
    FIRST_LOST,
    GroupMessage,
    canonical,
    columns_of,
    group_message,
    sealed,
    shape_of,
)
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups import ledger, work_assignments
from heterorl.coordinator.groups.validation import Facts, content_problem, counted_version, judge, size_problem
from heterorl.coordinator.sample_ring import SampleRing
from heterorl.coordinator.sites import incarnations, quarantine
from heterorl.coordinator.sites.sites import Quotas
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import Connection
from heterorl.coordinator.versions import lineage

RETRY_AFTER_S = 1.0
JUDGED_BYTES = 1 << 20
"""Bytes of token ids and experts that are judged at once, which bounds the copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A pushed group before the store takes it.

    `problem` is of its content (empty: none). `digest` of its bytes detects another group under the same id. `sealed`
    is None if it cannot be read.
    """

    id: GroupId
    assignment: int
    oldest_version: int
    num_bytes: int
    digest: str
    problem: str
    sealed: SealedGroup | None = None
    generation_s: float = 0.0
    num_members: int = 0
    lost: tuple[FinishReason, ...] = ()
    """Why members were lost, one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestContext:
    """Facts for all groups of a commit; `now`: wall time, `instant`: monotonic."""

    config: CoordinatorConfig
    quotas: Quotas
    ring: SampleRing
    head: int
    now: float
    instant: float


def examined(messages: Sequence[GroupMessage], contract: Contract, *, max_prompt_tokens: int) -> list[Arrival]:
    """Validate groups' content and digest their bytes, outside the commit.
    Unreadable groups become invalid."""
    alike: dict[tuple[object, ...], list[int]] = {}
    num_bytes = 0
    for place, message in enumerate(messages):
        alike.setdefault((num_bytes // JUDGED_BYTES, *shape_of(message)), []).append(place)
        num_bytes += len(message.token_ids) + len(message.routed_experts)
    problems: dict[int, str | MalformedPayload] = {}
    for places in alike.values():
        some = [messages[place] for place in places]
        problems |= zip(places, _problems(some, contract, max_prompt_tokens), strict=True)
    return [_arrival(message, problems[place]) for place, message in enumerate(messages)]


def _problems(
    messages: Sequence[GroupMessage], contract: Contract, max_prompt_tokens: int
) -> Sequence[str | MalformedPayload]:
    """Each group's problem, or empty, for groups of one shape.
    They are judged as one, and one by one if that finds a problem."""
    problem: str | MalformedPayload
    try:
        problem = content_problem(columns_of(*messages), contract, max_prompt_tokens=max_prompt_tokens)
    except MalformedPayload as error:
        problem = error
    if problem and len(messages) > 1:
        return [_problems([message], contract, max_prompt_tokens)[0] for message in messages]
    return [problem] * len(messages)


def _arrival(message: GroupMessage, problem: str | MalformedPayload) -> Arrival:
    if isinstance(problem, MalformedPayload):
        data = message.SerializeToString(deterministic=True)
        return Arrival(
            id=group_id_from_pb(message.id),
            assignment=min(message.assignment, MAX_INT64),
            oldest_version=message.oldest_version,
            num_bytes=len(data),
            digest=bytes_digest(data),
            problem=str(problem),
        )
    group = canonical(message)
    return Arrival(
        id=group.id,
        assignment=group.assignment,
        oldest_version=group.oldest_version,
        num_bytes=len(group.data),
        digest=bytes_digest(group.data),
        problem=problem,
        sealed=group,
        generation_s=message.generation_s,
        num_members=len(message.endings),
        lost=tuple(FINISH_OF[ending] for ending in message.endings if ending >= FIRST_LOST),
    )


def arrival_of(entry: Group | SealedGroup | Arrival, contract: Contract, config: CoordinatorConfig) -> Arrival:
    """The arrival of a group from this process, examined or not."""
    if isinstance(entry, Arrival):
        return entry
    message = group_message(sealed(entry).data)
    return examined([message], contract, max_prompt_tokens=config.max_prompt_tokens)[0]


def record(
    connection: Connection, arrived: Arrival, reason: DropReason | None, message: str, context: IngestContext
) -> PushOutcome:
    """Write one group's row, account and watermark; settle its assignment.
    May keep a sample."""
    group_id = arrived.id
    key = (group_id.site, group_id.incarnation)
    row = row_of(arrived, reason, context)
    arrival = connection.execute(insert(1) + " RETURNING arrival", row).fetchone()[0]
    incarnations.remember(connection, group_id)
    ledger.add(connection, ledger.ACKED, 1)
    column = "dropped" if reason else "accepted"
    connection.execute(f"UPDATE sites SET {column} = {column} + 1 WHERE site = ? AND incarnation = ?", key)
    if reason is None:
        work_assignments.answer(connection, [arrived.assignment])
        return PushOutcome(id=group_id, status=PushStatus.ACCEPTED)
    ledger.add(connection, ledger.account_of(reason), 1)
    ledger.forget_refused(connection, group_id.site)
    if arrived.sealed is not None and context.ring.wants(kind_of(reason), arrival):
        context.ring.keep_dropped(connection, arrived.sealed, reason, detail=message)
    at_least = context.config.groups_per_version
    if why := work_assignments.RETURNED.get(reason):
        work_assignments.take_back(connection, key, [arrived.assignment], why, at_least=at_least)
    elif reason in work_assignments.REOPENED:
        work_assignments.give_back(connection, key, [arrived.assignment])
    if reason is DropReason.LOST_MEMBERS:
        work_assignments.put_behind(connection, arrived.assignment, at_least=at_least)
    return PushOutcome(id=group_id, status=PushStatus.DROPPED, reason=reason, message=message)


def _judge_losses(connection: Connection, arrived: Arrival, bound: float) -> tuple[DropReason | None, str]:
    """Count a valid group's lost members.
    It is dropped if its site loses too many."""
    share = quarantine.note_lost(connection, arrived.id.site, len(arrived.lost) / arrived.num_members)
    problem = quarantine.lost_problem(share, bound)
    if not arrived.lost or not problem:
        return None, ""
    return DropReason.LOST_MEMBERS, f"{len(arrived.lost)} of {arrived.num_members} members are lost; site: {problem}"


def insert(count: int) -> str:
    """The statement that inserts `count` rows."""
    return (
        "INSERT INTO groups (site, incarnation, sequence, digest, state, reason, assignment, oldest_version,"
        " num_bytes, arrived, payload) VALUES " + ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"] * count)
    )


def row_of(arrived: Arrival, reason: DropReason | None, context: IngestContext) -> tuple[object, ...]:
    """A row's values for `insert`.
    Its version is the one that the group's age counts from."""
    group_id, version = arrived.id, arrived.oldest_version
    if arrived.sealed is not None and reason is None:
        version = counted_version(arrived.sealed, mask_stale=context.config.mask_stale)
    return (
        group_id.site,
        group_id.incarnation,
        group_id.sequence,
        arrived.digest,
        "refused" if reason else "pending",
        reason.value if reason else "",
        arrived.assignment,
        version,
        arrived.num_bytes,
        context.now,
        arrived.sealed.data if arrived.sealed is not None and reason is None else None,
    )


def _facts(connection: Connection, group: SealedGroup, context: IngestContext) -> Facts:
    config = context.config
    version = connection.execute(
        "SELECT coalesce((SELECT f.state_root FROM variant_versions f WHERE f.version = v.version"
        " AND f.state_root = ?), v.state_root) FROM versions v WHERE version = ? AND is_abandoned = 0",
        (group.state_root, group.oldest_version),
    ).fetchone()
    version_of_age = counted_version(group, mask_stale=config.mask_stale)
    superseded_s = lineage.superseded_s(
        connection, version_of_age, reach=config.max_staleness_versions + 1, now=context.now
    )
    # Not of versions that do not exist: a hostile site may state as many as its group has tokens.
    is_known = max(group.versions) <= context.head
    return Facts(
        head_version=context.head,
        superseded_s=superseded_s,
        state_root=version[0] if version else None,
        assignment_prompt=None,
        is_answered=False,
        quarantine=quarantine.conviction_of(connection, group.id.site),
        abandoned_version=lineage.abandoned_span(connection, group.versions) if is_known else None,
    )


def _known(connection: Connection, arrived: Arrival) -> PushOutcome:
    group_id = arrived.id
    row = connection.execute(
        "SELECT digest FROM groups WHERE site = ? AND incarnation = ? AND sequence = ?",
        (group_id.site, group_id.incarnation, group_id.sequence),
    ).fetchone()
    if row is None:
        # Groups that the site gave up have no account here.
        text = "this group was refused long ago, or the site registered with a lowest sequence above this one"
    elif row[0] != arrived.digest:
        # The ledger does not move: the first content stands.
        text = "this id was pushed before with other content, which stands"
    else:
        return PushOutcome(id=group_id, status=PushStatus.DUPLICATE, message="known already")
    return PushOutcome(id=group_id, status=PushStatus.DROPPED, reason=DropReason.CONFLICT, message=text)


ROWS_AT_ONCE = 64


def take_all(connection: Connection, groups: Sequence[Arrival], context: IngestContext) -> list[PushOutcome]:
    """Take groups in; returns an outcome for each."""
    batch = _IngestBatch(connection, groups, context)
    outcomes = [batch.take(arrived) for arrived in groups]
    batch.write()
    return outcomes


class _IngestBatch:
    """Accepted groups, not written yet, and the rows read for them."""

    def __init__(self, connection: Connection, groups: Sequence[Arrival], context: IngestContext) -> None:
        self._connection = connection
        self._context = context
        self._accepted: list[Arrival] = []
        self._answered: set[int] = set()
        self._marks: dict[tuple[SiteId, str], int | None] = {}
        self._waiting_bytes: dict[SiteId, int] = {}
        self._facts: dict[tuple[object, ...], Facts] = {}
        self._asked = {arrived.assignment: arrived.id for arrived in groups if arrived.sealed is not None}
        self._work = work_assignments.lookup(connection, list(self._asked.items()))

    def take(self, arrived: Arrival) -> PushOutcome:
        site, key, context = arrived.id.site, (arrived.id.site, arrived.id.incarnation), self._context
        is_usual = self._is_usual(arrived)
        if not is_usual:
            self.write()
            if incarnations.is_known(self._connection, arrived.id):
                return _known(self._connection, arrived)
            known = incarnations.watermark_of(self._connection, arrived.id)
            if not 0 < arrived.id.sequence <= known + incarnations.MAX_GAP:
                text = f"sequence {arrived.id.sequence} is too far beyond {known}; push the earlier groups first"
                return PushOutcome(id=arrived.id, status=PushStatus.RETRY, message=text, retry_after_s=RETRY_AFTER_S)
        if site not in self._waiting_bytes:
            self._waiting_bytes[site] = tallies.waiting_bytes(self._connection, site)
        wait_s, busy = context.quotas.take(
            site, num_bytes=arrived.num_bytes, pending_bytes=self._waiting_bytes[site], now=context.instant
        )
        if busy:
            return PushOutcome(id=arrived.id, status=PushStatus.RETRY, message=busy, retry_after_s=wait_s)
        reason, message = self._judged(arrived)
        if not is_usual and reason is None:
            reason, message = _judge_losses(self._connection, arrived, context.config.max_lost_share)
        if reason is None:
            self._waiting_bytes[site] += arrived.num_bytes
        if not is_usual or reason is not None:
            self.write()
            return record(self._connection, arrived, reason, message, context)
        self._accepted.append(arrived)
        self._answered.add(arrived.assignment)
        self._marks[key] = arrived.id.sequence
        return PushOutcome(id=arrived.id, status=PushStatus.ACCEPTED)

    def _is_usual(self, arrived: Arrival) -> bool:
        key = (arrived.id.site, arrived.id.incarnation)
        if key not in self._marks:
            self._marks[key] = incarnations.dense_watermark(self._connection, *key)
        mark = self._marks[key]
        is_next = mark is not None and arrived.id.sequence == mark + 1
        return is_next and not arrived.lost and arrived.sealed is not None and not self._problem(arrived)

    def _problem(self, arrived: Arrival) -> str:
        return size_problem(arrived.num_bytes, self._context.config.max_group_bytes) or arrived.problem

    def _judged(self, arrived: Arrival) -> tuple[DropReason | None, str]:
        if arrived.sealed is None:
            return DropReason.INVALID, arrived.problem
        if problem := self._problem(arrived):
            return DropReason.INVALID, problem
        return judge(arrived.sealed, self._facts_of(arrived.sealed), self._context.config)

    def write(self) -> None:
        connection = self._connection
        if self._accepted:
            # Each statement releases the interpreter lock and waits for it again: one for many rows.
            for first in range(0, len(self._accepted), ROWS_AT_ONCE):
                part = self._accepted[first : first + ROWS_AT_ONCE]
                some = [row_of(arrived, None, self._context) for arrived in part]
                connection.execute(insert(len(some)), list(itertools.chain.from_iterable(some)))
            work_assignments.answer(connection, [arrived.assignment for arrived in self._accepted])
            counts = Counter((arrived.id.site, arrived.id.incarnation) for arrived in self._accepted)
            connection.executemany(
                "UPDATE sites SET accepted = accepted + ?, watermark = ? WHERE site = ? AND incarnation = ?",
                [(count, self._marks[key], *key) for key, count in counts.items()],
            )
            for site, count in Counter(arrived.id.site for arrived in self._accepted).items():
                quarantine.note_lost(connection, site, 0.0, groups=count)
            ledger.add(connection, ledger.ACKED, len(self._accepted))
        # The next group's record may change what was looked up, except the bytes, which are counted.
        for kept in (self._accepted, self._answered, self._marks, self._facts, self._asked):
            kept.clear()

    def _facts_of(self, group: SealedGroup) -> Facts:
        """Facts about a group.
        Groups of the same site, version and spans differ only in the assignment."""
        assignment = group.assignment
        work = self._work
        if self._asked.get(assignment) != group.id:
            work = work_assignments.lookup(self._connection, [(assignment, group.id)])
        prompt, is_answered = work[assignment]
        key = (group.id.site, group.oldest_version, group.state_root, group.versions)
        if key not in self._facts:
            self._facts[key] = _facts(self._connection, group, self._context)
        return dataclasses.replace(
            self._facts[key], assignment_prompt=prompt, is_answered=is_answered or assignment in self._answered
        )
