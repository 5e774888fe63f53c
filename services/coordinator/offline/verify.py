"""What must hold of a whole history, checked from the manifests alone. Pure: rows in, findings out.

numbers      versions are 0, 1, 2, ... without a gap; a flavour has some of them
manifests    each row holds a manifest that has the digest, number, epoch, run and state root that the row states
parents      each manifest names by digest the manifest of an earlier version that was not abandoned; epochs grow
forks        a version that follows an older one abandons all in between, and the store says the same
flavours     a flavour's version follows what its version follows, or begins the flavour where that has none of it
signatures   where keys are given, each signature is of one of them over exactly these bytes
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heterorl.common.errors import MalformedPayload
from heterorl.common.identity.signing import signed_by
from heterorl.common.types.policy import NO_VERSION, Manifest
from heterorl.common.weights.arena import state_root
from heterorl.common.wire.policy import manifest_digest, manifest_from_bytes
from heterorl.coordinator.offline.history import History, StoredVersion


class Check(enum.Enum):
    """One kind of check; the value is what tables show."""

    NUMBERS = "numbers are dense"
    MANIFESTS = "manifests are as stored"
    PARENTS = "parents by digest"
    FORKS = "one line, no forks"
    SIGNATURES = "signatures"
    PAYLOADS = "payloads by digest"
    REPLAY = "states rebuilt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that does not hold of a version."""

    check: Check
    version: int
    problem: str


@dataclass(slots=True, kw_only=True)
class Report:
    """How much was checked of each kind, and what was found."""

    checked: dict[Check, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def count(self, check: Check) -> None:
        """One more thing of this kind was looked at."""
        self.checked[check] = self.checked.get(check, 0) + 1

    def find(self, check: Check, version: int, problem: str) -> None:
        """Note what does not hold."""
        self.findings.append(Finding(check=check, version=version, problem=problem))


def check_manifests(
    history: History, *, keys: Sequence[str], report: Report, trained: Mapping[int, Manifest] | None = None
) -> dict[int, Manifest]:
    """Check all that needs no payload; returns the manifests that could be read, by version.

    `trained` are the manifests of the weights that are trained, for the history of a flavour.

    Raises:
        ConfigError: one of `keys` is not a public key.
    """
    rows = {row.version: row for row in history.versions}
    if not rows:
        report.find(Check.NUMBERS, 0, "there is no version")
    for version in range(max(rows, default=NO_VERSION) + 1) if trained is None else rows:
        report.count(Check.NUMBERS)
        if version not in (rows if trained is None else trained):
            report.find(Check.NUMBERS, version, "is missing")
    manifests: dict[int, Manifest] = {}
    for row in history.versions:
        manifest = _check_row(row, run_id=history.run_id, report=report)
        if manifest is not None:
            manifests[row.version] = manifest
        if keys:
            _check_signature(row, keys=keys, report=report)
    for version, manifest in manifests.items():
        _check_parent(version, manifest, rows=rows, manifests=manifests, trained=trained, report=report)
    if trained is None:
        # Which versions are abandoned is the trained weights' to say.
        _check_forks(rows, manifests, report=report)
    return manifests


def _check_row(row: StoredVersion, *, run_id: str, report: Report) -> Manifest | None:
    report.count(Check.MANIFESTS)
    if manifest_digest(row.manifest) != row.manifest_digest:
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
    rows: Mapping[int, StoredVersion],
    manifests: Mapping[int, Manifest],
    trained: Mapping[int, Manifest] | None,
    report: Report,
) -> None:
    report.count(Check.PARENTS)
    number = manifest.parent_version
    if trained is not None and version in trained:
        follows = trained[version].parent_version
        right = (follows if follows in rows else NO_VERSION, trained[version].step)
        if (number, manifest.step) != right:
            stated = f"follows version {number} at step {manifest.step}"
            report.find(Check.PARENTS, version, f"{stated}, expected version {right[0]} at step {right[1]}")
            return
    if number == NO_VERSION:
        if manifest.parent_digest or (trained is None and version != min(rows)):
            report.find(Check.PARENTS, version, "names no parent and is not the first")
        return
    if not NO_VERSION < number < version:
        report.find(Check.PARENTS, version, f"names version {number} as its parent")
        return
    if number not in rows:
        report.find(Check.PARENTS, version, f"its parent, version {number}, is missing")
        return
    if manifest_digest(rows[number].manifest) != manifest.parent_digest:
        report.find(Check.PARENTS, version, f"names another version {number} as its parent than the one stored")
    parent = manifests.get(number)
    if parent is not None and parent.epoch > manifest.epoch:
        report.find(Check.PARENTS, version, f"its epoch {manifest.epoch} is before its parent's, {parent.epoch}")


def _check_forks(rows: Mapping[int, StoredVersion], manifests: Mapping[int, Manifest], *, report: Report) -> None:
    """Each manifest says which versions it abandons; two that follow the same version would be two histories."""
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
        abandoned_by.update({number: version for number in manifest.abandoned if number in rows})
    for version, row in rows.items():
        if row.is_abandoned and version not in abandoned_by and version in manifests:
            report.find(Check.FORKS, version, "is marked as abandoned, and no manifest says so")
        if not row.is_abandoned and version in abandoned_by:
            report.find(Check.FORKS, version, f"is served, although version {abandoned_by[version]} abandoned it")
