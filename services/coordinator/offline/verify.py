"""Checks of a whole history: manifests, signatures, payloads and rebuilt states.

    numbers      versions are 0, 1, 2, ... without a gap; a variant has some of them
    manifests    each row's manifest has the digest, number, epoch, run and state root that the row states
    parents      each manifest names by digest an earlier manifest that was not abandoned; epochs grow
    forks        a version that follows an older one abandons all in between, and the store says the same
    variants     a variant's version follows the same parent as its version, or begins the variant
    signatures   with keys given, each signature is of one of them over exactly these bytes
    payloads     each is there, complete and right
    replay       each leads to the state that its manifest states

Manifests are read one at a time; of each only the fields without its chunk digests stay. A replay holds one chunk for
each version with open children, and 16 bytes for each chunk of a version.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heterorl.common.errors import CorruptData, MalformedPayload
from heterorl.common.identity.signing import signed_by
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind, PayloadRef
from heterorl.common.weights.arena import Chunk, IntArray, digest_integers, state_root, zeros
from heterorl.common.weights.codec import apply_chunk
from heterorl.common.weights.manifest import chunks_of
from heterorl.common.weights.payload import PayloadChunks, file_digest
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes
from heterorl.coordinator.offline.history import History, StoredVersion


class Check(enum.Enum):
    """A kind of check; its value is the text in tables."""

    NUMBERS = "numbers are dense"
    MANIFESTS = "manifests are as stored"
    PARENTS = "parents by digest"
    FORKS = "one line, no forks"
    SIGNATURES = "signatures"
    PAYLOADS = "payloads by digest"
    REPLAY = "states rebuilt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem of a version."""

    check: Check
    version: int
    problem: str


