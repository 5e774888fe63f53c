"""TensorBoard tracker: one record a step; a repeated step purges earlier ones.

Evaluations and samples count versions, not steps, so a purge would mix them up: they are runs of their own,
`RUN/evaluation` and `RUN/samples`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation
from heterorl.track.tracker import (
    COLUMNS,
    Had,
    Mark,
    Place,
    TextTable,
    evaluation_row,
    mark_of,
    reaching,
    row_of,
    set_of,
)

_reaching = reaching("tensorboard", OSError, action="see that the directory can be written")


class TensorBoard:
    """Event files in `directory/tensorboard/run`; values are float32."""

    @_reaching
    def __init__(self, place: Place) -> None:
        folder = place.directory / "tensorboard" / place.run
        self._steps = _Folder(folder)
        self._evaluations, self._tables = _Folder(folder / "evaluation"), _Folder(folder / "samples")
        last = self._steps.last(lambda event: None if (mark := _mark(event)) is None else (mark, event.wall_time))
        self._mark: Mark | None
        self._mark, published = last or (None, 0.0)
        sets: dict[str, int] = {}
        for event in self._evaluations.events():
            sets |= {name: int(event.step) for value in event.summary.value if (name := set_of(value.tag))}
        table = self._tables.last(lambda event: int(event.step) if event.summary.value else None)
        table = -1 if table is None else table
        self.had = Had(steps=self._mark, published=published, evaluations=sets, table=table)
        if self._mark is None and place.facts:
            rows = [[name, value] for name, value in place.facts.items()]
            self._steps.put(Event(summary=Summary(value=[_text("config", ("name", "value"), rows)])))
        self._steps.flush()

    @_reaching
    def write(self, reports: Sequence[StepReport]) -> None:
        """Append; a repeated step first purges records from that step on."""
        for report in reports:
            if self._mark is not None and report.step <= self._mark.step:
                self._steps.put(Event(step=report.step, session_log=SessionLog(status=SessionLog.START)))
            # float32 cannot hold seconds since the epoch: they are the record's own time.
            row = {name: value for name, value in row_of(report).items() if name != "published_time"}
            self._steps.put(_numbers(report.step, row), at=report.published_time)
            self._mark = mark_of(report)
        self._steps.flush()

    @_reaching
    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for found in evaluations:
            self._evaluations.put(_numbers(found.version, evaluation_row(found)), at=found.ended_time)
        self._evaluations.flush()

    @_reaching
    def write_table(self, table: TextTable) -> None:
        value = _text("samples", COLUMNS, table.rows)
        self._tables.put(Event(step=table.version, summary=Summary(value=[value])))
        self._tables.flush()

    def close(self) -> None:
        """Close the files.
        Rows that a full disk did not take are written when the run is opened again."""
        for folder in (self._steps, self._evaluations, self._tables):
            with contextlib.suppress(OSError):
                folder.close()


class _Folder:
    """The event files of one run; each process that writes adds one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = sorted(path.glob("events.out.tfevents.*.heterorl"))
        self._writer: RecordWriter | None = None

    def last(self, read: Any) -> Any:
        for path in reversed(self._files):
            found = [answer for event in _events(path) if (answer := read(event)) is not None]
            if found:
                return found[-1]
        return None

    def events(self) -> Iterator[Any]:
        for path in self._files:
            yield from _events(path)

    def put(self, event: Any, *, at: float = 0.0) -> None:
        """Append a record; `at` in seconds since the epoch, 0 is now."""
        if self._writer is None:
            self._path.mkdir(parents=True, exist_ok=True)
            # Files are read by name: this one must come last, even if the clock went back.
            newest = int(self._files[-1].name.split(".")[3]) if self._files else 0
            name = f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.heterorl"
            self._writer = RecordWriter((self._path / name).open("xb"))
            self.put(Event(file_version="brain.Event:2"))
        event.wall_time = at or time.time()
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _mark(event: Any) -> Mark | None:
    values = {value.tag: value.simple_value for value in event.summary.value}
    return Mark(int(values["version"]), int(event.step)) if "version" in values else None


def _numbers(step: int, row: Mapping[str, float]) -> Any:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
    return Event(step=step, summary=Summary(value=values))


def _text(tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """A two-dimensional tensor of texts, which TensorBoard shows as a table."""
    cells = [*columns, *(str(cell) for row in rows for cell in row)]
    tensor = TensorProto(dtype=DT_STRING, string_val=[cell.encode(errors="replace") for cell in cells])
    for size in (len(rows) + 1, len(columns)):
        tensor.tensor_shape.dim.add(size=size)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _events(path: Path) -> Iterator[Any]:
    # A record torn by a kill has no checksum: the reader ends before it.
    for data in RawEventFileLoader(str(path)).Load():
        yield Event.FromString(data)
