"""What a site remembers of the versions it used, so that nobody can lead it back: durable before a version is used.

    state_dir/versions.jsonl    {"version", "state_root", "manifest_digest", "run_id"}, one row for each version used

A torn last row is cut off at the next start: its version was not used yet. Rows of a program that knew no digests
have none; then only the number is held against what comes.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import CorruptStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A version that this site used; digest and run are empty where they are not known."""

    version: int
    state_root: str
    manifest_digest: str = ""
    run_id: str = ""


class Memory:
    """The versions used by one site."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._used = {row.version: row for row in _read(path)}

    @property
    def newest(self) -> Used | None:
        """The highest version used."""
        return self._used[max(self._used)] if self._used else None

    def find(self, version: int) -> Used | None:
        """What is remembered of a version."""
        return self._used.get(version)

    def note(self, used: Used) -> None:
        """Remember a version; durable when it returns. Blocking."""
        row = {
            "version": used.version,
            "state_root": used.state_root,
            "manifest_digest": used.manifest_digest,
            "run_id": used.run_id,
        }
        with self._path.open("ab") as file:
            file.write(json.dumps(row).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if not self._used:
            _sync_directory(self._path.parent)
        self._used[used.version] = used


def _read(path: Path) -> list[Used]:
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    try:
        return [
            Used(
                version=int(row["version"]),
                state_root=str(row["state_root"]),
                manifest_digest=str(row.get("manifest_digest", "")),
                run_id=str(row.get("run_id", "")),
            )
            for row in map(json.loads, data[:whole].splitlines())
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptStore(
            f"{path} is damaged: {error!r}", action="if the coordinator is to be trusted, remove the file"
        ) from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