@dataclass(slots=True, kw_only=True)
class Report:
    """Counts of checks by kind, and their findings."""

    checked: dict[Check, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.findings

    def count(self, check: Check) -> None:
        self.checked[check] = self.checked.get(check, 0) + 1

    def find(self, check: Check, version: int, problem: str) -> None:
        self.findings.append(Finding(check=check, version=version, problem=problem))


def check_manifests(
    history: History, *, keys: Sequence[str], report: Report, trained: Mapping[int, Manifest] | None = None
) -> dict[int, Manifest]:
    """Check everything that needs no payload; returns the readable manifests by version.

    They have no chunk digests. `trained` are the trained weights' manifests, for a variant's history.
    Raises ConfigError: `keys` has a bad key.
    """
    digests: dict[int, Digest] = {}
    abandoned: set[int] = set()
    manifests: dict[int, Manifest] = {}
    for row in history.versions():
        digests[row.version] = manifest_digest(row.manifest)
        if row.is_abandoned:
            abandoned.add(row.version)
        manifest = _check_row(row, digests[row.version], run_id=history.run_id, report=report)
        if manifest is not None:
            manifests[row.version] = dataclasses.replace(manifest, chunk_digests=())
        if keys:
            _check_signature(row, keys=keys, report=report)
    traces = history.connection.execute("SELECT 1 FROM steps UNION ALL SELECT 1 FROM groups WHERE state = 'consumed'")
    if not digests and (history.offered or traces.fetchone()):
        report.find(Check.NUMBERS, 0, "there is no version, but there are payloads, steps or trained groups")
    for version in range(max(digests, default=NO_VERSION) + 1) if trained is None else digests:
        report.count(Check.NUMBERS)
        if version not in (digests if trained is None else trained):
            report.find(Check.NUMBERS, version, "is missing")
    for version, manifest in manifests.items():
        _check_parent(version, manifest, digests=digests, manifests=manifests, trained=trained, report=report)
    if trained is None:
        # Only the history of the trained weights abandons versions.
        _check_forks(digests, abandoned, manifests, report=report)
    return manifests


def _check_row(row: StoredVersion, digest: Digest, *, run_id: str, report: Report) -> Manifest | None:
    report.count(Check.MANIFESTS)
    if digest != row.manifest_digest:
        report.find(Check.MANIFESTS, row.version, "the manifest's bytes have another digest than when it was published")
    try:
        manifest = manifest_from_bytes(row.manifest)
    except MalformedPayload as error:
        report.find(Check.MANIFESTS, row.version, str(error))
        return None
    facts = {
        "version": (manifest.version, row.version),
        "epoch": (manifest.epoch, row.epoch),
        "run": (manifest.run_id, run_id),
        "state root": (manifest.state_root, row.state_root),
        "chunk digests' root": (state_root(manifest.layout_id, manifest.chunk_digests), manifest.state_root),
    }
    for name, (stated, right) in facts.items():
        if stated != right:
            report.find(Check.MANIFESTS, row.version, f"the {name} is {stated}, expected {right}")
    return manifest


def _check_signature(row: StoredVersion, *, keys: Sequence[str], report: Report) -> None:
    report.count(Check.SIGNATURES)
    if not row.signature:
        report.find(Check.SIGNATURES, row.version, "is not signed")
    elif signed_by(row.manifest, row.signature, keys) is None:
        report.find(Check.SIGNATURES, row.version, "the signature is of none of the given keys over these bytes")


def _check_parent(
    version: int,
    manifest: Manifest,
    *,
    digests: Mapping[int, Digest],
    manifests: Mapping[int, Manifest],
    trained: Mapping[int, Manifest] | None,
    report: Report,
) -> None:
    report.count(Check.PARENTS)
    number = manifest.parent_version
    if trained is not None and version in trained:
        follows = trained[version].parent_version
        right = (follows if follows in digests else NO_VERSION, trained[version].step)
        if (number, manifest.step) != right:
            stated = f"follows version {number} at step {manifest.step}"
            report.find(Check.PARENTS, version, f"{stated}, expected version {right[0]} at step {right[1]}")
            return
    if number == NO_VERSION:
        if manifest.parent_digest or (trained is None and version != min(digests)):
            report.find(Check.PARENTS, version, "names no parent and is not the first")
        return
    if not NO_VERSION < number < version:
        report.find(Check.PARENTS, version, f"names version {number} as its parent")
        return
    if number not in digests:
        report.find(Check.PARENTS, version, f"its parent, version {number}, is missing")
        return
    if digests[number] != manifest.parent_digest:
        report.find(Check.PARENTS, version, f"names another version {number} as its parent than the one stored")
    parent = manifests.get(number)
    if parent is not None and parent.epoch > manifest.epoch:
        report.find(Check.PARENTS, version, f"its epoch {manifest.epoch} is before its parent's, {parent.epoch}")


def _check_forks(
    versions: Collection[int], abandoned: Collection[int], manifests: Mapping[int, Manifest], *, report: Report
) -> None:
    """Find forks, and marks of abandonment that no manifest states."""
    abandoned_by: dict[int, int] = {}
    for version in sorted(manifests):
        report.count(Check.FORKS)
        manifest = manifests[version]
        breaker = abandoned_by.get(manifest.parent_version)
        if breaker is not None:
            report.find(
                Check.FORKS,
                version,
                f"follows version {manifest.parent_version}, which version {breaker} had abandoned: two histories",
            )
        abandoned_by.update({number: version for number in manifest.abandoned if number in versions})
    for version in versions:
        if version in abandoned and version not in abandoned_by and version in manifests:
            report.find(Check.FORKS, version, "is marked as abandoned, and no manifest says so")
        if version not in abandoned and version in abandoned_by:
            report.find(Check.FORKS, version, f"is served, although version {abandoned_by[version]} abandoned it")


Advance = Callable[[float], None]


def check_payloads(
    history: History, manifests: Mapping[int, Manifest], *, report: Report, advance: Advance
) -> dict[str, Path]:
    """Hash every payload of the manifests; returns the right files by digest.
    `advance` gets the bytes checked."""
    right: dict[str, Path] = {}
    for version, manifest in sorted(manifests.items()):
        for payload in manifest.payloads:
            report.count(Check.PAYLOADS)
            problem = _check_payload(history, payload) if _is_in_place(payload, manifest) else "leads elsewhere"
            if problem:
                report.find(Check.PAYLOADS, version, f"{payload.kind.value} {payload.digest[:12]} {problem}")
            else:
                right[payload.digest] = history.payload(payload.digest)
            advance(payload.num_bytes)
    return right


def _is_in_place(payload: PayloadRef, manifest: Manifest) -> bool:
    start = manifest.parent_version if payload.kind is PayloadKind.DELTA else -1
    if payload.kind is PayloadKind.MERGED:
        return False
    return (payload.from_version, payload.to_version) == (start, manifest.version) and start < manifest.version


def _check_payload(history: History, payload: PayloadRef) -> str:
    path = history.payload(payload.digest)
    if not path.is_file():
        return "is not stored"
    if path.stat().st_size != payload.num_bytes:
        return f"has {path.stat().st_size} bytes, not {payload.num_bytes}"
    try:
        return "" if file_digest(path) == payload.digest else "has other bytes"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def replay(
    history: History, manifests: Mapping[int, Manifest], files: Mapping[str, Path], *, report: Report, advance: Advance
) -> None:
    """Rebuild each state by chunks; compare each chunk's digest.

    `files` are the payloads that passed `check_payloads`; others are skipped. `advance` gets each chunk's share of its
    payload.
    """
    families: dict[Digest, _Replay] = {}
    for row in history.versions():
        if row.version not in manifests:
            continue
        manifest = manifest_from_bytes(row.manifest)
        try:
            chunks = chunks_of(manifest)
        except MalformedPayload as error:
            report.find(Check.REPLAY, row.version, str(error))
            continue
        layout_id = manifest.layout_id
        family = families.setdefault(layout_id, _Replay(files, layout_id, chunks, report, advance))
        if chunks == family.chunks:
            family.add(manifests[row.version], manifest.chunk_digests)
        else:
            report.find(Check.REPLAY, row.version, "has other sizes than the versions before, and the same layout id")
    for family in families.values():
        family.run()


@dataclass(eq=False, repr=False)
class _Replay:
    files: Mapping[str, Path]
    layout_id: Digest
    chunks: tuple[Chunk, ...]
    report: Report
    advance: Advance
    _roots: dict[int, Digest] = field(default_factory=dict)
    _digests: dict[int, bytes] = field(default_factory=dict)
    """Each version's chunk digests, one after another."""
    _payloads: list[PayloadRef] = field(default_factory=list)
    _opened: dict[PayloadRef, PayloadChunks] = field(default_factory=dict)
    _failed: set[PayloadRef] = field(default_factory=set)

    def add(self, manifest: Manifest, chunk_digests: Sequence[bytes]) -> None:
        self._roots[manifest.version] = manifest.state_root
        self._digests[manifest.version] = b"".join(chunk_digests)
        in_place = dict.fromkeys(payload for payload in manifest.payloads if _is_in_place(payload, manifest))
        self._payloads += in_place

    def run(self) -> None:
        for payload in self._payloads:
            self._open(payload)
        for number in range(len(self.chunks)):
            self._rebuild_chunk(number)

    def _open(self, payload: PayloadRef) -> None:
        self.report.count(Check.REPLAY)
        path = self.files.get(payload.digest)
        if path is None:
            # `check_payloads` has reported it.
            self._failed.add(payload)
            return
        root = None
        if payload.kind is PayloadKind.DELTA:
            if payload.from_version not in self._roots:
                self._fail(payload, f"version {payload.from_version}, which it starts from, cannot be read")
                return
            root = self._roots[payload.from_version]
        try:
            self._opened[payload] = PayloadChunks(
                path, layout_id=self.layout_id, chunks=self.chunks, expected_from_root=root
            )
        except CorruptData as error:
            self._fail(payload, str(error))

    def _rebuild_chunk(self, number: int) -> None:
        children = Counter(payload.from_version for payload in self._payloads)
        states: dict[int, IntArray] = {}
        for payload in self._payloads:
            state = self._apply(payload, number, states)
            if state is not None and children[payload.to_version]:
                states[payload.to_version] = state
            self.advance(1 / len(self.chunks))
            children[payload.from_version] -= 1
            if not children[payload.from_version]:
                states.pop(payload.from_version, None)

    def _apply(self, payload: PayloadRef, number: int, states: Mapping[int, IntArray]) -> IntArray | None:
        if payload in self._failed:
            return None
        chunk = self.chunks[number]
        if payload.kind is PayloadKind.SNAPSHOT:
            state = zeros(chunk)
        elif payload.from_version in states:
            state = states[payload.from_version].copy()
        else:
            self._fail(payload, f"version {payload.from_version}, which it starts from, could not be rebuilt")
            return None
        try:
            method, data = self._opened[payload].read(number)
            apply_chunk(method, memoryview(data), state)
        except CorruptData as error:
            self._fail(payload, f"chunk {number}: {error}")
            return None
        digest = digest_integers(state)
        start = number * len(digest)
        if digest != self._digests[payload.to_version][start : start + len(digest)]:
            self._fail(payload, f"leads to another chunk {number} than the manifest states")
            return None
        return state

    def _fail(self, payload: PayloadRef, problem: str) -> None:
        self._failed.add(payload)
        self.report.find(Check.REPLAY, payload.to_version, f"{payload.kind.value}: {problem}")


def with_offered(history: History, manifests: Mapping[int, Manifest]) -> dict[int, Manifest]:
    """Manifests with the payloads that the store offers.
    Deleted ones are left out, the coordinator's own snapshots are added."""
    offered = {(payload.to_version, payload.kind): payload for payload in history.offered}
    digests = {payload.digest for payload in history.offered}
    kept: dict[int, Manifest] = {}
    for version, manifest in manifests.items():
        # Only the learner makes deltas: one offered under another name must be reported.
        payloads = [
            payload
            for payload in manifest.payloads
            if payload.digest in digests or (payload.kind is PayloadKind.DELTA and (version, payload.kind) in offered)
        ]
        snapshot = offered.get((version, PayloadKind.SNAPSHOT))
        if snapshot is not None and all(snapshot.digest != payload.digest for payload in payloads):
            payloads.append(snapshot)
        kept[version] = dataclasses.replace(manifest, payloads=tuple(payloads))
    return kept


def rebuildable(manifests: Mapping[int, Manifest], kept: Mapping[int, Manifest]) -> dict[int, Manifest]:
    """`kept` without the deltas from versions that no remaining payload leads to."""
    lost: set[int] = set()
    found: dict[int, Manifest] = {}
    for version, manifest in sorted(kept.items()):
        payloads = tuple(p for p in manifest.payloads if p.kind is PayloadKind.SNAPSHOT or p.from_version not in lost)
        is_less = len(payloads) < len(manifest.payloads) or not set(manifests[version].payloads) <= set(payloads)
        if not payloads and is_less:
            lost.add(version)
        found[version] = dataclasses.replace(manifest, payloads=payloads)
    return found
