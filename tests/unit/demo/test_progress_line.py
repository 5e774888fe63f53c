"""The line that says where a demonstration is."""

import dataclasses

from heterorl.common.types.run import LedgerCounts, RunStatus
from heterorl.demo.demo_run import line
from tests.support.run import REPORT

STATUS = RunStatus(
    run_id="demo", head_version=70, epoch=1, learner="l", is_draining=False, uptime_s=9.0,
    ledger=LedgerCounts(acked=6, pending=1, leased=2, consumed=3), bytes_full=1000, bytes_last=250, changed_fraction=0.1,
    sites=(), last_report=REPORT,
)  # fmt: skip


def test_line_shows_step_version_accuracy_and_queue():
    text = line(STATUS, [dataclasses.replace(REPORT, evaluation_accuracy=0.5), REPORT], max_steps=300)

    for part in (f"step {REPORT.step} of 300", "version 70", "accuracy 0.500", "queue 1"):
        assert part in text


def test_line_waits_before_the_first_step():
    assert "waiting" in line(STATUS, [], max_steps=300)
    assert "accuracy -" in line(STATUS, [REPORT], max_steps=300)


def test_line_says_that_nothing_is_published_yet():
    assert line(dataclasses.replace(STATUS, head_version=-1), [], max_steps=3) == "processes are loading the model"
