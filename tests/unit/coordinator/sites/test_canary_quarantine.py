"""The canary at the coordinator: who is quarantined, for how long, and what that stops."""

import dataclasses
import math
import sqlite3
from collections import Counter

import pytest

from heterorl.common.errors import InvalidRequest, NotRegistered, Quarantined, StoreFull
from heterorl.common.process import metrics
from heterorl.common.types.rollout import PushStatus
from heterorl.common.types.run import CanaryReport
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.sites import audit
from heterorl.coordinator.sites.quarantine import MAX_LOGPROBS, canary_kl, judge_canary
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, Run

STATED = (-0.5, -1.0, -1.5, -2.0)


def report(logprobs, *, version=0, site=SITE, incarnation=INCARNATION):
    return CanaryReport(site=site, incarnation=incarnation, version=version, logprobs=tuple(logprobs))


@pytest.mark.parametrize(
    ("offered", "is_quarantined"),
    [
        (STATED, False),
        # One token far off is a rounding matter of that token; half of them are not.
        ((-0.5, -1.0, -1.5, -9.0), False),
        ((-0.5, -1.0, -1.9, -2.4), True),
        ((-0.5, -1.0, -1.5), True),
        ((), True),
        ((math.nan,) * 4, True),
        ((-math.inf,) * 4, True),
    ],
)
def test_verdict_follows_the_median_over_tokens(offered, is_quarantined):
    difference, quarantine = judge_canary(report(offered), STATED, threshold=0.15)

    assert bool(quarantine) == is_quarantined
    assert quarantine is not None
    assert difference is None or math.isfinite(difference)


@pytest.mark.parametrize(
    ("offered", "kl"),
    [
        (STATED, 0.0),
        # (.2^2 + .4^2) / 4 / 2
        ((-0.5, -1.2, -1.9, -2.0), 0.025),
        ((-0.5, -1.0), None),
        ((math.nan,) * 4, None),
    ],
)
def test_mismatch_of_engines_is_half_the_mean_square_of_the_differences(offered, kl):
    assert canary_kl(offered, STATED) == (kl if kl is None else pytest.approx(kl))
    assert canary_kl(offered, ()) is None


def test_nothing_is_decided_without_the_learners_canary_or_without_a_threshold():
    assert judge_canary(report(()), (), threshold=0.1) == (None, None)
    assert judge_canary(report((-9.0,) * 4), STATED, threshold=0.0) == (None, None)


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(data_dir=tmp_path / "data", groups_per_version=2, max_staleness_versions=3)


async def _run(core, directory):
    directory.mkdir()
    run = Run(core, directory)
    await run.begin()
    for _ in range(2):
        request = dataclasses.replace(await run.prepare(), canary=STATED)
        run.head = await core.publish_version(request)
    await run.register()
    return run


async def _status(core):
    (site,) = (await core.get_status()).sites
    return site


async def test_site_that_is_off_gets_no_work_until_one_of_its_versions_is_right(config, tmp_path):
    clock = ManualClock()
    core = await Coordinator.open(config, clock)
    run = await _run(core, tmp_path / "run")
    assert (await _status(core)).canary_difference is None
    verdict = await core.report_canary(report((-1.5, -2.0, -2.5, -3.0)))
    assert "1 nats off" in verdict.quarantine
    assert verdict.difference == pytest.approx(1.0)
    with pytest.raises(Quarantined, match="version 0: canary log-probs"):
        await run.lease()
    site = await _status(core)
    assert (site.canary_difference, site.quarantine) == (pytest.approx(1.0), verdict.quarantine)
    assert metrics.SITE_CANARY_KL.labels(metrics.SITES.of(SITE))._value.get() == pytest.approx(0.5)

    # A coordinator that starts anew trusts it no more than the last one did.
    await core.close()
    core = await Coordinator.open(config, clock)
    run.api = core
    with pytest.raises(Quarantined):
        await run.lease()

    assert await core.report_canary(report(STATED, version=1)) == (
        dataclasses.replace(verdict, difference=0.0, quarantine="")
    )
    assert await run.lease()
    assert (await _status(core)).quarantine == ""
    await core.close()


