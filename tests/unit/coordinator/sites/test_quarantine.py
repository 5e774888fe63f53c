"""Groups that failed the learner's checks: counted once, against their site, until an operator forgives."""

import dataclasses

import pytest

from heterorl.common.errors import InvalidRequest, Quarantined, StaleEpoch
from heterorl.common.types.rollout import DropReason, GroupId, PushStatus, Rejection
from heterorl.common.types.run import CanaryReport
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.sites import audit, quarantine
from heterorl.coordinator.sites.quarantine import decide
from heterorl.coordinator.versions import published_variants
from tests.support.clock import ManualClock
from tests.support.run import INCARNATION, SITE, Run, credits_of

TWICE = CoordinatorConfig(quarantine_failures=2, quarantine_window_groups=100)


@pytest.fixture
def config(tmp_path):
    return CoordinatorConfig(
        data_dir=tmp_path / "data", groups_per_version=8, max_staleness_versions=3, quarantine_failures=2
    )


async def begin(core, tmp_path):
    (tmp_path / "run").mkdir(exist_ok=True)
    run = Run(core, tmp_path / "run")
    await run.begin()
    await run.publish()
    await run.register()
    return run


async def take(core, run, count):
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(count))
    taken = []
    async for queued in stream:
        taken.append(queued)
        if len(taken) == count:
            break
    await stream.aclose()
    return taken


def rejection(group_id, reason=DropReason.REWARD_MISMATCH):
    return Rejection(id=group_id, reason=reason, detail="rollouts[0].reward: 1, computed 0")


async def accounts(core):
    counted = await core.database.run(ledger.counts)
    assert counted == await core.database.run(ledger.recount)
    assert counted.is_balanced
    return counted


async def log_of(core):
    rows = await core.database.run(audit.read)
    assert audit.find_faults(rows) == []
    return [(row.kind, row.subject) for row in rows if row.kind != "learner_lease"]


@pytest.mark.parametrize(
    ("failed_at", "accepted", "is_due"),
    [
        ([], 10, False),
        ([10], 10, False),
        ([9, 10], 10, True),
        # 100 groups later the first failure no longer counts: of the last 100, numbers 12 to 111, one failed.
        ([11, 111], 111, False),
        ([12, 111], 111, True),
    ],
)
def test_only_failures_within_the_window_count(failed_at, accepted, is_due):
    assert decide(failed_at, accepted=accepted, config=TWICE)[0] is is_due


@pytest.mark.parametrize(
    ("failed_at", "code_failed_at", "is_due"),
    [([10], [10] * 9, False), ([10], [10] * 10, True), ([], [10] * 19, False), ([], [10] * 20, True)],
)
def test_ten_failures_by_code_count_as_one(failed_at, code_failed_at, is_due):
    found, text = decide(failed_at, code_failed_at=code_failed_at, accepted=20, config=TWICE)

    assert found is is_due
    assert text.startswith(
        f"{len(failed_at + code_failed_at)} of its last 20 groups failed a check, {len(code_failed_at)}"
    )
    assert not decide([], code_failed_at=code_failed_at, accepted=111, config=TWICE)[0], "the window is theirs too"


def test_zero_failures_means_never():
    assert not decide([1] * 50, accepted=1, config=TWICE.model_copy(update={"quarantine_failures": 0}))[0]


