"""A run whose sites are all in quarantine: said once, shown everywhere, and ended by the command that is named."""

import dataclasses
import io
import logging

import pytest
from rich.console import Console

from heterorl.cli.live.run_tables import status_json, status_tables
from heterorl.cli.live.watch_commands import View, frame
from heterorl.common.errors import Quarantined
from heterorl.common.process.metrics import REGISTRY
from heterorl.common.types.common import SiteId
from heterorl.common.types.run import (
    ACTIVE_S,
    RELEASE,
    CanaryReport,
    LedgerCounts,
    RunStatus,
    SiteStatus,
    describe_standstill,
    quarantined_sites,
)
from heterorl.coordinator import run_metrics
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, Run

STATED = (-0.5, -1.0, -1.5, -2.0)
OFF = (-1.5, -2.0, -2.5, -3.0)
OTHER = SiteId("us-1")


def _site(name="eu-1", *, quarantine="", last_seen_s=1.0):
    return SiteStatus(
        site=SiteId(name), incarnation="i", policy_version=1, state_root="", last_seen_s=last_seen_s,
        groups_accepted=0, groups_dropped=0, tokens_per_s=0.0, work_leased=0, quarantine=quarantine,
    )  # fmt: skip


def _status(*sites, is_draining=False):
    return RunStatus(
        run_id="r", head_version=1, epoch=1, learner="l", is_draining=is_draining, uptime_s=9.0,
        ledger=LedgerCounts(acked=0, pending=0, leased=0, consumed=0), bytes_full=100, bytes_last=10,
        changed_fraction=0.1, sites=sites, last_report=None,
    )  # fmt: skip


OUT = _site("us-1", quarantine="off")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (_status(), ()),
        (_status(_site()), ()),
        (_status(_site(), OUT), ()),
        (_status(OUT), ("us-1",)),
        (_status(OUT, _site("asia-1", quarantine="off", last_seen_s=-0.2)), ("asia-1", "us-1")),
        # A right site that is gone does not keep the run going; a quarantined one that is gone does not stop it.
        (_status(OUT, _site(last_seen_s=ACTIVE_S)), ("us-1",)),
        (_status(OUT, _site(last_seen_s=-1.0)), ("us-1",)),
        (_status(dataclasses.replace(OUT, last_seen_s=ACTIVE_S), _site()), ()),
        (_status(dataclasses.replace(OUT, last_seen_s=ACTIVE_S)), ()),
        # An earlier process of a site that is in quarantine is in quarantine with it.
        (_status(OUT, dataclasses.replace(OUT, incarnation="h", last_seen_s=90.0)), ("us-1",)),
        (_status(OUT, is_draining=True), ()),
    ],
)
def test_run_stands_still_when_all_that_answer_are_in_quarantine(status, expected):
    assert quarantined_sites(status) == expected
    assert bool(describe_standstill(expected)) == bool(expected)


def test_people_and_programs_are_told_first_and_with_the_command():
    status = _status(OUT)
    pages = []
    for picture in (status_tables(status)[0], frame(View(address="c:1", status=status), wall=0.0)):
        console = Console(width=100, file=io.StringIO(), record=True, markup=False)
        console.print(picture)
        pages.append(" ".join(console.export_text().replace("\u2502", " ").split()))

    for page in pages:
        assert "STANDS STILL the run stands still: every site that answers is in quarantine (us-1)" in page
        assert page.index("STANDS STILL") < page.index("version 1")
        assert RELEASE in page
    assert status_json(status)["standstill"] == describe_standstill(("us-1",))
    assert status_json(_status(_site()))["standstill"] == ""
    many = describe_standstill(tuple(f"site-{number}" for number in range(9)))
    assert "site-4 and 4 more" in many
    assert "site-5" not in many


async def test_standstill_is_said_once_and_so_is_its_end(tmp_path, caplog):
    clock = ManualClock()
    config = CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=2, max_staleness_versions=3)
    core = await Coordinator.open(config, clock)
    run = Run(core, tmp_path)
    await run.begin()
    run.head = await core.publish_version(dataclasses.replace(await run.prepare(), canary=STATED))
    await run.register()
    await core.register(run.registration(site=OTHER))

    async def report(site, logprobs):
        await core.report_canary(CanaryReport(site=site, incarnation=INCARNATION, version=0, logprobs=logprobs))

    async def told():
        """What is said and shown after two looks."""
        caplog.clear()
        for _ in range(2):
            await run_metrics.observe_run(core)
        words = ("the run stands still", "the run goes on")
        lines = [record for record in caplog.records if record.message.startswith(words)]
        return [record.levelno for record in lines], REGISTRY.get_sample_value("heterorl_coordinator_standstill")

    assert await told() == ([], 0)
    await report(SITE, OFF)
    assert RELEASE in caplog.text
    assert await told() == ([], 0)
    await report(OTHER, OFF)
    assert await told() == ([logging.ERROR], 1)
    assert "(eu-1, us-1)" in caplog.text
    assert RELEASE in caplog.text
    assert await told() == ([], 1)

    with pytest.raises(Quarantined, match=f"heterorl sites release {SITE} HOST:PORT --reason TEXT"):
        await run.lease()
    # What the message names ends it, for a canary too.
    assert "1 nats off" in await core.release_site(site=SITE, reason="the threshold was too low")
    assert await told() == ([logging.WARNING], 0)
    assert await run.lease()
    # And it comes back with the next version that is off.
    await report(SITE, OFF)
    assert await told() == ([logging.ERROR], 1)

    clock.advance(ACTIVE_S)
    assert await told() == ([logging.WARNING], 0)
    await core.close()
