"""`heterorl track`: options that are wrong."""

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, HeterorlError


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
