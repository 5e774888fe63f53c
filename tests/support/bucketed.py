"""A secured run whose payloads are in a bucket, and what moved where."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from heterorl.common.process.metrics import BYTES
from tests.support.relayed import LargeRun
from tests.support.secure_run import SecureRun


@contextlib.asynccontextmanager
async def run_at(directory: Path, payloads: Any) -> AsyncIterator[SecureRun]:
    """A run whose head is version 0; what nobody needs goes at once."""
    run = SecureRun(directory)
    run.run_class = LargeRun
    run.changes = {"payloads": payloads, "max_staleness_versions": 1, "keep_versions": 1, "pull_lease_s": 0.01}
    async with run:
        yield run


def served() -> float:
    """Payload bytes that coordinators of this process sent."""
    return float(BYTES.labels("weights", "out")._value.get())


def copies(run: SecureRun) -> list[Path]:
    """Payload files of the run's coordinator."""
    return [path for path in (run.directory / "data" / "blobs").rglob("*") if path.is_file()]


def payloads_of(names: Iterable[str]) -> list[str]:
    """Keys that are payloads."""
    return [name for name in names if name.startswith("blobs/")]
