"""The durable record of the versions that this sampler verified: versions.jsonl, one row each.

A flavour's states are others under the same numbers, so its file is another one, versions.<flavour>.jsonl.

    {"version": 7, "state_root": "<64 hex>", "manifest_digest": "<64 hex>", "run_id": "run", "signed_by": "unsigned"}

Guarantees: a row is on disk before its version can be generated with; a version seen once is never accepted with
another state or manifest, and a head below a version seen is never followed, also after a restart: only a person at
this site may agree that the run went back, by `heterorl accept-rewind`, and what was seen is kept beside. A row torn by
a crash is cut off: its version is verified again. Rows of an earlier program state neither digest, run nor signature;
then less is held against what comes.

    versions.jsonl            what holds
    versions.jsonl.above-5    what held before a person agreed that the run went back to version 5
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterorl.common.errors import CorruptStore, DiskFull, OperatorError
from heterorl.common.process.files import make_directory, replacing, sync_directory
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION


class RunReplaced(OperatorError):
    """The coordinator contradicts what this sampler verified before: its versions were lost, or are another run's."""

    action = (
        "ask the run's operator; where the run was restored from a backup, of version V, agree once on this machine by"
        " `heterorl accept-rewind RUN:V --config sampler.toml`, and start again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenVersion:
    """A version that this sampler verified; empty where a row does not say.

    `signed_by` is the public key that signed its manifest, or "unsigned" where no key was trusted.

    Example: SeenVersion(version=7, state_root=root, manifest_digest=digest, run_id="run", signed_by="ed25519:...")
    """

    version: int
    state_root: Digest
    manifest_digest: str = ""
    run_id: str = ""
    signed_by: str = ""


class VersionRecord:
    """Rows of one file. Blocking; call from threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[int, SeenVersion] = {}
        if path.exists():
            self._read()
        else:
            make_directory(path.parent)
            path.touch()
            # Without this a power cut could take the whole file, fsynced rows and all.
            sync_directory(path.parent)

    @property
    def versions(self) -> Collection[int]:
        """Numbers of the versions that were verified."""
        return self._seen.keys()

    def rewind(self, to_version: int) -> list[SeenVersion]:
        """Forget what was seen above a version, where a person says that the run went back; returns what is forgotten.

        Durable when it returns; the record as it was is kept beside it.
        """
        forgotten = [seen for version, seen in sorted(self._seen.items()) if version > to_version]
        if forgotten:
            kept = {version: seen for version, seen in self._seen.items() if version <= to_version}
            _keep_beside(self.path, f"{self.path.name}.above-{to_version}")
            with replacing(self.path, is_durable=True) as file:
                file.write(b"".join(map(_row, kept.values())))
            self._seen = kept
        return forgotten

    @property
    def newest(self) -> SeenVersion | None:
        """The highest version ever verified."""
        return self._seen[max(self._seen)] if self._seen else None

    @property
    def highest_version(self) -> int:
        """Number of the highest version ever verified; NO_VERSION for none."""
        return max(self._seen, default=NO_VERSION)

    def note(self, seen: SeenVersion) -> None:
        """Append a verified version; durable when it returns.

        Raises:
            RunReplaced: the version was seen with another state or another manifest.
            DiskFull: the row is not written.
        """
        known = self._seen.get(seen.version)
        if known == seen:
            return
        if known is not None:
            _check_same(known, seen)
        row = _row(seen)
        with self.path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                if file.write(row) != len(row):
                    raise OSError(errno.ENOSPC, "short write")
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(before)
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise DiskFull(str(self.path.parent)) from error
                raise
        self._seen[seen.version] = seen

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                seen = _parse(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                action = "move it away; versions seen before are then not recognised"
                raise CorruptStore(f"{self.path}, line {number}: {error}", action=action) from error
            self._seen[seen.version] = seen
        if whole != len(data):
            os.truncate(self.path, whole)


def _row(seen: SeenVersion) -> bytes:
    return (json.dumps(dataclasses.asdict(seen)) + "\n").encode("ascii")


def _keep_beside(path: Path, name: str) -> None:
    """Give a file a second name, one that is free."""
    for number in itertools.count(1):
        try:
            path.with_name(name if number == 1 else f"{name}.{number}").hardlink_to(path)
        except FileExistsError:
            continue
        sync_directory(path.parent)
        return


def _check_same(known: SeenVersion, seen: SeenVersion) -> None:
    if known.state_root != seen.state_root:
        before, now = known.state_root[:12], seen.state_root[:12]
        raise RunReplaced(f"version {seen.version} had state {before} before and has {now} now")
    if known.manifest_digest and known.manifest_digest != seen.manifest_digest:
        raise RunReplaced(f"version {seen.version} has another manifest than before")


def _parse(row: dict[str, Any]) -> SeenVersion:
    return SeenVersion(
        version=int(row["version"]),
        state_root=Digest(str(row["state_root"])),
        manifest_digest=str(row.get("manifest_digest", "")),
        run_id=str(row.get("run_id", "")),
        signed_by=str(row.get("signed_by", "")),
    )


def record_name(flavour: str) -> str:
    """Name of the file in the state directory."""
    return f"versions.{flavour}.jsonl" if flavour else "versions.jsonl"


def check_head(head_version: int, *, seen_version: int) -> None:
    """Refuse a head that went back.

    Args:
        head_version: what the coordinator calls its newest version.
        seen_version: newest version that this sampler knew of before it asked.

    Raises:
        RunReplaced: versions that existed are gone.
    """
    if head_version < seen_version:
        raise RunReplaced(f"the head is version {head_version}, but version {seen_version} was seen before")
