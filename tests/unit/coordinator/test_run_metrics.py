"""What operators see of the coordinator is what its store holds."""

import asyncio
import dataclasses
import urllib.request
from types import SimpleNamespace

import pytest

from heterorl.common.process import metrics
from heterorl.common.process.metrics import REGISTRY
from heterorl.common.process.pushed_metrics import series_of
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, LeasedGroup
from heterorl.common.types.run import Heartbeat
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.common.wire.sealed_groups import seal
from heterorl.coordinator import run_metrics
from heterorl.coordinator.coordinator_app import GAUGE_INTERVAL_S, _gauges
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.sites.node_metrics import MetricsPage, NodeMetrics
from heterorl.coordinator.store.sqlite import SqliteEngine
from heterorl.coordinator.versions import published_variants
from tests.support.clock import ManualClock
from tests.support.limits import WAIT_S
from tests.support.run import INCARNATION, SITE, Run, credits_of


def shown(name, **labels):
    return REGISTRY.get_sample_value(f"heterorl_{name}", labels)


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(data_dir=tmp_path / "data", max_superseded_s=500)


async def test_newest_version_is_shown_with_its_payloads_and_what_coding_and_applying_took(core, run):
    first = await core.get_status()
    assert (first.delta_bytes, first.encode_s) == (0, 0.0)
    assert first.snapshot_bytes == first.bytes_last > 0
    request = dataclasses.replace(await run.prepare(), encode_s=0.5)
    await core.publish_version(request)
    await core.heartbeat(
        Heartbeat(
            site=SITE, incarnation=INCARNATION, policy_version=1, state_root="", tokens_per_s=0.0,
            apply_s=0.25,
        )
    )  # fmt: skip

    await run_metrics.observe_run(core)
    status = await core.get_status()

    assert status.delta_bytes == manifest_from_bytes(request.manifest).payloads[0].num_bytes
    assert (status.snapshot_bytes, status.encode_s) == (0, 0.5)
    assert [site.apply_s for site in status.sites] == [0.25]


async def test_drops_of_a_site_are_counted_from_0(core, run):
    """A series that begins with its first burst has no rate, and no alert."""
    await run_metrics.observe_run(core)

    for reason in (DropReason.INVALID, DropReason.STALE_AT_INGEST, DropReason.LOST_MEMBERS):
        assert shown("coordinator_pushed_groups_total", site=SITE, status="dropped", reason=reason.value) is not None


async def test_sites_and_bytes_are_shown_by_variant_and_no_longer_than_they_are_there(core, run):
    delta = (await core.get_status()).snapshot_bytes
    await core.register(run.registration(variant=""))
    await core.database.run(lambda c: published_variants.offer(c, ["int8"]))
    await core.register(run.registration(site=SiteId("small"), variant="int8"))
    await core.database.run(
        lambda c: c.execute("INSERT INTO variant_versions VALUES ('int8', 0, ?, 'd', 'r', 44, 0.5)", (b"",))
    )

    await run_metrics.observe_run(core)

    assert shown("coordinator_site_variant_info", site=SITE, variant="trained") == 1
    assert shown("coordinator_site_variant_info", site="small", variant="int8") == 1
    assert shown("coordinator_site_variant_info", site="small", variant="trained") is None
    assert shown("coordinator_variant_bytes", variant="trained", kind="snapshot") == delta > 0
    assert shown("coordinator_variant_bytes", variant="int8", kind="full") == 44
    assert shown("coordinator_variant_bytes", variant="int8", kind="delta") == 0
    await core.database.run(lambda c: published_variants.offer(c, []))
    await run_metrics.observe_run(core)
    assert shown("coordinator_variant_bytes", variant="int8", kind="full") is None


async def test_run_is_shown_as_the_store_holds_it(core, run, clock):
    published = clock.wall()
    await run.push(2)
    clock.advance(10.0)

    await run_metrics.observe_run(core)

    assert shown("coordinator_head_version") == 0
    assert shown("coordinator_head_timestamp_seconds") == published
    assert shown("coordinator_queue_groups", state="pending") == 2
    assert shown("coordinator_queue_oldest_seconds") == 10.0
    assert shown("coordinator_ledger_groups", account="acked") == 2
    assert shown("coordinator_ledger_balanced") == 1
    assert shown("coordinator_draining") == 0
    assert shown("coordinator_max_superseded_seconds") == 500
    assert shown("coordinator_site_silence_seconds", site=SITE) == 10.0
    assert shown("coordinator_site_policy_version", site=SITE) == 0
    assert shown("coordinator_store_used_bytes") == core.blobs.used_bytes > 0
    used = await core.database.run(lambda c: c.execute("SELECT sum(num_bytes) FROM groups").fetchone()[0])
    share = used / core.context.config.site_pending_bytes
    assert shown("coordinator_site_quota_ratio", site=SITE, quota="pending_bytes") == share > 0


