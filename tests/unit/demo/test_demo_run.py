"""The watch over a demonstration: patient while steps come, and what is left of a run that failed."""

import asyncio
import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from heterorl.common.errors import HeterorlError
from heterorl.demo import demo_run
from heterorl.demo.demo_config import TINY, DemoOptions
from tests.support.run import REPORT

LIMIT_S = 60.0


class Steps:
    """A coordinator that has one more step at each look, up to `last`."""

    def __init__(self, last):
        self.last = last
        self.given = 0

    async def get_status(self):
        return None

    async def list_steps(self, *, after_step, limit):
        del limit
        if self.given == self.last:
            return []
        self.given += 1
        return [dataclasses.replace(REPORT, step=after_step + 1)]


@pytest.fixture
def demo(tmp_path, monkeypatch):
    now = [0.0]

    async def sleep(_):
        now[0] += LIMIT_S / 2

    monkeypatch.setattr(demo_run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(demo_run, "asyncio", SimpleNamespace(sleep=sleep))
    regime = dataclasses.replace(TINY, time_limit_s=LIMIT_S)
    options = DemoOptions(out=tmp_path, algorithm="gepo", seed=0, tiny=True, cache=tmp_path)
    child = SimpleNamespace(name="learner", exit_code=None, check=lambda: None)
    made = demo_run._Demo(options=options, regime=regime, model_dir=tmp_path, console=Console(file=io.StringIO()))
    made._children.append(child)
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner" / "steps.jsonl").write_text(json.dumps(dataclasses.asdict(REPORT)) + "\n")
    return made


def test_no_limit_while_steps_come(demo):
    with pytest.raises(HeterorlError, match="no step came for 60 s"):
        asyncio.run(demo._watch(Steps(last=20)))

    # Twenty steps of half the limit each, then the limit itself.
    assert len(demo._reports) == 20


def test_failed_run_leaves_report_and_model(demo, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(demo, "_model", lambda *given: written.append(given) or tmp_path / "model")

    summary = demo._conclude(wall_s=1.0, failure="no step came for 60 s")

    assert (summary["status"], summary["failure"]) == ("failed", "no step came for 60 s")
    assert summary["model_dir"] == str(tmp_path / "model")
    assert "The run failed after 1 of 24 steps: no step came for 60 s" in (tmp_path / "report.html").read_text()


def test_a_model_that_cannot_be_written_costs_no_report(demo, tmp_path, monkeypatch):
    def fail(*_):
        raise HeterorlError("the disk is full")

    monkeypatch.setattr(demo, "_model", fail)

    demo.was_interrupted = True
    summary = demo._conclude(wall_s=1.0, failure="")

    assert (summary["status"], summary["model_dir"]) == ("failed", None)
    assert summary["failure"] == "model_dir could not be written: the disk is full"
    assert (tmp_path / "report.html").exists()
