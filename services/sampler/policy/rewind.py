"""What the operator of a site agrees to when a run went back to a version below those that the site verified.

A coordinator that was restored from a backup, and one that an attacker runs, look the same from here: both offer less
than there was. So no coordinator is asked. A person names the run and the version, and each record of the site, one for
each flavour, forgets what is above it. What is left still holds: the versions that follow must descend from it, and be
signed where signatures are asked for.
"""

from __future__ import annotations

import logging
from pathlib import Path

from heterorl.common.errors import OperatorError
from heterorl.common.types.policy import NO_VERSION
from heterorl.sampler.policy.record import VersionRecord, record_name

_LOG = logging.getLogger(__name__)


def differences(state_dir: Path, *, run: str, to_version: int) -> list[str]:
    """What would be forgotten, in a sentence for each record that has something above the version.

    Raises:
        OperatorError: there is no record, or it is of another run.
        CorruptStore: a record cannot be read.
    """
    sentences = []
    for record in _records(state_dir, run):
        newest = record.newest
        if newest is None or newest.version <= to_version:
            continue
        left = max((version for version in record.versions if version <= to_version), default=NO_VERSION)
        then = f"what follows must descend from version {left}" if left >= 0 else "any first version is taken"
        signer = f", signed by {newest.signed_by}" if newest.signed_by else ""
        sentences.append(
            f"{record.path.name}: version {newest.version}, state {newest.state_root[:12]}{signer}, was seen here; the"
            f" run goes back to version {to_version}; {then}"
        )
    return sentences


def agree(state_dir: Path, *, run: str, to_version: int) -> None:
    """Forget what was seen above the version; durable when it returns.

    Raises:
        OperatorError, CorruptStore: as `differences`.
    """
    for record in _records(state_dir, run):
        if forgotten := record.rewind(to_version):
            first, last = forgotten[0], forgotten[-1]
            _LOG.warning(
                "forgotten by order: %d versions from %d, state %s, to %d, state %s",
                len(forgotten), first.version, first.state_root, last.version, last.state_root,
            )  # fmt: skip


def _records(state_dir: Path, run: str) -> list[VersionRecord]:
    paths = sorted({*state_dir.glob(record_name("")), *state_dir.glob(record_name("*"))})
    if not paths:
        raise OperatorError(f"{state_dir} has no record of versions", action="name the configuration of the sampler")
    records = [VersionRecord(path) for path in paths]
    for record in records:
        newest = record.newest
        if newest is not None and newest.run_id not in ("", run):
            raise OperatorError(f"{state_dir} is of run {newest.run_id}, not {run}", action="name that run")
    return records
