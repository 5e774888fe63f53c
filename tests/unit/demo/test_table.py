"""The live view shows what a run is doing."""

import dataclasses
import io

from rich.console import Console

from heterorl.common.types.run import LedgerCounts, RunStatus, SiteStatus
from heterorl.demo.demo_config import FULL
from heterorl.demo.demo_run import line, render
from tests.support.run import REPORT

STATUS = RunStatus(
    run_id="demo", head_version=70, epoch=1, learner="l", is_draining=False, uptime_s=9.0,
    ledger=LedgerCounts(acked=6, pending=1, leased=2, consumed=3), bytes_full=1000, bytes_last=250, changed_fraction=0.1,
    sites=(
        SiteStatus(
            site="east", incarnation="i", policy_version=6, state_root="", last_seen_s=1.0, groups_accepted=5,
            groups_dropped=1, tokens_per_s=10.0, work_leased=2,
        ),
    ),
    last_report=REPORT,
)  # fmt: skip


def shown(reports, status=STATUS):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(status, reports, regime=FULL, warm_start=0.25, algorithm="GEPO"))
    return console.export_text()


def test_view_shows_version_lag_accuracy_ratio_and_queue():
    text = shown([dataclasses.replace(REPORT, evaluation_accuracy=0.5), REPORT])

    for part in ("70", "0.500 (start 0.250)", "4.00x smaller", "1 group pending", "balanced", "east", "64"):
        assert part in text


def test_view_and_line_wait_before_the_first_step():
    assert "queue" in shown([])
    assert "waiting" in line(STATUS, [], max_steps=300)
    assert "accuracy -" in line(STATUS, [REPORT], max_steps=300)


def test_site_is_shown_as_it_names_itself():
    site = dataclasses.replace(STATUS.sites[0], site="[/x] :smile:")

    assert "[/x] :smile:" in shown([REPORT], dataclasses.replace(STATUS, sites=(site,)))


def test_line_says_that_nothing_is_published_yet():
    assert line(dataclasses.replace(STATUS, head_version=-1), [], max_steps=3) == "processes are loading the model"