async def test_site_is_quarantined_at_its_second_failure_and_comes_back_by_release(core, tmp_path):
    run = await begin(core, tmp_path)
    ids = await run.push(5)
    await take(core, run, 3)

    await core.reject_groups(epoch=run.epoch, rejections=[rejection(ids[0])])
    # Told again, as after a lost answer: it counts once.
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(ids[0])])
    (site,) = (await core.get_status()).sites
    assert (site.groups_failed, site.quarantine) == (1, "")
    late = run.group((await run.lease())[0])
    held = await run.lease()
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(ids[1], DropReason.LOGPROB_MISMATCH)])

    (site,) = (await core.get_status()).sites
    assert site.quarantine.startswith("2 of its last 5 groups failed a check; the last one: logprob_mismatch")
    # What the learner has not taken goes; what it holds passed its checks.
    counted = await accounts(core)
    assert (counted.pending, counted.leased) == (0, 1)
    assert counted.dropped == {
        DropReason.REWARD_MISMATCH: 1, DropReason.LOGPROB_MISMATCH: 1, DropReason.QUARANTINED: 2,
    }  # fmt: skip
    with pytest.raises(Quarantined, match="logprob_mismatch"):
        await run.lease()
    (outcome,) = await core.push_groups([late])
    assert (outcome.status, outcome.reason) == (PushStatus.DROPPED, DropReason.QUARANTINED)
    # Its assignments and prompts are open to others, except those that failed a check.
    await core.register(run.registration(site="us-1"))
    grant = await core.lease_work(site="us-1", incarnation=INCARNATION, max_groups=5, policy_version=0)
    assert [work.id for work in grant.assignments] == [3, 4, 5, 6, 7]
    assert (late.assignment, held[0].id) == (5, 6)

    assert "2 of its last 5" in await core.release_site(site=SITE, reason="engine replaced")
    assert (await core.get_status()).sites[0].groups_failed == 0
    (group,) = [run.group(work) for work in await run.lease()]
    assert (await core.push_groups([group]))[0].status is PushStatus.ACCEPTED
    await accounts(core)
    assert await log_of(core) == [
        ("check_failed", SITE), ("check_failed", SITE), ("quarantine", SITE), ("release", SITE),
    ]  # fmt: skip


async def test_prompt_on_which_learner_and_sites_disagree_is_one_failure_in_a_pass(core, tmp_path):
    """Handed out again, it would bring each site into quarantine in turn."""
    run = await begin(core, tmp_path)
    await run.register("us-1")
    (bad,) = await run.lease()
    (outcome,) = await core.push_groups([run.group(bad)])
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(outcome.id)])

    grant = await core.lease_work(site="us-1", incarnation=INCARNATION, max_groups=30, policy_version=0)
    assert grant.assignments
    assert bad.prompt_index not in [work.prompt_index for work in (*grant.assignments, *await run.lease(30))]


async def test_failures_by_code_are_counted_apart(core, tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "CODE_MISMATCHES", 2)
    run = await begin(core, tmp_path)
    ids = await run.push(4)
    await take(core, run, 4)

    code = DropReason.CODE_MISMATCH
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(ids[0], code), rejection(ids[1], code)])
    (site,) = (await core.get_status()).sites
    assert (site.groups_failed, site.quarantine) == (2, "")
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(ids[2], code)])
    assert (await core.get_status()).sites[0].quarantine == ""
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(ids[3])])

    (site,) = (await core.get_status()).sites
    assert site.quarantine.startswith(
        "4 of its last 4 groups failed a check, 3 by the result of a completion's code, of which 2 count as one;"
    )
    assert (await accounts(core)).dropped == {code: 3, DropReason.REWARD_MISMATCH: 1}


async def test_quarantine_survives_a_restart_and_no_canary_ends_it(config, tmp_path):
    core = await Coordinator.open(config, ManualClock())
    run = await begin(core, tmp_path)
    ids = await run.push(2)
    request = dataclasses.replace(await run.prepare(), canary=(-1.0, -2.0))
    run.head = await core.publish_version(request)
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(ids[0]), rejection(ids[1])])
    await core.close()

    core = await Coordinator.open(config, ManualClock())
    run.api = core
    canary = CanaryReport(site=SITE, incarnation=INCARNATION, version=1, logprobs=(-1.0, -2.0))
    assert (await core.report_canary(canary)).difference == 0.0
    with pytest.raises(Quarantined):
        await run.lease()
    await core.close()


async def test_quarantine_tells_which_versions_hold_groups_of_the_site(core, tmp_path):
    run = await begin(core, tmp_path)
    ids = await run.push(4)
    await run.publish(consumed=ids[:2])
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(group_id) for group_id in ids[2:]])

    rows = await core.database.run(audit.read)
    assert "versions 1 to 1 hold 2 groups of it" in next(row.detail for row in rows if row.kind == "quarantine")