async def test_head_is_no_older_than_the_coordinators_start(core, run, clock, config):
    """A run that goes on after a pause has its half hour before the alert."""
    await core.close()
    clock.advance(36_000.0)
    core = await Coordinator.open(config, clock)
    started = clock.wall()
    clock.advance(10.0)

    await run_metrics.observe_run(core)
    await core.close()

    assert shown("coordinator_head_timestamp_seconds") == started
    # Every reason is there from the start, so that its first group shows as an increase.
    for reason in DropReason:
        assert shown("coordinator_ledger_dropped_groups", reason=reason.value) == 0


async def test_site_that_is_heard_while_gauges_are_read_keeps_them(core, run, clock):
    core.context.sites._seen[SITE][INCARNATION].at = clock.monotonic() + 0.01
    await run_metrics.observe_run(core)

    assert shown("coordinator_site_silence_seconds", site=SITE) == 0.0


async def test_site_is_as_its_newest_incarnation_and_is_forgotten_after_a_day(core, run, clock):
    await run.lease(1)
    clock.advance(60.0)
    # The name sorts before that of the first incarnation: order of rows must not decide.
    await run.register(incarnation="0-new")
    await run_metrics.observe_run(core)

    assert shown("coordinator_site_silence_seconds", site=SITE) == 0.0
    assert shown("coordinator_site_work_groups", site=SITE) == 1

    clock.advance(run_metrics.SILENCE_LIMIT_S)
    await run_metrics.observe_run(core)

    assert shown("coordinator_site_silence_seconds", site=SITE) is None
    assert shown("coordinator_site_policy_version", site=SITE) is None


def test_every_gauge_of_a_site_leaves_with_it():
    staying = [
        name
        for name, metric in vars(metrics).items()
        if getattr(metric, "_labelnames", None) == ("site",)
        and (metric._type, metric._name.startswith("heterorl_coordinator_site_")) == ("gauge", True)
        and metric not in run_metrics._SITE_GAUGES
    ]

    assert staying == [], "add them to _SITE_GAUGES in coordinator/run_metrics.py"


async def test_site_that_stopped_in_order_raises_no_alert_until_it_is_back(core, run, clock):
    beat = Heartbeat(site=SITE, incarnation=INCARNATION, policy_version=0, state_root="", tokens_per_s=1.0)
    await core.heartbeat(dataclasses.replace(beat, is_stopped=True))
    clock.advance(200.0)
    await run_metrics.observe_run(core)
    assert shown("coordinator_site_silence_seconds", site=SITE) is None
    assert shown("coordinator_site_stopped", site=SITE) == 1
    assert (await core.get_status()).sites[0].is_stopped

    await run.register()
    clock.advance(200.0)
    await run_metrics.observe_run(core)
    assert shown("coordinator_site_silence_seconds", site=SITE) == 200.0
    assert shown("coordinator_site_stopped", site=SITE) == 0
    assert not (await core.get_status()).sites[0].is_stopped


async def test_sites_of_one_label_hide_no_quarantine_and_no_silence(core, run, clock, monkeypatch):
    monkeypatch.setattr(metrics, "SITES", metrics.SiteLabels(limit=0))
    await core.database.run(lambda c: c.execute("INSERT INTO quarantines VALUES (?, 0, 'bad')", (SITE,)))
    clock.advance(200.0)
    await core.register(run.registration(site=SiteId("sound")))

    await run_metrics.observe_run(core)

    assert shown("coordinator_site_quarantined", site="other") == 1
    assert shown("coordinator_site_silence_seconds", site="other") == 200.0


async def test_assignments_that_left_with_a_silent_site_are_shown(core, run, clock):
    await core.register(run.registration(work_ahead_s=600.0))
    await run.lease(1)
    await run_metrics.observe_run(core)
    assert shown("coordinator_site_away_groups", site=SITE) == 0

    clock.advance(core.config.work_lease_s + 1)
    await run_metrics.observe_run(core)
    assert shown("coordinator_site_work_groups", site=SITE) == 1
    assert shown("coordinator_site_away_groups", site=SITE) == 1


