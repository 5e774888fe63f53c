"""The learner's lease and the version chain: decisions and store operations.

Epochs only grow, and only they decide safety; time decides liveness. One compare-and-set transaction commits a version
and consumes its groups. Versions have no gaps. The same step id gives the same answer. A policy's age counts from the
publication of the next version: the newest has age 0 even if a run stands still.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from heterorl.common.errors import (
    ContractMismatch,
    InvalidRequest,
    ParentNotHead,
    StaleEpoch,
    StepConflict,
    UnknownVersion,
)
from heterorl.common.types.common import Contract, LearnerProgress, LoraSettings, SamplingSemantics
from heterorl.common.types.policy import (
    NO_VERSION,
    SIGNATURE_BYTES,
    Manifest,
    PayloadKind,
    PublishRequest,
    stated_version,
)
from heterorl.common.wire.common_messages import MAX_INT64, bytes_digest, contract_from_bytes, contract_to_bytes
from heterorl.common.wire.policy_messages import manifest_digest
from heterorl.common.wire.statement import statement_difference, statement_from_bytes
from heterorl.coordinator.store.database import NUMBERS, Connection, get_meta
from heterorl.coordinator.versions.chain import TRAINED, Chain

_KEYS = {
    "lora.base_digest": "model_dir (the base model under the adapters)",
    "end_token_ids": "sampling.end_token_ids (of model_dir where it is not set)",
    "min_members": "sampling.min_members (half of group_size where it is 0)",
    "max_turns": "task.max_turns (1 without an environment)",
    "max_trajectory_tokens": "sampling.max_trajectory_tokens",
}
"""Settings that a node's configuration knows by another name."""
_REMEDIES = {
    "tokenizer_digest": "copy the tokenizer's files of the run's model_dir again",
    "chat_template_digest": "set use_chat_template and chat_template_arguments as the learner does, and copy"
    " chat_template.jinja and tokenizer_config.json of the run's model_dir",
    "task_digest": "copy the learner's [task], and its data, reward and environment files: compare the log lines of"
    " both nodes with `digest`, one for each of these",
    "num_prompts": "copy the learner's [task], with the same data file",
    "layout_id": "set model_dir to the run's model and published_dtype to the learner's",
    "vocab_size": "set model_dir to the run's model",
    "model_dir": "copy the weights of the run's model_dir again",
    "group_size": "set group_size as the learner does",
    "sampling": "copy the learner's [sampling]",
    "lora": "copy the learner's [lora]",
    "task": "copy the learner's [task]",
    "trajectory_s": "set task.trajectory_s as the learner does",
    "routed_token_bytes": "set sampling.router_replay as the learner does",
}
"""Remedies at a site, by the first part of a setting's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The newest lease.
    `expires` is a monotonic instant; `incarnation` stands for the holder's state_dir."""

    epoch: int
    holder: str
    request_id: str
    expires: float
    is_released: bool
    incarnation: str = ""


def decide_acquire(
    now: float, lease: Lease, *, holder: str, request_id: str, incarnation: str = ""
) -> tuple[int | None, float, str]:
    """Decide on a lease request.

    Returns the same epoch, a new one, or None, for how long None refuses, and the reason. A holder may always return
    from its own state_dir, to a new epoch. The name is not enough: a copied configuration has the same.
    """
    if lease.request_id == request_id and not lease.is_released:
        return lease.epoch, 0.0, f"epoch {lease.epoch} was granted to this request"
    wait_s = lease.expires - now
    is_own = (lease.holder, lease.incarnation) == (holder, incarnation)
    if lease.epoch and not lease.is_released and not is_own and wait_s > 0:
        who = lease.holder if lease.holder != holder else f"another learner whose holder is {holder} too"
        return None, wait_s, f"{who} holds the lease for {wait_s:.1f} s"
    return lease.epoch + 1, 0.0, f"epoch {lease.epoch + 1} begins for {holder}"


