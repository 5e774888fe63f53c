"""Weights & Biases tracker: one row of history a step.

With WANDB_MODE=offline it writes files for `wandb sync`.
"""

from __future__ import annotations

import contextlib
import glob
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation
from heterorl.track.tracker import (
    COLUMNS,
    TABLE,
    Had,
    Place,
    TextTable,
    evaluation_row,
    had_in,
    reaching,
    row_of,
    version_name,
)

_FAILURES = (wandb.errors.Error, OSError)
_reaching = reaching(
    "wandb", *_FAILURES, action="check `wandb login`, WANDB_API_KEY and the network, or set WANDB_MODE=offline"
)


class WandB:
    """The run whose id is the run's name.
    W&B's row number counts reports, so it never goes back."""

    @_reaching
    def __init__(self, place: Place) -> None:
        place.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=place.project,
            id=place.run,
            name=place.run,
            dir=str(place.directory),
            config=dict(place.facts),
            resume="allow",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self._defined: set[str] = set()
        self._row, self.had = self._read_back(place)

    def write(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self._log(row_of(report), axis="step")

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for found in evaluations:
            self._log(evaluation_row(found), axis=version_name(found.task_set))

    def write_table(self, table: TextTable) -> None:
        rows = [list(row) for row in table.rows]
        self._log({TABLE: table.version, "samples/table": wandb.Table(columns=list(COLUMNS), data=rows)}, axis=TABLE)

    def close(self) -> None:
        try:
            self._run.finish()
        except _FAILURES:
            # W&B's local service has died: the next opening starts another one.
            with contextlib.suppress(*_FAILURES):
                wandb.teardown()

    @_reaching
    def _log(self, row: Mapping[str, Any], *, axis: str) -> None:
        for name in row.keys() - self._defined:
            # By name: W&B does not define which of two matching patterns holds.
            self._run.define_metric(name, **({} if name == axis else {"step_metric": axis}))
            self._defined.add(name)
        self._row += 1
        self._run.log(dict(row), step=self._row)

    def _read_back(self, place: Place) -> tuple[int, Had]:
        """From the service for a resumed run; offline, from earlier processes' files."""
        if self._run.offline:
            return read_back(rows_of_run(place.directory, place.run))
        summary = self._run.summary
        return read_back([{name: summary[name] for name in summary.keys()}])  # noqa: SIM118 - it iterates over nothing


def read_back(rows: Iterable[Mapping[str, Any]]) -> tuple[int, Had]:
    """The last row number of some rows, and what they have."""
    number = 0

    def counted() -> Iterator[Mapping[str, Any]]:
        nonlocal number
        for row in rows:
            number = max(number, int(row.get("_step", 0)))
            yield row

    had = had_in(counted())
    return number, had


def rows_of_run(directory: Path, run: str) -> Iterator[dict[str, Any]]:
    """Rows of history in all files of a run in W&B's directory."""
    # A directory's name also has a number where another one of its second exists; the file's has the run alone.
    pattern = f"offline-run-*/run-{glob.escape(run)}.wandb"
    for path in sorted((directory / "wandb").glob(pattern)):
        yield from rows_in(path)


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of history in a W&B file: protobuf in LevelDB's log format."""
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


_BLOCK, _HEAD = 32768, 7


def _records(data: bytes) -> Iterator[bytes]:
    # The file's header, ":W&B" and a version, is as long as a chunk's and counts in the first block.
    at, parts = _HEAD, b""
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + _HEAD : at + _HEAD + length]
        # A record torn by a kill ends the file.
        if kind not in (1, 2, 3, 4) or len(body) < length or zlib.crc32(bytes([kind]) + body) != checksum:
            return
        parts = body if kind in (1, 2) else parts + body
        if kind in (1, 4):
            yield parts
        at += _HEAD + length
