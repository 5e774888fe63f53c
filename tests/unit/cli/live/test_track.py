"""`heterorl track`: options that are wrong, and the table that a terminal shows."""

import dataclasses

import pytest
from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.live.track import progress_table
from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, HeterorlError
from heterorl.common.types.run import RunStatus
from heterorl.track.follow import Sent
from heterorl.track.tracker import Mark
from tests.support.run import REPORT

STATUS = RunStatus(
    run_id="run", head_version=9, epoch=1, learner="l", is_draining=False, uptime_s=1.0, ledger=None, bytes_full=0,
    bytes_last=0, changed_fraction=0.0, sites=(), last_report=dataclasses.replace(REPORT, step=11, version=8),
)  # fmt: skip


def invoke(*words):
    return CliRunner().invoke(app, ["track", "127.0.0.1:1", "--insecure", *words], env={"COLUMNS": "160"})


def test_an_unknown_tracker_is_refused_and_the_known_ones_named():
    result = invoke("--to", "comet")

    assert result.exit_code == 2
    assert "'comet' is not one of 'wandb', 'mlflow', 'tensorboard', 'trackio'" in result.output


def test_a_tracker_must_be_named():
    with pytest.raises(ConfigError, match="--to: is not set"):
        raise invoke().exception


@pytest.mark.slow
def test_a_coordinator_that_is_not_there_is_said_at_once():
    with pytest.raises(HeterorlError, match="127.0.0.1:1") as caught:
        raise invoke("--to", "tensorboard").exception
    assert caught.value.exit_code == 2


def shown(problem, *sent):
    console = Console(width=140, record=True, markup=False)
    console.print(progress_table(STATUS, problem, sent))
    return console.export_text()


def test_table_says_what_was_sent_and_how_far_it_is_behind():
    text = shown(
        "", Sent("wandb", steps=4, evaluations=2, tables=1, mark=Mark(6, 7)), Sent("mlflow", problem="[red]no")
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]

    assert "run run, version 9" in text
    assert rows == [["wandb", "4", "2", "1", "7", "2", ""], ["mlflow", "0", "0", "0", "-", "8", "[red]no"]]
    assert "does not answer: away" in shown("away")
    assert "no answer from the coordinator yet" in progress_table(None, "", ()).title.plain
    early = dataclasses.replace(STATUS, head_version=-1, last_report=None)
    assert progress_table(early, "", ()).title.plain == f"run {STATUS.run_id}, no version yet"
