"""trackio: its own SQLite files on this machine, in TRACKIO_DIR; one row a step."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import trackio
from trackio.sqlite_storage import SQLiteStorage

from heterorl.common.errors import Unreachable
from heterorl.common.types.common import StepReport
from heterorl.track.rows import row_of
from heterorl.track.tracker import Mark, Place

_ACTION = "see that TRACKIO_DIR can be written; it is tried again"


class Trackio:
    """The run of that name in the project's file."""

    def __init__(self, place: Place) -> None:
        try:
            self._run = trackio.init(
                project=place.project,
                name=place.run,
                config=dict(place.facts),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            rows = SQLiteStorage.get_logs(place.project, place.run)
        except (sqlite3.Error, OSError) as error:
            raise Unreachable(f"trackio: {error}", action=_ACTION) from error
        self._mark = max((Mark(int(row["version"]), int(row["step"])) for row in rows), default=None)

    def last(self) -> Mark | None:
        """The newest row's."""
        return self._mark

    def write(self, reports: Sequence[StepReport]) -> None:
        """One row a report; trackio's own thread writes it within a second."""
        for report in reports:
            row = row_of(report)
            # trackio has a column for it.
            del row["step"]
            self._run.log(row, step=report.step)

    def close(self) -> None:
        """Wait until all rows are written."""
        self._run.finish()
