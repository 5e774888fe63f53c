"""A second learner that is started in a state directory by mistake."""

import asyncio
from types import SimpleNamespace

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.process.notify import Notifier, Process, Watch
from heterorl.common.types.run import RUN_FILE
from heterorl.learner import learner_app
from heterorl.learner.run.state_directory import hold_directory, write_run_file
from heterorl.learner.run.training_run import TrainingRun
from tests.support.clock import ManualClock
from tests.support.learner_world import learner_config
from tests.support.links import PLAINTEXT


class _Run(TrainingRun):
    """Holds the directory until it is stopped."""

    def __init__(self, config):
        self.config, self.result = config, None

    async def lead(self):
        await asyncio.Event().wait()


async def _start(config, monkeypatch):
    monkeypatch.setattr(learner_app, "join", lambda *args, **options: _Run(config))
    monkeypatch.setattr(learner_app.metrics, "serve", lambda *args, **options: 0)
    stop = asyncio.Event()
    stop.set()
    parts = SimpleNamespace(signer=None, close=lambda: None)
    process = Process(stop=stop, notifier=Notifier(), clock=ManualClock(), watch=Watch())
    async with learner_app._calling(config) as client:
        await learner_app._train(config, parts, process, client)


async def test_what_the_first_one_runs_with_is_not_written_over(tmp_path, monkeypatch):
    config = learner_config(tmp_path).model_copy(update={"tls": PLAINTEXT, "coordinator": "127.0.0.1:1"})

    await _start(config, monkeypatch)
    write_run_file(config)
    first = (config.state_dir / RUN_FILE).read_bytes()
    assert b"heterorl_version" in first

    with hold_directory(config.state_dir), pytest.raises(ConfigError, match="another learner"):
        await _start(config.model_copy(update={"holder": "by-mistake"}), monkeypatch)
    assert (config.state_dir / RUN_FILE).read_bytes() == first
