"""Writer of steps, evaluations and samples to trackio's files in TRACKIO_DIR."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from collections.abc import Sequence

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
        """One row a report; trackio's own thread writes it within a second."""
        for report in reports:
            row = row_of(report)
            # trackio has a column for it.
            del row["step"]
            self._run.log(row, step=report.step)

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for found in evaluations:
            self._run.log(evaluation_row(found), step=found.version)

    def write_table(self, table: TextTable) -> None:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
        self._run.log({TABLE: table.version, "samples": trackio.Table(data=rows)}, step=table.version)

    def close(self) -> None:
        """Wait until all rows are written."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
