"""The trust record: verified versions on disk, and checks of their successors.

    versions.jsonl            one row for each version, with the fields of `SeenVersion`
    versions.VARIANT.jsonl    the same for a variant, whose states differ under the same numbers
    versions.jsonl.above-5    the record before an operator agreed that the run went back to version 5

A row is on disk before its version is used. The sampler never accepts another state or manifest for a version in the
record, nor a head below it, also after a restart. Only an operator of this site may agree that the run went back
(`heterorl accept-rewind`): a restored coordinator and an attacker's look the same from here. A row torn by a crash is
cut off, and its version is verified again.

A version may follow only if it descends from the version used last, or names that one as abandoned. A manifest names
its parent by digest, so the manifests from the new version back to the recorded one form a chain. Numbers are dense and
never reused. Version v with parent p < v - 1 states that versions p + 1 to v - 1 are abandoned. The signature of the
new version covers that statement.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from heterorl.common.errors import CorruptStore, DiskFull, OperatorError, UnknownVersion, UnprovenDescent
from heterorl.common.identity.signing import UNSIGNED
from heterorl.common.process.files import (
    BAD_ROW,
    cut_torn_line,
    make_directory,
    refuse_root,
    replacing,
    room,
    sync_directory,
    write_all,
)
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION, Manifest
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes

_LOG = logging.getLogger(__name__)
Fetch = Callable[[int, int], Awaitable[Sequence[bytes]]]
"""Maps the oldest and newest of a range of versions to their manifests, newest first, as many as fit one answer."""
MAX_AT_ONCE = 256
"""Manifests in one request, so that a long chain costs few round trips."""
NOTHING_ABANDONED = range(0)


class RunReplaced(OperatorError):
    """Versions that this sampler verified are lost, or another run's."""

    action = (
        "ask the run's operator; where the run was restored from a backup, of version V, agree once on this host by"
        " `heterorl accept-rewind RUN:V --config sampler.toml` with the service's `--set state_dir=DIR`, and restart it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenVersion:
    """A verified version.

    `signed_by` is the public key that signed its manifest, or "unsigned" if no key was trusted.
    """

    version: int
    state_root: Digest
    manifest_digest: str
    run_id: str
    signed_by: str


class TrustRecord:
    """Rows of one file. Blocking; call from threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[int, SeenVersion] = {}
        self.highest_version = NO_VERSION
        if path.exists():
            self._read()
        else:
            make_directory(path.parent)
            path.touch()
            # Without this a power cut could lose the whole file.
            sync_directory(path.parent)

    @property
    def versions(self) -> Mapping[int, SeenVersion]:
        return MappingProxyType(self._seen)

    def rewind(self, to_version: int) -> list[SeenVersion]:
        """Forget rows above a version by order of an operator; returns them.

        Durable when it returns; a copy of the old record stays next to it.
        """
        forgotten = [seen for version, seen in sorted(self._seen.items()) if version > to_version]
        if forgotten:
            kept = {version: seen for version, seen in self._seen.items() if version <= to_version}
            _keep_beside(self.path, f"{self.path.name}.above-{to_version}")
            with replacing(self.path, is_durable=True) as file:
                file.write(b"".join(map(_row, kept.values())))
            self._seen = kept
            self.highest_version = max(kept, default=NO_VERSION)
        return forgotten

    @property
    def newest(self) -> SeenVersion | None:
        return self._seen.get(self.highest_version)

    def note(self, seen: SeenVersion) -> None:
        """Append a verified version; durable when it returns.

        Raises RunReplaced: the version was seen with another state or manifest; DiskFull: the row is not written.
        """
        known = self._seen.get(seen.version)
        if known == seen:
            return
        if known is not None and known.state_root != seen.state_root:
            states = f"had state {known.state_root[:12]} before and has {seen.state_root[:12]} now"
            raise RunReplaced(f"version {seen.version} {states}")
        if known is not None and known.manifest_digest != seen.manifest_digest:
            raise RunReplaced(f"version {seen.version} has another manifest than before")
        row = _row(seen)
        with self.path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                with room(self.path.parent):
                    write_all(file, row)
                    os.fsync(file.fileno())
            except (OSError, DiskFull):
                file.truncate(before)
                raise
        self._add(seen)

    def _add(self, seen: SeenVersion) -> None:
        self._seen[seen.version] = seen
        self.highest_version = max(self.highest_version, seen.version)

    def _read(self) -> None:
        for number, line in enumerate(cut_torn_line(self.path).splitlines(), start=1):
            try:
                seen = _parse(json.loads(line))
            except BAD_ROW as error:
                action = "move it away; versions seen before are then not recognised"
                raise CorruptStore(f"{self.path}, line {number}: {error}", action=action) from error
            self._add(seen)


def _row(seen: SeenVersion) -> bytes:
    return (json.dumps(dataclasses.asdict(seen)) + "\n").encode("ascii")


def _keep_beside(path: Path, name: str) -> None:
    for number in itertools.count(1):
        try:
            path.with_name(name if number == 1 else f"{name}.{number}").hardlink_to(path)
        except FileExistsError:
            continue
        sync_directory(path.parent)
        return


def _parse(row: dict[str, Any]) -> SeenVersion:
    return SeenVersion(
        version=int(row["version"]),
        state_root=Digest(str(row["state_root"])),
        manifest_digest=str(row["manifest_digest"]),
        run_id=str(row["run_id"]),
        signed_by=str(row["signed_by"]),
    )


def record_name(variant: str) -> str:
    """File name in the state directory."""
    return f"versions.{variant}.jsonl" if variant else "versions.jsonl"


def check_head(head_version: int, *, seen_version: int) -> None:
    """Raise RunReplaced for a head below the newest version known before."""
    if head_version < seen_version:
        raise RunReplaced(f"the head is version {head_version}, but version {seen_version} was seen before")


async def check_descent(
    data: bytes, *, used: Mapping[int, SeenVersion], known: Mapping[int, bytes], fetch: Fetch, run: str = ""
) -> range:
    """Check a new version's manifest against the ones used.

    Returns the abandoned versions. `known` are manifests by version, trusted no more than fetched ones; without a used
    version any first one of `run` is accepted, or of any run if that is empty.

    Raises RunReplaced: the version is older, of another run, or descends from a sibling of one that was used;
    UnprovenDescent: the coordinator does not show the manifests between.
    """
    child = manifest_from_bytes(data)
    newest = used[max(used)] if used else None
    own_run = run if newest is None else newest.run_id
    if own_run and child.run_id != own_run:
        problem = f"version {child.version} is of run {child.run_id}, this site works for {own_run}"
        raise RunReplaced(problem, action="name the coordinator of that run, or choose another state_dir")
    if newest is None:
        return NOTHING_ABANDONED
    if child.version < newest.version:
        raise RunReplaced(f"version {child.version} is older than version {newest.version}, used before")
    if child.version == newest.version:
        if manifest_digest(data) != newest.manifest_digest:
            raise RunReplaced(f"version {child.version} is another than the one used before")
        return NOTHING_ABANDONED
    manifests = dict(known)
    while child.parent_version > newest.version:
        child = await _parent(child, manifests, oldest=newest.version + 1, fetch=fetch)
    abandoned = child.abandoned if child.parent_version < newest.version else NOTHING_ABANDONED
    # Below an abandoned branch too: another version of a used number would be another history.
    while (below := max((version for version in used if version <= child.parent_version), default=None)) is not None:
        if child.parent_version == below:
            if child.parent_digest != used[below].manifest_digest:
                problem = f"version {child.version} does not descend from the version {below}"
                raise RunReplaced(f"{problem} that was used before")
            break
        child = await _parent(child, manifests, oldest=below + 1, fetch=fetch)
    return abandoned


async def _parent(child: Manifest, manifests: dict[int, bytes], *, oldest: int, fetch: Fetch) -> Manifest:
    number = child.parent_version
    if number not in manifests:
        first = max(oldest, number - MAX_AT_ONCE + 1)
        try:
            found = await fetch(first, number)
        except UnknownVersion as error:
            raise UnprovenDescent(f"the coordinator does not show the way to version {child.version}") from error
        if not found:
            raise UnprovenDescent(f"the coordinator does not show the way to version {child.version}")
        # Known manifests are kept; those beyond the range were not asked for.
        manifests.update(
            (version, data)
            for version, data in zip(range(number, first - 1, -1), found, strict=False)
            if version not in manifests
        )
    # Removed when used: a long chain must not stay in memory.
    data = manifests.pop(number)
    if manifest_digest(data) != child.parent_digest:
        raise UnprovenDescent(f"version {child.version} names another version {number} than the coordinator shows")
    return manifest_from_bytes(data)


def differences(state_dir: Path, *, run: str, to_version: int) -> list[str]:
    """Sentences on what `agree` would forget, one for each record.

    Raises OperatorError: there is no record, it belongs to another run, or root runs this in another user's directory;
    CorruptStore: a record cannot be read.
    """
    sentences = []
    for record in _records(state_dir, run):
        newest = record.newest
        if newest is None or newest.version <= to_version:
            continue
        left = max((version for version in record.versions if version <= to_version), default=NO_VERSION)
        then = f"what follows must descend from version {left}" if left >= 0 else "any first version is taken"
        signed = "no signature checked" if newest.signed_by == UNSIGNED else f"signed by {newest.signed_by}"
        sentences.append(
            f"{record.path.name}: version {newest.version}, state {newest.state_root[:12]}, {signed}, was seen here;"
            f" the run goes back to version {to_version}; {then}"
        )
    return sentences


def agree(state_dir: Path, *, run: str, to_version: int) -> None:
    """Forget rows above the version, durably; raises as `differences`."""
    for record in _records(state_dir, run):
        if forgotten := record.rewind(to_version):
            first, last = forgotten[0], forgotten[-1]
            _LOG.warning(
                "%d versions from %d, state %s, to %d, state %s, are forgotten by order",
                len(forgotten), first.version, first.state_root, last.version, last.state_root,
            )  # fmt: skip


def _records(state_dir: Path, run: str) -> list[TrustRecord]:
    refuse_root(state_dir)
    paths = sorted({*state_dir.glob(record_name("")), *state_dir.glob(record_name("*"))})
    if not paths:
        action = "name the directory of the sampler: --set state_dir=DIR"
        raise OperatorError(f"{state_dir} has no record of versions", action=action)
    records = [TrustRecord(path) for path in paths]
    for record in records:
        newest = record.newest
        if newest is not None and newest.run_id != run:
            raise OperatorError(f"{state_dir} is of run {newest.run_id}, not {run}", action="name that run")
    return records
