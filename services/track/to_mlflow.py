"""MLflow tracker: one batch of metrics a step.

It writes to the server of MLFLOW_TRACKING_URI, or an SQLite file.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import time
from collections.abc import Mapping, Sequence

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH

from heterorl.common.errors import ConfigError
from heterorl.common.types.common import StepReport
from heterorl.common.types.evaluation import Evaluation
from heterorl.track.tracker import COLUMNS, Had, Mark, Place, TextTable, evaluation_row, reaching, row_of

_reaching = reaching("mlflow", MlflowException, OSError, action="check MLFLOW_TRACKING_URI and its server")
_TAG, _SETS, _TABLE = "heterorl_run", "heterorl_evaluated", "heterorl_samples"


class Mlflow:
    """The run with the tag `heterorl_run`, in the experiment of the project.

    All metrics of a step have one timestamp, later than the last step's, and its marker `version` is written last. So
    metrics newer than the newest marker are of a batch that was cut.
    """

    @_reaching
    def __init__(self, place: Place) -> None:
        if "'" in place.run:
            raise ConfigError("--run", f"{place.run!r} has a quote, and MLflow finds none", action="leave it out")
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        directory = place.directory.resolve()
        self._client = MlflowClient(uri or f"sqlite:///{directory / 'mlflow.db'}")
        # Without a server MLflow would put artifacts into the directory that this process was started in.
        run = self._find(place, None if uri else (directory / "mlartifacts").as_uri())
        self._run = str(run.info.run_id)
        self._state(run, place.facts)
        markers = self._client.get_metric_history(self._run, "version")
        newest = max(markers, key=lambda entry: (entry.value, entry.step), default=None)
        self._time_ms = 0 if newest is None else int(newest.timestamp)
        times = self._client.get_metric_history(self._run, "published_time")
        sets = json.loads(run.data.tags.get(_SETS, "{}"))
        self._sets = {str(name): int(version) for name, version in dict(sets).items()}
        self.had = Had(
            steps=None if newest is None else Mark(int(newest.value), newest.step),
            published=next((entry.value for entry in times if entry.timestamp == self._time_ms), 0.0),
            evaluations=dict(self._sets),
            table=int(run.data.tags.get(_TABLE, -1)),
        )
        self._is_cut = True

    @_reaching
    def write(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self._write(report)

    @_reaching
    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Log one batch an evaluation; its end time makes repeats equal."""
        for found in evaluations:
            time_ms = int(found.ended_time * 1000)
            row = {_name(name): float(value) for name, value in evaluation_row(found).items()}
            metrics = [Metric(name, value, time_ms, found.version) for name, value in row.items()]
            self._client.log_batch(self._run, metrics=metrics)
            self._sets[found.task_set] = found.version
            self._client.set_tag(self._run, _SETS, json.dumps(self._sets))

    @_reaching
    def write_table(self, table: TextTable) -> None:
        """Replace the artifact samples.json, which MLflow shows as a table."""
        text = json.dumps({"columns": COLUMNS, "data": table.rows})
        self._client.log_text(self._run, text, "samples.json")
        shown = json.dumps([{"path": "samples.json", "type": "table"}])
        self._client.set_tag(self._run, "mlflow.loggedArtifacts", shown)
        self._client.set_tag(self._run, _TABLE, str(table.version))

    def _write(self, report: StepReport) -> None:
        row = {_name(name): value for name, value in row_of(report).items()}
        marker = row.pop("version")
        published_ms = int((report.published_time or time.time()) * 1000)
        before_ms, self._time_ms = self._time_ms, max(published_ms, self._time_ms + 1)
        if self._is_cut:
            left = [name for name in row if self._has_newer(name, before_ms)]
            row = {name: value for name, value in row.items() if name not in left}
            self._is_cut = False
        metrics = [Metric(name, float(value), self._time_ms, report.step) for name, value in row.items()]
        metrics.append(Metric("version", float(marker), self._time_ms, report.step))
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Return at once: each row was sent when it was logged."""

    def _find(self, place: Place, artifacts: str | None) -> Run:
        experiment = self._client.get_experiment_by_name(place.project)
        number = (
            self._client.create_experiment(place.project, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        found = self._client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{place.run}'", max_results=1)
        return found[0] if found else self._client.create_run(number, run_name=place.run, tags={_TAG: place.run})

    def _state(self, run: Run, facts: Mapping[str, str]) -> None:
        # A parameter cannot change: the tags hold the current values.
        batch = [Param(_name(name), value) for name, value in facts.items() if _name(name) not in run.data.params]
        tags = [RunTag(_name(name), value) for name, value in facts.items()]
        self._client.log_batch(run.info.run_id, params=batch, tags=tags)

    def _has_newer(self, name: str, time_ms: int) -> bool:
        history = self._client.get_metric_history(self._run, name)
        return any(entry.timestamp > time_ms for entry in history)


def _name(name: str) -> str:
    """MLflow takes letters, digits, `_-. /`: any other character becomes its code point.
    Of a longer name than it takes, a digest ends the beginning."""
    text = re.sub(r"[^A-Za-z0-9_\-. /]", lambda found: f"_{ord(found[0]):x}_", name)
    if posixpath.normpath(text) != text or text.startswith((".", "/")):
        # It refuses names that are no plain path, such as `a//b`.
        text = text.replace("/", "_2f_").replace(".", "_2e_")
    if len(text) <= MAX_ENTITY_KEY_LENGTH:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[: MAX_ENTITY_KEY_LENGTH - len(digest) - 1]}_{digest}"
