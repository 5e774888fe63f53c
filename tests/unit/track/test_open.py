"""Opening a tracker: what is not installed or cannot be written is said with what to do."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from heterorl.common.errors import ConfigError, DependencyMissing, OperatorError
from heterorl.common.types.run import RunStatus
from heterorl.track.tracker import CLASSES, had_in, open_tracker

STATUS = RunStatus(
    run_id="run", head_version=3, epoch=1, learner="l", is_draining=False, uptime_s=1.0,
    ledger=None, bytes_full=0, bytes_last=0, changed_fraction=0.0, sites=(), last_report=None,
)  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES)
def test_a_package_that_is_not_there_names_its_extra(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    monkeypatch.delitem(sys.modules, f"heterorl.track.to_{kind}", raising=False)

    with pytest.raises(DependencyMissing, match=rf"'\.\[track-{kind}\]'"):
        open_tracker(kind, STATUS, project="p", run="", directory=tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="--dir.*file/track.*name another one"):
        open_tracker("tensorboard", STATUS, project="p", run="", directory=tmp_path / "file" / "track")


@pytest.mark.parametrize(
    "row", [{"version": None, "step": 1}, {"version": 1}, {"evaluation/math/version": None}], ids=str
)
def test_rows_that_heterorl_does_not_write_are_refused_at_the_opening(row, tmp_path, monkeypatch):
    module = SimpleNamespace(Trackio=lambda place: had_in([row]))
    monkeypatch.setitem(sys.modules, "heterorl.track.to_trackio", module)

    with pytest.raises(OperatorError, match=r"trackio: the newest rows of run cannot be read.*--run"):
        open_tracker("trackio", STATUS, project="p", run="", directory=tmp_path)


@pytest.mark.parametrize("run_id", ["../../elsewhere", "/elsewhere", "..", ""])
def test_a_coordinators_run_id_is_no_path(run_id, tmp_path):
    status = dataclasses.replace(STATUS, run_id=run_id)

    with pytest.raises(ConfigError, match="--run: .*is no name"):
        open_tracker("tensorboard", status, project="p", run="", directory=tmp_path)
