"""The durable record of the versions that this sampler verified: versions.jsonl, one row each.

    {"version": 7, "state_root": "<64 hex digits>"}

Guarantees: a row is on disk before its version can be generated with; a version seen once is never accepted with
another state, and a head below a version seen is never followed, also after a restart: only a person may declare that
the run began again, by moving the file away. A row torn by a crash is cut off: its version is verified again.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from services.common.directory import sync_directory
from services.common.errors import CorruptStore, DiskFull, OperatorError
from services.common.types import Digest


class RunReplaced(OperatorError):
    """The coordinator contradicts what this sampler verified before: its versions were lost, or are another run's."""

    action = "ask the run's operator; to follow the run as it is now, move versions.jsonl out of state_dir and restart"


class VersionRecord:
    """Rows of one file. Blocking; call from threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._roots: dict[int, Digest] = {}
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            # Without this a power cut could take the whole file, fsynced rows and all.
            sync_directory(path.parent)

    @property
    def highest_version(self) -> int:
        """Newest version ever verified; -1 for none."""
        return max(self._roots, default=-1)

    def note(self, version: int, state_root: Digest) -> None:
        """Append a verified version; durable when it returns.

        Raises:
            RunReplaced: the version was seen with another state.
            DiskFull: the row is not written.
        """
        known = self._roots.get(version)
        if known == state_root:
            return
        if known is not None:
            raise RunReplaced(f"version {version} had state {known[:12]} before and has {state_root[:12]} now")
        row = (json.dumps({"version": version, "state_root": state_root}) + "\n").encode("ascii")
        with self._path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                if file.write(row) != len(row):
                    raise OSError(errno.ENOSPC, "short write")
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(before)
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise DiskFull(str(self._path.parent)) from error
                raise
        self._roots[version] = state_root

    def _read(self) -> None:
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
                self._roots[int(row["version"])] = Digest(str(row["state_root"]))
            except (ValueError, KeyError, TypeError) as error:
                action = "move it away; versions seen before are then not recognised"
                raise CorruptStore(f"{self._path}, line {number}: {error}", action=action) from error
        if whole != len(data):
            os.truncate(self._path, whole)


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
