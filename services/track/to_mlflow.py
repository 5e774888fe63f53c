"""MLflow: a server of MLFLOW_TRACKING_URI, or an SQLite file; one batch of metrics a step."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from heterorl.common.errors import Unreachable
from heterorl.common.types.common import StepReport
from heterorl.track.rows import row_of
from heterorl.track.tracker import Mark, Place

_ACTION = "check MLFLOW_TRACKING_URI and its server; it is tried again"
_TAG = "heterorl_run"


class Mlflow:
    """The run that carries the tag `heterorl_run`, in the experiment of the project.

    All metrics of a step have one timestamp, later than the step's before: what a batch that was cut has left is newer
    than the last whole one, whose marker `version` is written last.
    """

    def __init__(self, place: Place) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        try:
            if not uri:
                place.directory.mkdir(parents=True, exist_ok=True)
                uri = f"sqlite:///{(place.directory / 'mlflow.db').resolve()}"
            self._client = MlflowClient(uri)
            self._run = self._find(place)
            for name, value in place.facts.items():
                self._client.set_tag(self._run, _name(name), value)
            markers = self._client.get_metric_history(self._run, "version")
            newest = max(markers, key=lambda entry: (entry.value, entry.step), default=None)
            self._mark = None if newest is None else Mark(int(newest.value), newest.step)
            self._time_ms = 0 if newest is None else int(newest.timestamp)
            self._is_cut = True
        except (MlflowException, OSError) as error:
            raise Unreachable(f"mlflow: {error}", action=_ACTION) from error

    def last(self) -> Mark | None:
        """The newest marker's."""
        return self._mark

    def write(self, reports: Sequence[StepReport]) -> None:
        """One batch a report, its marker last."""
        try:
            for report in reports:
                self._write(report)
        except (MlflowException, OSError) as error:
            raise Unreachable(f"mlflow: {error}", action=_ACTION) from error

    def _write(self, report: StepReport) -> None:
        row = {_name(name): value for name, value in row_of(report).items()}
        marker = row.pop("version")
        before_ms, self._time_ms = self._time_ms, max(int(time.time() * 1000), self._time_ms + 1)
        if self._is_cut:
            left = [name for name in row if self._has_newer(name, before_ms)]
            row = {name: value for name, value in row.items() if name not in left}
            self._is_cut = False
        metrics = [Metric(name, float(value), self._time_ms, report.step) for name, value in row.items()]
        metrics.append(Metric("version", float(marker), self._time_ms, report.step))
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Nothing is buffered; whether the run has ended the run's own page says."""

    def _find(self, place: Place) -> str:
        experiment = self._client.get_experiment_by_name(place.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(place.project)
        found = self._client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{place.run}'", max_results=1)
        run = found[0] if found else self._client.create_run(number, run_name=place.run, tags={_TAG: place.run})
        return str(run.info.run_id)

    def _has_newer(self, name: str, time_ms: int) -> bool:
        history = self._client.get_metric_history(self._run, name)
        return any(entry.timestamp > time_ms for entry in history)


def _name(name: str) -> str:
    """MLflow takes letters, digits, `_-. /`: any other character becomes its number."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", lambda found: f"_{ord(found[0]):x}_", name)
