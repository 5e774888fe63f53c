"""TensorBoard: event files, one record a step; steps taken again hide the earlier ones by the format's own purge."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from heterorl.common.errors import Unreachable
from heterorl.common.types.common import StepReport
from heterorl.track.rows import row_of
from heterorl.track.tracker import Mark, Place, mark_of

_ACTION = "see that the directory can be written; it is tried again"


class TensorBoard:
    """Event files in `directory/run`; values are float32, as TensorBoard keeps them."""

    def __init__(self, place: Place) -> None:
        folder = place.directory / "tensorboard" / place.run
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = sorted(folder.glob("events.out.tfevents.*.heterorl"))
            self._mark = next((mark for path in reversed(files) if (mark := _last(path)) is not None), None)
            # Files are read in the order of their names: this one is behind all others, whatever the clock says.
            newest = int(files[-1].name.split(".")[3]) if files else 0
            self._path = folder / f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.heterorl"
            self._writer = RecordWriter(self._path.open("xb"))
            self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except OSError as error:
            raise Unreachable(f"tensorboard: {error}", action=_ACTION) from error

    def last(self) -> Mark | None:
        """The newest whole record's."""
        return self._mark

    def write(self, reports: Sequence[StepReport]) -> None:
        """Append; a step that is not behind the last one purges what is at or behind it first."""
        try:
            for report in reports:
                if self._mark is not None and report.step <= self._mark.step:
                    purge = SessionLog(status=SessionLog.START)
                    self._put(Event(wall_time=time.time(), step=report.step, session_log=purge))
                values = [Summary.Value(tag=name, simple_value=value) for name, value in row_of(report).items()]
                self._put(Event(wall_time=time.time(), step=report.step, summary=Summary(value=values)))
                self._mark = mark_of(report)
            self._writer.flush()
        except OSError as error:
            raise Unreachable(f"tensorboard: {error}", action=_ACTION) from error

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


def _last(path: Path) -> Mark | None:
    mark = None
    for event in _events(path):
        values = {value.tag: value.simple_value for value in event.summary.value}
        if "version" in values:
            mark = Mark(int(values["version"]), int(event.step))
    return mark


def _events(path: Path) -> Iterator[Any]:
    # What a kill tore off has no checksum: the reader ends before it.
    for data in RawEventFileLoader(str(path)).Load():
        yield Event.FromString(data)
