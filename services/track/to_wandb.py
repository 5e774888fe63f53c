"""Weights & Biases: one row of history a step, online or with WANDB_MODE=offline in files for `wandb sync`."""

from __future__ import annotations

import glob
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import wandb
from wandb.proto import wandb_internal_pb2

from heterorl.common.errors import Unreachable
from heterorl.common.types.common import StepReport
from heterorl.track.rows import row_of
from heterorl.track.tracker import Mark, Place

_ACTION = "check `wandb login`, WANDB_API_KEY and the network, or set WANDB_MODE=offline; it is tried again"


class WandB:
    """The run whose id is the run's name. W&B's own row number counts reports, so that it never goes back."""

    def __init__(self, place: Place) -> None:
        try:
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
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
            self._row, self._mark = self._read_back(place)
        except (wandb.errors.Error, OSError) as error:
            raise Unreachable(f"wandb: {error}", action=_ACTION) from error

    def last(self) -> Mark | None:
        """What the service says of the resumed run; offline, the last row in the files of earlier processes."""
        return self._mark

    def write(self, reports: Sequence[StepReport]) -> None:
        """One row a report."""
        try:
            for report in reports:
                self._row += 1
                self._run.log(row_of(report), step=self._row)
        except (wandb.errors.Error, OSError) as error:
            raise Unreachable(f"wandb: {error}", action=_ACTION) from error

    def close(self) -> None:
        """Hand everything over and end."""
        self._run.finish()

    def _read_back(self, place: Place) -> tuple[int, Mark | None]:
        if self._run.offline:
            return last_row(place.directory, place.run)
        summary = self._run.summary
        if "version" not in summary:
            return 0, None
        return int(summary["_step"]), Mark(int(summary["version"]), int(summary["step"]))


def last_row(directory: Path, run: str) -> tuple[int, Mark | None]:
    """Number and mark of the last row of a run in W&B's files; (0, None) without one."""
    number, mark = 0, None
    pattern = f"offline-run-*-{glob.escape(run)}/run-{glob.escape(run)}.wandb"
    for path in sorted((directory / "wandb").glob(pattern)):
        for row in rows_in(path):
            if row["_step"] > number:
                number, mark = int(row["_step"]), Mark(int(row["version"]), int(row["step"]))
    return number, mark


def rows_in(path: Path) -> Iterator[dict[str, float]]:
    """The rows of history in one of W&B's files, which are protobuf records in the format of LevelDB's log."""
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


_BLOCK, _HEAD = 32768, 7


def _records(data: bytes) -> Iterator[bytes]:
    # The file's own head, ":W&B" with its version, is as long as a chunk's and counts as part of the first block.
    at, parts = _HEAD, b""
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + _HEAD : at + _HEAD + length]
        # What a kill tore off ends the file.
        if kind not in (1, 2, 3, 4) or len(body) < length or zlib.crc32(bytes([kind]) + body) != checksum:
            return
        parts = body if kind in (1, 2) else parts + body
        if kind in (1, 4):
            yield parts
        at += _HEAD + length