async def test_groups_of_a_site_that_is_off_are_still_taken(config, tmp_path):
    core = await Coordinator.open(config, ManualClock())
    run = await _run(core, tmp_path / "run")
    await run.publish()
    groups = [run.group(work) for work in await run.lease(2)]
    assert (await core.report_canary(report((-9.0,) * 4))).quarantine

    outcomes = await core.push_groups(groups)

    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * 2
    await core.close()


async def test_canary_of_a_version_without_one_changes_nothing(config, tmp_path):
    core = await Coordinator.open(config, ManualClock())
    run = await _run(core, tmp_path / "run")
    await core.report_canary(report((-9.0,) * 4))

    verdict = await core.report_canary(report(STATED, version=7))

    assert (verdict.difference, bool(verdict.quarantine)) == (None, True)
    assert run.head == 1
    await core.close()


async def test_canary_of_a_stranger_and_oversized_ones_are_refused(config, tmp_path):
    core = await Coordinator.open(config, ManualClock())
    run = await _run(core, tmp_path / "run")
    with pytest.raises(NotRegistered):
        await core.report_canary(report(STATED, site="mars-1"))
    with pytest.raises(InvalidRequest, match="logprobs"):
        await core.report_canary(report((-1.0,) * (MAX_LOGPROBS + 1)))
    for bad in ((-1.0,) * (MAX_LOGPROBS + 1), (math.nan,)):
        request = dataclasses.replace(await run.prepare(), canary=bad)
        with pytest.raises(InvalidRequest, match="canary_logprobs"):
            await core.publish_version(request)
    await core.close()


async def test_site_that_flaps_has_one_row_each_way_for_a_version_and_is_judged_each_time(config, tmp_path, caplog):
    core = await Coordinator.open(config, ManualClock())
    run = await _run(core, tmp_path / "a")
    wrong, right = (-9.0,) * 4, STATED

    async def kinds():
        rows = await core.database.run(audit.read)
        assert audit.find_faults(rows) == []
        return dict(Counter(row.kind for row in rows if row.subject == SITE))

    caplog.clear()
    for number in range(50):
        # Older versions in turn are no news either.
        version = run.head - number // 2 % 2
        verdict = await core.report_canary(report((wrong, right)[number % 2], version=version))
        assert bool(verdict.quarantine) == (number % 2 == 0)
    await core.report_canary(report(wrong, version=run.head))
    with pytest.raises(Quarantined):
        await run.lease(1)
    assert await kinds() == {"quarantine": 1, "quarantine_ended": 1}
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1

    run.head = await core.publish_version(dataclasses.replace(await run.prepare(), canary=STATED))
    await core.report_canary(report(right, version=run.head))
    assert await kinds() == {"quarantine": 1, "quarantine_ended": 2}
    await core.close()


async def test_site_that_is_off_again_after_its_release_is_in_the_audit_log_again(config, tmp_path, caplog):
    core = await Coordinator.open(config, ManualClock())
    run = await _run(core, tmp_path / "a")
    wrong = report((-9.0,) * 4, version=run.head)
    await core.report_canary(wrong)
    await core.release_site(site=SITE, reason="its engine is repaired")
    caplog.clear()

    await core.report_canary(wrong)

    rows = [row.kind for row in await core.database.run(audit.read) if row.subject == SITE]
    assert rows == ["quarantine", "release", "quarantine"]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    await core.close()


@pytest.mark.sqlite
async def test_quarantine_that_the_full_disk_undid_is_in_the_audit_log_at_the_next_report(
    config, tmp_path, monkeypatch
):
    core = await Coordinator.open(config, ManualClock())
    run = await _run(core, tmp_path / "a")
    wrong = report((-9.0,) * 4, version=run.head)

    def refuses():
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(core.database._engine, "commit", refuses)
        with pytest.raises(StoreFull):
            await core.report_canary(wrong)
    assert (await core.report_canary(wrong)).quarantine

    rows = [row.kind for row in await core.database.run(audit.read) if row.subject == SITE]
    assert rows == ["quarantine"]
    await core.close()