async def test_a_ledger_that_lost_a_group_is_shown(core, run):
    await run.push(1)
    await core.database.run(lambda connection: connection.execute("DELETE FROM groups"))

    await run_metrics.observe_run(core)

    assert shown("coordinator_ledger_balanced") == 0


async def test_ages_of_a_leased_group_and_outcomes_of_pushes_carry_the_site(core, run, clock):
    labels = {"site": SITE, "status": "accepted", "reason": ""}
    before = shown("coordinator_pushed_groups_total", **labels) or 0.0
    ages = shown("coordinator_policy_age_seconds_sum", site=SITE) or 0.0
    waits = shown("coordinator_queue_age_seconds_sum", site=SITE) or 0.0
    superseded = shown("coordinator_superseded_seconds_sum", site=SITE) or 0.0
    clock.advance(5.0)
    work = await run.lease(1)
    for outcome in await core.push_groups([run.group(work[0])]):
        run_metrics.observe_push(outcome)
    clock.advance(7.0)
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(1))
    queued = await anext(stream)
    run_metrics.observe_lease(
        LeasedGroup(
            sealed=seal(queued.group),
            policy_age_s=queued.policy_age_s,
            queue_age_s=queued.queue_age_s,
            superseded_s=3.0,
        )
    )
    await stream.aclose()

    assert shown("coordinator_pushed_groups_total", **labels) == before + 1
    # Published 5 s before it was pushed, leased 7 s after.
    assert shown("coordinator_policy_age_seconds_sum", site=SITE) == ages + 12.0
    assert shown("coordinator_queue_age_seconds_sum", site=SITE) == waits + 7.0
    assert shown("coordinator_superseded_seconds_sum", site=SITE) == superseded + 3.0


@pytest.mark.parametrize(("num_sites", "num_rounds"), [(900, 10), (2500, 4)])
async def test_gauges_of_many_sites_are_read_less_often(monkeypatch, num_sites, num_rounds):
    rounds = []

    async def observe(_):
        rounds.append(clock.monotonic())
        return num_sites

    class TenSeconds(ManualClock):
        async def sleep(self, seconds):
            self.advance(seconds)
            if self.monotonic() >= start + 10 * GAUGE_INTERVAL_S:
                raise asyncio.CancelledError

    monkeypatch.setattr(run_metrics, "observe_run", observe)
    clock = TenSeconds()
    start = clock.monotonic()
    core = SimpleNamespace(context=SimpleNamespace(disk=SimpleNamespace(look=lambda: False)))
    server = SimpleNamespace(revoked_serials=frozenset, authorizer=SimpleNamespace(serials={}))
    with pytest.raises(asyncio.CancelledError):
        await _gauges(core, server, clock)

    assert len(rounds) == num_rounds


SECRETS = {
    "PGPASSWORD": "hunter2-of-the-store",
    "AWS_ACCESS_KEY_ID": "AKIAOFTHEBUCKET",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-bucket",
    "WANDB_API_KEY": "key-of-the-tracker",
    "MLFLOW_TRACKING_URI": "https://me:password-of-the-tracker@tracker.example",
    "HF_TOKEN": "hf_token-of-the-hub",
}


def read(url):
    return urllib.request.urlopen(url, timeout=WAIT_S).read().decode()


async def test_pages_of_metrics_hold_neither_secrets_nor_the_addresses_that_they_open(tmp_path, clock, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    url = "postgresql://keeper@db.example:5432/run7?passfile=/etc/heterorl/pgpass"
    config = CoordinatorConfig(data_dir=tmp_path / "data", store={"url": url}, metrics_port=0, metrics_nodes=4)
    # The store itself is a file: no server is needed for what the configuration says of it.
    (tmp_path / "data").mkdir()
    engine = SqliteEngine.open(tmp_path / "data" / "store.sqlite")
    core = await Coordinator.open(config, clock, engine=engine)
    reported = NodeMetrics(run_id=config.run_id, most_nodes=4, clock=clock)
    try:
        run = Run(core, tmp_path)
        await run.begin()
        await run.publish()
        await run.register()
        await run.push(1)
        await run_metrics.observe_run(core)
        await reported.put("sampler", SITE, series_of(REGISTRY))
        port = MetricsPage(config, reported).serve()
        pages = [await asyncio.to_thread(read, f"http://127.0.0.1:{port}/{page}") for page in ("metrics", "nodes")]
    finally:
        await core.close()

    assert all("heterorl_" in page for page in pages)
    for page in pages:
        for word in (*SECRETS.values(), "password", "hunter2", "db.example", "keeper@", "pgpass", str(tmp_path)):
            assert word not in page