def contract_difference(stated: Contract, offered: Contract) -> str:
    """First setting in which two contracts differ, with both values, or empty."""
    for entry in fields(Contract):
        mine, theirs = getattr(stated, entry.name), getattr(offered, entry.name)
        if mine == theirs:
            continue
        name = entry.name
        if isinstance(mine, SamplingSemantics | LoraSettings):
            part = next(part.name for part in fields(mine) if getattr(mine, part.name) != getattr(theirs, part.name))
            name, mine, theirs = f"{name}.{part}", getattr(mine, part), getattr(theirs, part)
        return f"{_KEYS.get(name, name)}: the run has {mine}, this node {theirs}"
    return ""


def contract_remedy(difference: str) -> str:
    """The remedy at a site; names files."""
    return _REMEDIES[re.split(r"\W", difference, maxsplit=1)[0]]


@dataclass(slots=True)
class Standing:
    """The learner's last progress; used by store operations only."""

    _epoch: int = 0
    _progress: LearnerProgress | None = None
    _heard: float = 0.0

    def note(self, progress: LearnerProgress | None, *, epoch: int, now: float) -> None:
        """Keep an epoch's progress at a monotonic instant."""
        self._epoch, self._progress, self._heard = epoch, progress, now

    def of(self, epoch: int, now: float) -> tuple[LearnerProgress | None, float]:
        """Progress of this epoch's holder, and seconds since then; else (None, 0)."""
        if epoch != self._epoch or self._progress is None:
            return None, 0.0
        return self._progress, max(0.0, now - self._heard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The newest version: sizes of state and smallest payload, and changed share."""

    version: int
    published: float
    full_bytes: int
    last_bytes: int
    changed_fraction: float


def check_epoch(connection: Connection, epoch: int) -> None:
    """Fence by epoch. Raises StaleEpoch: not the newest, or released."""
    current = int(get_meta(connection, "epoch") or 0)
    if epoch != current:
        raise StaleEpoch(f"epoch {epoch} was superseded by epoch {current}")
    if get_meta(connection, "lease_released") != "0":
        raise StaleEpoch(f"epoch {epoch} was released")


def agree(connection: Connection, contract: Contract, *, may_state: bool) -> bool:
    """Compare with the run's contract; the first learner states it.
    Returns False if none is stated yet. Raises ContractMismatch: names the first setting that differs."""
    stated = read_contract(connection)
    if stated is None:
        if may_state:
            connection.execute("INSERT INTO meta VALUES ('contract', ?)", (contract_to_bytes(contract),))
        return may_state
    if difference := contract_difference(stated, contract):
        # A learner that differs from its own run has no other node to copy from.
        raise ContractMismatch(difference, action=None if may_state else contract_remedy(difference))
    return True


def read_contract(connection: Connection) -> Contract | None:
    """The run's contract, once stated."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'contract'").fetchone()
    return None if row is None else contract_from_bytes(row[0])


def read_head(connection: Connection) -> Head | None:
    """The newest version, once there is one."""
    row = connection.execute(
        "SELECT version, published, bytes_full, bytes_last, changed_fraction FROM versions"
        " ORDER BY version DESC LIMIT 1"
    ).fetchone()
    return None if row is None else Head(**dict(zip(Head.__slots__, row, strict=True)))


def head_version(connection: Connection) -> int | None:
    """The number of the newest version, once there is one."""
    row = connection.execute("SELECT version FROM versions ORDER BY version DESC LIMIT 1").fetchone()
    return None if row is None else int(row[0])


def num_versions(connection: Connection) -> int:
    """The number of versions ever published; their numbers are dense."""
    head = head_version(connection)
    return 0 if head is None else head + 1


def check_publication(connection: Connection, request: PublishRequest, manifest: Manifest, run_id: str) -> int | None:
    """Check a publication; returns the version if its step id is committed.
    Raises StaleEpoch, StepConflict, ParentNotHead, UnknownVersion, InvalidRequest."""
    check_epoch(connection, request.epoch)
    if not request.step_id:
        raise InvalidRequest("step_id must not be empty")
    check_signature(request.signature)
    row = connection.execute("SELECT version, content FROM versions WHERE step_id = ?", (request.step_id,)).fetchone()
    if row is not None:
        if row[1] != _content(request):
            raise StepConflict(f"step id {request.step_id} is version {row[0]} with other content")
        return int(row[0])
    head = head_version(connection)
    if request.parent_version != stated_version(head):
        raise ParentNotHead(f"parent {request.parent_version} is not the head, version {stated_version(head)}")
    contract = read_contract(connection)
    is_rollback = request.lineage_version != request.parent_version
    check_manifest(
        manifest,
        {
            "run_id": run_id,
            "epoch": request.epoch,
            "version": 0 if head is None else head + 1,
            "parent_version": request.lineage_version,
            "parent_digest": _parent_digest(connection, request.lineage_version),
            "layout_id": contract.layout_id if contract else "",
        },
        needs_snapshot=head is None or is_rollback,
        name="manifest",
    )
    return None


def check_signature(signature: bytes) -> None:
    """Check a signature's length. Raises InvalidRequest."""
    if len(signature) not in (0, SIGNATURE_BYTES):
        raise InvalidRequest(f"signature: {len(signature)} bytes, expected none or {SIGNATURE_BYTES}")


def check_manifest(manifest: Manifest, expected: Mapping[str, object], *, needs_snapshot: bool, name: str) -> None:
    """Check a manifest's fields, and that its payloads lead to it.
    Raises InvalidRequest: the field, below `name`."""
    for key, right in expected.items():
        if getattr(manifest, key) != right:
            raise InvalidRequest(f"{name}.{key}: {getattr(manifest, key)!r}, expected {right!r}")
    kinds = [payload.kind for payload in manifest.payloads]
    if needs_snapshot and PayloadKind.SNAPSHOT not in kinds:
        raise InvalidRequest(f"{name}.payloads: this version needs a snapshot")
    if not kinds or len(set(kinds)) != len(kinds):
        raise InvalidRequest(f"{name}.payloads: one of each kind at most, and at least one")
    for payload in manifest.payloads:
        if payload.kind is PayloadKind.MERGED:
            raise InvalidRequest(f"{name}.payloads: only the coordinator makes merged deltas")
        is_delta = payload.kind is PayloadKind.DELTA
        start = manifest.parent_version if is_delta else NO_VERSION
        if (payload.to_version, payload.from_version) != (manifest.version, start) or (
            is_delta and start == NO_VERSION
        ):
            raise InvalidRequest(f"{name}.payloads: {payload.kind.value} does not lead to version {manifest.version}")


def write_version(
    connection: Connection, request: PublishRequest, manifest: Manifest, *, now: float, reports: list[bytes]
) -> None:
    """Write the version, its payloads and its steps."""
    sizes = [payload.num_bytes for payload in manifest.payloads]
    connection.execute(
        "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
        (
            manifest.version,
            request.step_id,
            _content(request),
            request.epoch,
            request.manifest,
            manifest_digest(request.manifest),
            manifest.state_root,
            now,
            manifest.full_bytes,
            min(sizes, default=0),
            manifest.num_changed / manifest.num_elements if manifest.num_elements else 0.0,
        ),
    )
    chain = Chain(connection)
    chain.write_signature(manifest.version, request.signature)
    chain.offer(manifest.payloads)
    connection.executemany(
        "INSERT INTO steps VALUES (?, ?, ?) ON CONFLICT (step, version) DO UPDATE SET report = excluded.report",
        [(step.step, manifest.version, data) for step, data in zip(request.reports, reports, strict=True)],
    )


def abandon_versions(connection: Connection, request: PublishRequest) -> list[int]:
    """Abandon the versions between lineage and parent; returns them."""
    rows = connection.execute(
        "UPDATE versions SET is_abandoned = 1"
        " WHERE version > ? AND version <= ? AND is_abandoned = 0 RETURNING version",
        (request.lineage_version, request.parent_version),
    ).fetchall()
    versions = [int(row[0]) for row in rows]
    connection.executemany("DELETE FROM steps WHERE version = ?", [(version,) for version in versions])
    return versions


def version_of_step(connection: Connection, step_id: str) -> int | None:
    """The version of a step id, or None."""
    row = connection.execute("SELECT version FROM versions WHERE step_id = ?", (step_id,)).fetchone()
    return None if row is None else int(row[0])


def _parent_digest(connection: Connection, version: int) -> str:
    if version == NO_VERSION:
        return ""
    row = connection.execute(
        "SELECT manifest_digest FROM versions WHERE version = ? AND is_abandoned = 0", (version,)
    ).fetchone()
    if row is None:
        raise UnknownVersion(f"version {version} does not exist in the lineage")
    return str(row[0])


def _content(request: PublishRequest) -> str:
    ids = "".join(f"{g.site}/{g.incarnation}/{g.sequence};" for g in request.consumed)
    # Empty without variants, so that earlier versions keep their content.
    variants = "".join(f"{entry.variant}/{manifest_digest(entry.manifest)};" for entry in request.variants)
    text = f"{request.parent_version}/{request.lineage_version}/{ids}{variants}"
    return bytes_digest(text.encode() + request.manifest)


def read_statement(connection: Connection) -> bytes:
    """The learner's first statement, or empty."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'statement'").fetchone()
    return b"" if row is None else bytes(row[0])


def keep_statement(connection: Connection, statement: bytes) -> str:
    """Keep the first statement; returns how a later one differs."""
    if not statement:
        return ""
    kept = read_statement(connection)
    if kept:
        return statement_difference(statement_from_bytes(kept), statement_from_bytes(statement))
    connection.execute("INSERT INTO meta VALUES ('statement', ?)", (statement,))
    return ""


def superseded_s(connection: Connection, version: int, *, reach: int, now: float) -> float:
    """Seconds since one of the next `reach` versions was published.
    The newest version has 0. `now` is wall time."""
    (published,) = connection.execute(
        "SELECT min(published) FROM versions WHERE version > ? AND version <= ? AND is_abandoned = 0",
        (version, min(version + reach, MAX_INT64)),
    ).fetchone()
    return 0.0 if published is None else max(0.0, now - float(published))


def oldest_usable(connection: Connection, *, head: int, max_versions: int, max_s: float, now: float) -> int:
    """The oldest version within both bounds, of versions and of seconds."""
    floor = head - max_versions
    row = connection.execute(
        "SELECT max(version) FROM versions WHERE version > ? AND published < ? AND is_abandoned = 0",
        (floor, now - max_s),
    ).fetchone()
    # It superseded all versions before it more than `max_s` ago.
    return floor if row[0] is None else int(row[0])


def abandoned_span(connection: Connection, versions: Sequence[int]) -> int | None:
    """An abandoned version among a group's versions, or None."""
    (found,) = connection.execute(
        f"SELECT min(version) FROM versions WHERE is_abandoned = 1 AND version IN {NUMBERS}", (json.dumps(versions),)
    ).fetchone()
    return None if found is None else int(found)


VERSIONS_TIMED = 8
"""Newest versions whose intervals give the duration of a version."""
_MANY = 1e6


def coming(connection: Connection, generation_s: float, *, head: int, now: float) -> int:
    """Versions that come in the `generation_s` of a group; 0 while unknown.

    A version takes the mean of the last VERSIONS_TIMED, or the time since the newest one if that is longer.
    """
    rows = connection.execute(
        "SELECT published FROM versions WHERE version >= ? AND is_abandoned = 0 ORDER BY version DESC",
        (head - VERSIONS_TIMED,),
    ).fetchall()
    if len(rows) < 2:
        return 0
    newest, oldest = float(rows[0][0]), float(rows[-1][0])
    version_s = max((newest - oldest) / (len(rows) - 1), now - newest)
    # The version that the group ends with does not count.
    if generation_s <= 0 or version_s <= 0:
        return 0
    return math.ceil(min(generation_s / version_s, _MANY)) - 1


def variant_of(connection: Connection, version: int, state_root: str) -> str:
    """The variant in which a version has this state.
    A site may have changed its variant since."""
    row = connection.execute(
        "SELECT variant FROM variant_versions WHERE version = ? AND state_root = ?", (version, state_root)
    ).fetchone()
    return TRAINED if row is None else str(row[0])