async def test_rejections_are_the_current_learners_and_of_its_checks(core, tmp_path):
    run = await begin(core, tmp_path)
    (group_id,) = await run.push(1)

    with pytest.raises(StaleEpoch):
        await core.reject_groups(epoch=run.epoch - 1, rejections=[rejection(group_id)])
    with pytest.raises(InvalidRequest, match="stale_at_lease is not a check"):
        await core.reject_groups(epoch=run.epoch, rejections=[rejection(group_id, DropReason.STALE_AT_LEASE)])
    stranger = GroupId(site=SITE, incarnation=INCARNATION, sequence=99)
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(stranger)])
    assert (await core.get_status()).sites[0].groups_failed == 0
    assert (await accounts(core)).pending == 1


async def test_failure_is_shown_only_while_it_counts(tmp_path, config):
    core = await Coordinator.open(config.model_copy(update={"quarantine_window_groups": 3}), ManualClock())
    run = await begin(core, tmp_path)
    (failed,) = await run.push(1)
    await take(core, run, 1)
    await core.reject_groups(epoch=run.epoch, rejections=[rejection(failed)])
    shown = []
    for _ in range(3):
        await run.push(1)
        shown.append((await core.get_status()).sites[0].groups_failed)

    # Of the newest three groups, numbers 2 to 4, none failed.
    assert shown == [1, 1, 0]
    await core.close()


async def test_release_wants_a_reason_and_a_site(core, tmp_path):
    await begin(core, tmp_path)

    with pytest.raises(InvalidRequest, match="reason"):
        await core.release_site(site=SITE, reason=" ")
    with pytest.raises(InvalidRequest, match="mars-1 never registered .*`heterorl status`"):
        await core.release_site(site="mars-1", reason="why not")
    assert await core.release_site(site=SITE, reason="to be sure") == ""


async def test_orders_leases_and_canaries_are_in_the_log(core, tmp_path):
    run = await begin(core, tmp_path)
    request = dataclasses.replace(await run.prepare(), canary=(-1.0, -2.0))
    run.head = await core.publish_version(request)
    report = CanaryReport(site=SITE, incarnation=INCARNATION, version=1, logprobs=(-5.0, -6.0))
    await core.report_canary(report)
    await core.report_canary(report)
    await core.report_canary(dataclasses.replace(report, logprobs=(-1.0, -2.0)))
    # The second time because the first answer was lost: one order.
    await core.rollback(to_version=0, request_id="r-1")
    await core.rollback(to_version=0, request_id="r-1")
    await core.run.note_revoked(frozenset({0xAB, 7}), {})
    await core.run.note_revoked(frozenset({0xAB, 7, 9}), {})

    assert await log_of(core) == [
        ("quarantine", SITE), ("quarantine_ended", SITE), ("rollback_order", "r-1"),
        ("revocation", "7"), ("revocation", "ab"), ("revocation", "9"),
    ]  # fmt: skip
    kinds = [row.kind for row in await core.database.run(audit.read)]
    assert kinds[0] == "learner_lease"


async def test_group_is_checked_in_the_form_that_it_was_made_with_whatever_its_site_pulls_now(core, tmp_path):
    run = await begin(core, tmp_path)
    quantised = "f" * 64

    def add_variant(connection):
        published_variants.offer(connection, ["int8"])
        connection.execute("INSERT INTO variant_versions VALUES ('int8', 0, ?, 'd', ?, 44, 0.5)", (b"", quantised))

    await core.database.run(add_variant)
    before, after = await run.lease(2)
    await core.push_groups([run.group(before)])
    # The operator changes the site's configuration; its outbox keeps incarnation and groups.
    await core.register(run.registration(variant="int8"))
    (outcome,) = await core.push_groups([run.group(after, state_root=quantised)])
    assert outcome.status is PushStatus.ACCEPTED

    assert [queued.variant for queued in await take(core, run, 2)] == ["", "int8"]


async def test_groups_that_the_learner_gives_back_are_dropped_where_their_site_is_in_quarantine(core, tmp_path):
    run = await begin(core, tmp_path)
    await run.push(4)
    taken = await take(core, run, 4)
    rejections = [rejection(queued.group.id) for queued in taken[:2]]
    await core.reject_groups(epoch=run.epoch, rejections=rejections)
    assert (await accounts(core)).leased == 2

    await core.release_lease(epoch=run.epoch)

    counted = await accounts(core)
    assert (counted.leased, counted.pending) == (0, 0)
    assert counted.dropped[DropReason.QUARANTINED] == 2
