"""Writer of steps, evaluations and samples to trackio's files in TRACKIO_DIR."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
from collections.abc import Sequence
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation
from heterorl.track.tracker import COLUMNS, TABLE, Place, TextTable, evaluation_row, had_in, reaching, row_of

_reaching = reaching("trackio", sqlite3.Error, OSError, action="see that TRACKIO_DIR can be written")


class Trackio:
    """The run in the project's file."""

    @_reaching
    def __init__(self, place: Place) -> None:
        for remote in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(remote, None)
        # It greets on standard output.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=place.project,
                name=place.run,
                config=dict(place.facts),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.had = had_in(SQLiteStorage.get_logs(place.project, place.run))

    def write(self, reports: Sequence[StepReport]) -> None:
        rows = [row_of(report) for report in reports]
        for row in rows:
            # trackio has a column for it.
            del row["step"]
        self._write(rows, [report.step for report in reports])

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        self._write([evaluation_row(found) for found in evaluations], [found.version for found in evaluations])

    def write_table(self, table: TextTable) -> None:
        shown = trackio.Table(data=[dict(zip(COLUMNS, row, strict=True)) for row in table.rows])
        samples = shown._to_dict(self._run.project, self._run.name, table.version)
        self._write([{TABLE: table.version, "samples": samples}], [table.version])

    @_reaching
    def _write(self, rows: list[dict[str, Any]], steps: list[int]) -> None:
        """In one transaction; Run.log's thread drops rows that it cannot write."""
        run = self._run
        SQLiteStorage.bulk_log(run.project, run.name, rows, steps, config=run.config, run_id=run.id)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
