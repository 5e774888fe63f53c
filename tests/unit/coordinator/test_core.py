"""The coordinator's promises, against the real store, in process."""

import asyncio
import dataclasses
import re

import blake3
import numpy as np
import pytest

from heterorl.common.errors import (
    ContractMismatch,
    CorruptStore,
    DigestMismatch,
    Draining,
    GroupNotAvailable,
    InvalidRequest,
    LeaseHeld,
    NotRegistered,
    ParentNotHead,
    PayloadMissing,
    QuotaExceeded,
    StaleEpoch,
    StepConflict,
    StoreFull,
    UnknownPayload,
    UnknownVersion,
)  # fmt: skip
from heterorl.common.types.common import CompletionNumbers, Digest, LearnerPhase, LearnerProgress, SiteId, SiteTokens
from heterorl.common.types.policy import PlanKind
from heterorl.common.types.rollout import DropReason, GroupId, PushStatus, RewardPart, Span
from heterorl.common.types.run import Command, Heartbeat, changed_steps
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.common.wire.policy_messages import manifest_from_bytes, manifest_to_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.coordinator.sites import audit
from heterorl.coordinator.store.database import Database
from heterorl.coordinator.versions import lineage
from heterorl.v1 import run_pb2
from tests.support.run import CONTRACT, INCARNATION, LAYOUT, REPORT, SITE, Run, credits_of, frames, rollout


def config_of(tmp_path, **changes):
    values = {
        "data_dir": tmp_path / "data",
        "groups_per_version": 2,
        "max_staleness_versions": 3,
        "max_superseded_s": 500,
    }
    return CoordinatorConfig(**{**values, **changes})


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path)


async def balanced(core):
    counts = await core.database.run(ledger.counts)
    assert counts == await core.database.run(ledger.recount)
    assert counts.is_balanced
    return counts


async def leased(core, run, count, *, held=()):
    async def credits():
        yield count
        await asyncio.Event().wait()

    groups = []
    stream = core.stream_groups(epoch=run.epoch, held=held, credits=credits())
    async for queued in stream:
        groups.append(queued)
        if len(groups) == count:
            break
    await stream.aclose()
    return groups


async def test_group_travels_from_work_to_a_version(core, run, clock):
    ids = await run.push(2)
    groups = await leased(core, run, 2)
    await run.publish(consumed=ids)

    assert [queued.group.id for queued in groups] == ids
    counts = await balanced(core)
    assert (counts.acked, counts.pending, counts.leased, counts.consumed) == (2, 0, 0, 2)
    status = await core.get_status()
    assert (status.head_version, status.learner, status.sites[0].groups_accepted) == (1, "learner", 2)
    (report,) = await core.list_steps(after_step=0, limit=10)
    assert (report.step, report.published_time) == (1, clock.wall())


async def test_learner_lease_is_exclusive_until_it_expires_and_epochs_grow(core, run, clock):
    with pytest.raises(LeaseHeld) as held:
        await core.acquire_lease(holder="other", contract=CONTRACT, request_id="r2")
    assert 0 < held.value.retry_after_s <= 10
    again = await core.acquire_lease(holder="learner", contract=CONTRACT, request_id="r1")
    assert again.epoch == run.epoch
    clock.advance(11)
    other = await core.acquire_lease(holder="other", contract=CONTRACT, request_id="r2")
    assert other.epoch == run.epoch + 1


async def test_progress_is_shown_while_its_learner_holds_the_lease(core, run, clock):
    progress = LearnerProgress(step=3, phase=LearnerPhase.COMPUTING, phase_s=4.0, micro_batches_done=1, micro_batches=8)
    assert (await core.get_status()).progress is None

    await core.renew_lease(epoch=run.epoch, progress=progress)
    clock.advance(2.5)
    status = await core.get_status()
    assert (status.progress, status.progress_age_s) == (progress, 2.5)
    # A learner between two phases, or an earlier one, says nothing: no old word stands for it.
    await core.renew_lease(epoch=run.epoch)
    assert (await core.get_status()).progress is None

    await core.renew_lease(epoch=run.epoch, progress=progress)
    clock.advance(11)
    await core.acquire_lease(holder="other", contract=CONTRACT, request_id="r2")
    assert (await core.get_status()).progress is None


async def test_progress_of_a_released_lease_is_not_shown(core, run):
    progress = LearnerProgress(step=3, phase=LearnerPhase.WAITING, phase_s=4.0)
    await core.renew_lease(epoch=run.epoch, progress=progress)
    await core.release_lease(epoch=run.epoch)

    assert (await core.get_status()).progress is None


async def test_zombie_learner_has_no_effect_of_any_kind(core, run, tmp_path):
    ids = await run.push(1)
    request = await run.prepare(consumed=ids)
    await core.acquire_lease(holder="learner", contract=CONTRACT, request_id="r2")

    data = b"late"
    effects = [
        lambda: core.renew_lease(epoch=run.epoch),
        lambda: core.release_lease(epoch=run.epoch),
        lambda: core.publish_version(request),
        lambda: core.abandon_groups(epoch=run.epoch, ids=ids, reason=""),
        lambda: run.upload(data, Digest(blake3.blake3(data).hexdigest())),
        lambda: anext(core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(1))),
        lambda: core.drain(reason="the last step is reached", epoch=run.epoch),
    ]
    for effect in effects:
        with pytest.raises(StaleEpoch):
            await effect()
    counts = await balanced(core)
    assert (counts.pending, counts.consumed) == (1, 0)
    assert not (await core.get_status()).is_draining


async def test_released_lease_is_stale_and_free_at_once(core, run):
    await core.release_lease(epoch=run.epoch)

    with pytest.raises(StaleEpoch):
        await core.renew_lease(epoch=run.epoch)
    grant = await core.acquire_lease(holder="other", contract=CONTRACT, request_id="r9")
    assert grant.epoch == run.epoch + 1


async def test_running_stream_ends_when_another_learner_takes_over(core, run, clock):
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=_for_ever())
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    clock.advance(11)
    await core.acquire_lease(holder="other", contract=CONTRACT, request_id="r2")

    with pytest.raises(StaleEpoch):
        await waiting


async def _for_ever():
    yield 1
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("change", "field", "remedy"),
    [
        ({"tokenizer_digest": Digest("9" * 64)}, "tokenizer_digest", "the tokenizer's files"),
        ({"task_digest": Digest("9" * 64)}, "task_digest", "the log lines of both nodes with `digest`"),
        ({"layout_id": Digest("9" * 64)}, "layout_id", "the run's model"),
        ({"group_size": 8}, "group_size", "as the learner does"),
        ({"sampling": dataclasses.replace(CONTRACT.sampling, temperature=0.6)}, "sampling.temperature", "[sampling]"),
    ],
)
async def test_contract_is_the_first_learners_and_names_what_differs(core, run, change, field, remedy):
    # T19: a difference in log-prob semantics is found at registration.
    other = dataclasses.replace(CONTRACT, **change)

    with pytest.raises(ContractMismatch, match=f"^{field}: .*{re.escape(remedy)}"):
        await core.register(run.registration(contract=other))
    with pytest.raises(ContractMismatch, match=f"^{field}: .*others need a new run"):
        await core.acquire_lease(holder="learner", contract=other, request_id="r5")


async def test_register_needs_a_contract_a_name_and_a_bearable_delay(core, run, tmp_path, clock):
    fresh = await Coordinator.open(config_of(tmp_path / "fresh"), clock)
    with pytest.raises(Draining, match="no learner .*start the learner"):
        await fresh.register(run.registration())
    await fresh.close()
    with pytest.raises(InvalidRequest):
        await core.register(run.registration(site=SiteId("")))
    with pytest.raises(ContractMismatch, match="max_staleness_versions"):
        await core.register(run.registration(max_delay_versions=4))
    with pytest.raises(InvalidRequest, match="holder"):
        await core.acquire_lease(holder="", contract=CONTRACT, request_id="")


async def test_publication_is_one_compare_and_set(core, run):
    request = await run.prepare()
    assert await core.publish_version(request) == 1
    assert await core.publish_version(request) == 1
    assert await core.get_step(step_id=request.step_id) == 1
    assert await core.get_step(step_id="never") is None
    with pytest.raises(StepConflict):
        await core.publish_version(
            dataclasses.replace(request, consumed=(GroupId(site=SITE, incarnation="x", sequence=1),))
        )
    with pytest.raises(ParentNotHead):
        await core.publish_version(dataclasses.replace(request, step_id="other"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"manifest": {"run_id": "other"}}, InvalidRequest, "run_id"),
        ({"manifest": {"version": 7}}, InvalidRequest, "version"),
        ({"manifest": {"parent_digest": "0" * 64}}, InvalidRequest, "parent_digest"),
        ({"manifest": {"layout_id": "0" * 64}}, InvalidRequest, "layout_id"),
        ({"manifest": {"epoch": 9}}, InvalidRequest, "epoch"),
        ({"parent_version": 5}, ParentNotHead, "parent"),
    ],
)
async def test_publication_that_contradicts_the_run_is_refused_and_leaves_nothing(core, run, change, error, message):
    with pytest.raises(error, match=message):
        await run.publish(**change)

    assert (await core.get_status()).head_version == 0


@pytest.mark.files
async def test_publication_needs_complete_payloads_and_a_first_snapshot(core, run, tmp_path, clock):
    request = await run.prepare()
    data = next(iter((tmp_path / "data" / "blobs").rglob("*/*")))
    for path in (tmp_path / "data" / "blobs").rglob("*/*"):
        data = path if path.stat().st_mtime >= data.stat().st_mtime else data
    data.unlink()
    with pytest.raises(PayloadMissing):
        await core.publish_version(request)

    fresh = await Coordinator.open(config_of(tmp_path / "fresh"), clock)
    other = Run(fresh, tmp_path / "fresh")
    await other.begin()
    with pytest.raises(InvalidRequest, match="snapshot"):
        await other.publish(manifest={"payloads": ()})
    first = await other.prepare()
    manifest = manifest_from_bytes(first.manifest)
    payload = dataclasses.replace(manifest.payloads[0], to_version=3)
    moved = manifest_to_bytes(dataclasses.replace(manifest, payloads=(payload,)))
    with pytest.raises(InvalidRequest, match="lead"):
        await fresh.publish_version(dataclasses.replace(first, manifest=moved))
    await fresh.close()


async def test_refused_groups_drop_the_stale_and_keep_the_rest(core, run, tmp_path):
    (old,) = await run.push(1)
    await leased(core, run, 1)
    for _ in range(4):
        await run.publish()
    (fresh,) = await run.push(1)
    await leased(core, run, 1, held=[old])

    # head 4, bound 3: the group of version 0 is 4 versions old at the commit.
    with pytest.raises(GroupNotAvailable, match="1 became too stale"):
        await run.publish(consumed=[old, fresh])
    run.head = 4
    with pytest.raises(GroupNotAvailable, match="twice"):
        await run.publish(consumed=[fresh, fresh])
    counts = await balanced(core)
    assert counts.dropped == {DropReason.STALE_AT_COMMIT: 1}
    assert (counts.leased, counts.consumed) == (1, 0)


async def test_lost_checkpoint_abandons_versions_and_hands_their_prompts_out_again(core, run):
    ids = await run.push(2)
    await run.publish(consumed=ids[:1])
    await run.publish(consumed=ids[1:])
    first = await run.lease(1)

    # back to version 0: versions 1 and 2 never happened
    with pytest.raises(InvalidRequest, match="snapshot"):
        await run.publish(lineage_version=0, step_id="no-snapshot")
    run.head = 2
    await run.publish(lineage_version=0, snapshot=True)

    counts = await balanced(core)
    assert counts.dropped == {DropReason.LINEAGE_ABANDONED: 2}
    again = await run.lease(2)
    assert {work.id for work in again} == {0, 1}
    assert first[0].id == 2
    with pytest.raises(UnknownVersion):
        await core.plan_pull(have_version=-1, have_root="", want_version=1)
    plan = await core.plan_pull(have_version=2, have_root=run.roots[2], want_version=-1)
    assert (plan.kind, plan.target_version) == (PlanKind.SNAPSHOT, 3)


# One row a rule, however wide.
BAD = [
    ("size", {"rollouts": (rollout(0),)}, DropReason.INVALID),
    ("length", {"rollouts": (rollout(0), rollout(0, sampler_logprobs=np.zeros(2, np.float32)))}, DropReason.INVALID),
    ("vocabulary", {"rollouts": (rollout(0), rollout(0, token_ids=np.array([5, 6, 20], np.int32)))}, DropReason.INVALID),
    ("nan", {"rollouts": (rollout(0), rollout(0, sampler_logprobs=np.array([0, np.nan, 0], np.float32)))}, DropReason.INVALID),
    ("infinite", {"rollouts": (rollout(0), rollout(0, sampler_logprobs=np.array([0, -np.inf, 0], np.float32)))}, DropReason.INVALID),
    ("positive", {"rollouts": (rollout(0), rollout(0, sampler_logprobs=np.array([0, 0.1, 0], np.float32)))}, DropReason.INVALID),
    ("empty", {"rollouts": (rollout(0), rollout(0, token_ids=np.array([], np.int32), sampler_logprobs=np.array([], np.float32), spans=()))}, DropReason.INVALID),
    ("too long", {"rollouts": (rollout(0), rollout(0, token_ids=np.zeros(5, np.int32), sampler_logprobs=np.zeros(5, np.float32)))}, DropReason.INVALID),
    ("reward", {"rollouts": (rollout(0), rollout(0, reward=float("nan")))}, DropReason.INVALID),
    ("parts", {"rollouts": (rollout(0), rollout(0, reward_parts=(RewardPart(name="x" * 999, value=0.0),)))}, DropReason.INVALID),
    ("spans gap", {"rollouts": (rollout(0), rollout(0, spans=(Span(version=0, start=1, end=3),)))}, DropReason.INVALID),
    ("spans short", {"rollouts": (rollout(0), rollout(0, spans=(Span(version=0, start=0, end=2),)))}, DropReason.INVALID),
    ("spans oldest", {"oldest_version": 1}, DropReason.INVALID),
    ("prompt", {"prompt_token_ids": np.array([], np.int32)}, DropReason.INVALID),
    ("prompt vocabulary", {"prompt_token_ids": np.array([99], np.int32)}, DropReason.INVALID),
    ("duration", {"generation_s": float("inf")}, DropReason.INVALID),
    ("prompt index", {"prompt_index": 51}, DropReason.INVALID),
    ("assignment", {"assignment": 999}, DropReason.INVALID),
    ("future version", {"rollouts": (rollout(9), rollout(9)), "oldest_version": 9}, DropReason.UNKNOWN_VERSION),
    ("newer span", {"rollouts": (rollout(0), rollout(0, spans=(Span(version=0, start=0, end=1), Span(version=9, start=1, end=3))))}, DropReason.UNKNOWN_VERSION),
    ("digest", {"state_root": Digest("f" * 64)}, DropReason.WRONG_DIGEST),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "reason"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_bad_group_is_dropped_with_its_reason_and_its_prompt_is_handed_out_again(core, run, changes, reason):
    (work,) = await run.lease(1)
    (outcome,) = await core.push_groups([run.group(work, **changes)])

    assert (outcome.status, outcome.reason) == (PushStatus.DROPPED, reason)
    assert outcome.message
    counts = await balanced(core)
    assert counts.dropped == {reason: 1}
    if changes.get("assignment") is None:
        # Behind a version's worth of new ones where the next group may be refused too.
        assert work in [*await run.lease(3), *await run.lease(1)]


async def test_push_takes_effect_once_and_keeps_the_first_content(core, run):
    (work,) = await run.lease(1)
    group = run.group(work)
    first = await core.push_groups([group])
    again = await core.push_groups([group, dataclasses.replace(group, generation_s=9.0)])

    assert first[0].status is PushStatus.ACCEPTED
    assert [o.status for o in again] == [PushStatus.DUPLICATE, PushStatus.DROPPED]
    assert again[1].reason is DropReason.CONFLICT
    assert (await balanced(core)).acked == 1


async def test_late_answer_of_an_expired_lease_counts_and_the_second_is_surplus(core, run, clock):
    # T11, T15: a lost or slow group is handed out again; whoever answers first is taken.
    (work,) = await run.lease(1)
    clock.advance(200)
    await core.register(run.registration(incarnation="inc-2"))
    grant = await core.lease_work(site=SITE, incarnation="inc-2", max_groups=1, policy_version=0)
    assert grant.assignments[0].id == work.id
    assert grant.assignments[0].seed == work.seed

    late = await core.push_groups([run.group(work)])
    second = run.group(work, id=GroupId(site=SITE, incarnation="inc-2", sequence=1))
    surplus = await core.push_groups([second])

    assert late[0].status is PushStatus.ACCEPTED
    assert surplus[0].reason is DropReason.SURPLUS
    await balanced(core)


async def test_another_sites_assignment_is_not_taken(core, run):
    (work,) = await run.lease(1)
    await core.register(run.registration(site=SiteId("us-1")))

    (outcome,) = await core.push_groups(
        [run.group(work, id=GroupId(site=SiteId("us-1"), incarnation=INCARNATION, sequence=1))]
    )

    assert outcome.reason is DropReason.INVALID
    assert "not given" in outcome.message


async def test_stale_groups_are_dropped_at_ingest_and_at_lease(core, run, clock):
    work = await run.lease(3)
    late = run.group(work[0])
    await core.push_groups([run.group(work[1])])
    for _ in range(4):
        await run.publish()
    (outcome,) = await core.push_groups([late])
    assert outcome.reason is DropReason.STALE_AT_INGEST
    await core.push_groups([run.group(work[2], version=4)])
    (queued,) = await leased(core, run, 1)
    assert queued.group.oldest_version == 4
    counts = await balanced(core)
    assert counts.dropped == {DropReason.STALE_AT_INGEST: 1, DropReason.STALE_AT_LEASE: 1}


async def test_old_policies_in_seconds_are_dropped_too(core, run, clock):
    work = await run.lease(2)
    await core.push_groups([run.group(work[0])])
    await run.publish()
    clock.advance(501)
    (outcome,) = await core.push_groups([run.group(work[1], version=0)])

    assert outcome.reason is DropReason.STALE_AT_INGEST
    assert "a newer version came 501 s ago; max_superseded_s is 500" in outcome.message
    await run.publish()
    await run.push(1)
    (queued,) = await leased(core, run, 1)
    assert queued.policy_age_s < 1
    assert (await balanced(core)).dropped[DropReason.STALE_AT_LEASE] == 1


async def test_pacing_bounds_what_is_outstanding_and_says_why(core, run):
    # 4 versions' worth of 2 groups
    first = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=100, policy_version=0)
    second = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=1, policy_version=0)

    assert len(first.assignments) == 8
    assert second.assignments == ()
    assert "8 of 8 groups are outstanding" in second.reason
    assert second.retry_after_s > 0
    unknown = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=1, policy_version=5)
    assert "not one of this run's" in unknown.reason
    for _ in range(4):
        await run.publish()
    old = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=1, policy_version=0)
    assert "pull version 1" in old.reason
    with pytest.raises(InvalidRequest, match="max_groups"):
        await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=0, policy_version=0)


async def test_site_quota_and_sequence_gaps_ask_for_patience(core, run, tmp_path, clock):
    # T12: a full queue pushes back, it drops nothing.
    (work,) = await run.lease(1)
    far = run.group(work, id=GroupId(site=SITE, incarnation=INCARNATION, sequence=200_000))
    (outcome,) = await core.push_groups([far])
    assert (outcome.status, outcome.retry_after_s) == (PushStatus.RETRY, 1.0)
    core.context.queue.quotas._pending_limit = 10
    (outcome,) = await core.push_groups([run.group(work)])
    assert outcome.status is PushStatus.RETRY
    assert "site_pending_bytes" in outcome.message
    assert (await balanced(core)).acked == 0


async def test_out_of_order_sequences_are_remembered_beyond_the_watermark(core, run):
    work = await run.lease(3)
    groups = [run.group(w) for w in work]
    for group in (groups[2], groups[0]):
        await core.push_groups([group])
    answer = await core.register(run.registration())
    assert answer.next_sequence == 4
    again = await core.push_groups(groups)

    assert [o.status for o in again] == [PushStatus.DUPLICATE, PushStatus.ACCEPTED, PushStatus.DUPLICATE]
    rows = await core.database.run(lambda c: c.execute("SELECT count(*) FROM beyond_watermark").fetchone()[0])
    assert rows == 0


async def test_unregistered_sites_are_told_to_register(core, run):
    with pytest.raises(NotRegistered):
        await core.lease_work(site=SITE, incarnation="unknown", max_groups=1, policy_version=0)
    beat = Heartbeat(site=SITE, incarnation="unknown", policy_version=0, state_root="", tokens_per_s=0)
    assert await core.heartbeat(beat) == (Command.REGISTER,)
    assert await core.heartbeat(dataclasses.replace(beat, incarnation=INCARNATION)) == ()


async def test_drain_stops_work_takes_groups_and_ends_with_a_new_learner(core, run):
    (work,) = await run.lease(1)
    await core.drain(reason="maintenance")

    # A drained run has ended: there is nothing to reconnect for.
    with pytest.raises(Draining, match=r"maintenance \(deliver what is held, then end; only a learner"):
        await run.lease(1)
    beat = Heartbeat(site=SITE, incarnation=INCARNATION, policy_version=0, state_root="", tokens_per_s=0)
    assert await core.heartbeat(beat) == (Command.DRAIN,)
    (outcome,) = await core.push_groups([run.group(work)])
    assert outcome.status is PushStatus.ACCEPTED
    assert (await core.get_status()).is_draining
    await core.acquire_lease(holder="learner", contract=CONTRACT, request_id="new")
    assert len(await run.lease(1)) == 1


async def test_abandoned_work_and_groups_are_accounted(core, run):
    (work,) = await run.lease(1)
    await core.abandon_work(site=SITE, incarnation=INCARNATION, assignments=[work.id])
    assert (await run.lease(1))[0] == work
    (group_id,) = [outcome.id for outcome in await core.push_groups([run.group(work)])]
    await leased(core, run, 1)
    await core.abandon_groups(epoch=run.epoch, ids=[group_id], reason="too long")

    assert (await balanced(core)).dropped == {DropReason.LEARNER_ABANDONED: 1}


async def test_group_of_equal_rewards_is_counted_without_blame_and_its_prompt_does_not_come_back(core, run):
    first, second = await run.push(2)
    await leased(core, run, 2)
    await core.abandon_groups(epoch=run.epoch, ids=[first], reason="equal", counted_as=DropReason.UNIFORM)
    with pytest.raises(InvalidRequest, match="counted_as: reward_mismatch"):
        await core.abandon_groups(epoch=run.epoch, ids=[second], reason="", counted_as=DropReason.REWARD_MISMATCH)

    ledger = await balanced(core)
    assert (ledger.dropped, ledger.leased) == ({DropReason.UNIFORM: 1}, 1)
    assert (await core.get_status()).sites[0].groups_failed == 0
    assert [work.id for work in await run.lease(2)] == [2, 3]


async def test_stream_returns_what_is_not_held_and_keeps_what_is(core, run):
    ids = await run.push(3)
    await leased(core, run, 3)
    again = await leased(core, run, 2, held=ids[:1])

    assert [queued.group.id for queued in again] == ids[1:]
    assert (await balanced(core)).leased == 3


async def test_stream_ends_with_its_credits_and_with_the_coordinator(core, run):
    ids = await run.push(1)
    received = [queued async for queued in core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(5))]
    assert len(received) == 1

    waiting = asyncio.create_task(anext(core.stream_groups(epoch=run.epoch, held=ids, credits=_for_ever())))
    watch = asyncio.create_task(anext(core.watch_head(after_version=99)))
    # Each answer of the store lets them make one step; both wait after a few.
    for _ in range(10):
        await core.get_status()
    assert not waiting.done()
    assert not watch.done()
    await core.end_streams()
    for task in (waiting, watch):
        with pytest.raises(Draining):
            await task


async def test_corrupt_group_is_quarantined_and_counted(core, run):
    await run.push(2)
    await core.database.run(lambda c: c.execute("UPDATE groups SET payload = ? WHERE sequence = 1", (b"\0",)))

    (queued,) = await leased(core, run, 1)

    assert queued.group.id.sequence == 2
    assert (await balanced(core)).dropped == {DropReason.INVALID: 1}


async def test_watch_skips_to_the_newest_head(core, run):
    await run.publish()
    await run.publish()
    watch = core.watch_head(after_version=0)

    assert (await anext(watch)).version == 2
    later = asyncio.create_task(anext(watch))
    await run.publish()
    assert (await later).version == 3


async def test_publication_is_read_once_for_all_who_watch(core, run, clock, monkeypatch):
    await run.publish()
    watches = [core.watch_head(after_version=0) for _ in range(50)]
    assert {(await anext(watch)).version for watch in watches} == {1}
    later = [asyncio.create_task(anext(watch)) for watch in watches]
    for _ in range(10):
        await core.get_status()
    reads = []
    read_head = lineage.read_head
    monkeypatch.setattr(lineage, "read_head", lambda connection: (reads.append(1), read_head(connection))[1])

    await run.publish()
    await run.publish()
    for _ in range(10):
        await core.database.run(lambda _: None)
        clock.advance(1)

    # One may have read between the two.
    assert {update.version for update in await asyncio.gather(*later)} <= {2, 3}
    assert len(reads) < 5


async def test_uploads_resume_verify_and_respect_limits(core, run, tmp_path):
    data = np.random.default_rng(0).bytes(3000)
    digest = bytes_digest(data)
    assert await core.query_upload(digest=digest) == 0
    await core.upload_payload(epoch=run.epoch, digest=digest, num_bytes=3000, offset=0, frames=frames(data[:1000]))
    assert await core.query_upload(digest=digest) == 1000
    with pytest.raises(InvalidRequest, match="offset"):
        await core.upload_payload(epoch=run.epoch, digest=digest, num_bytes=3000, offset=2000, frames=frames(data))
    assert await run.upload(data, digest, offset=1000) == 3000
    assert await run.upload(data, digest) == 3000
    assert b"".join([frame async for frame in core.read_payload(digest=digest, offset=100)]) == data[100:]
    with pytest.raises(InvalidRequest):
        await anext(core.read_payload(digest=digest, offset=4000))
    with pytest.raises(UnknownPayload):
        await anext(core.read_payload(digest=Digest("0" * 64), offset=0))
    with pytest.raises(DigestMismatch):
        await run.upload(data, Digest("1" * 64))
    assert await core.query_upload(digest=Digest("1" * 64)) == 0
    with pytest.raises(InvalidRequest, match="exceed"):
        await core.upload_payload(epoch=run.epoch, digest=Digest("2" * 64), num_bytes=10, offset=0, frames=frames(data))
    with pytest.raises(QuotaExceeded):
        await core.upload_payload(
            epoch=run.epoch, digest=Digest("2" * 64), num_bytes=1 << 40, offset=0, frames=frames(b"")
        )
    core.blobs._space_bytes = 3000
    with pytest.raises(StoreFull):
        await core.upload_payload(
            epoch=run.epoch, digest=Digest("2" * 64), num_bytes=9000, offset=0, frames=frames(data)
        )


async def test_plan_trusts_no_claim_about_what_the_caller_holds(core, run):
    await run.publish()
    same = await core.plan_pull(have_version=1, have_root=run.roots[1], want_version=-1)
    delta = await core.plan_pull(have_version=0, have_root=run.roots[0], want_version=1)
    liar = await core.plan_pull(have_version=0, have_root="0" * 64, want_version=1)

    assert [p.kind for p in (same, delta, liar)] == [PlanKind.SAME, PlanKind.DELTA, PlanKind.SNAPSHOT]
    with pytest.raises(UnknownVersion):
        await core.get_signed_manifest(version=9)
    for limit in (0, 1001):
        with pytest.raises(InvalidRequest, match=r"limit: .* is not in 1\.\.1000"):
            await core.list_steps(after_step=0, limit=limit)
    assert [report.step for report in await core.list_steps(after_step=0, limit=1000)] == [1]


async def test_steps_of_many_sites_are_listed_in_pages_that_fit_a_message(tmp_path, clock):
    """32 sites of long names are 2.9 KB a step, and a page is 1000 steps."""
    core = await Coordinator.open(config_of(tmp_path, max_message_bytes=2 << 20), clock)
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    numbers = CompletionNumbers(
        length_mean=3.0, length_p95=4.0, length_max=5, truncated_fraction=0.0, uniform_fraction=0.0,
        sites=tuple(SiteTokens(site=f"{n:02}" * 32, num_groups=4, num_tokens=9999) for n in range(32)),
    )  # fmt: skip
    reports = [dataclasses.replace(REPORT, step=step, completions=numbers) for step in range(1, 1001)]
    await core.publish_version(dataclasses.replace(await run.prepare(), reports=tuple(reports)))
    servicer = RunServicer(core.run)

    found, cursor = [], 0
    while page := (
        await servicer.ListSteps(run_pb2.ListStepsRequest(after_step=cursor, limit=1000), context=None)
    ).reports:
        assert sum(report.ByteSize() for report in page) < 2 << 20
        found += page
        cursor = page[-1].step

    assert [report.step for report in found] == list(range(1, 1001))
    await core.close()


async def test_a_status_of_many_sites_with_long_problems_fits_a_message(tmp_path, clock):
    core = await Coordinator.open(config_of(tmp_path, max_message_bytes=2 << 20), clock)
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    for number in range(200):
        site = SiteId(f"site-{number}")
        await core.register(run.registration(site=site))
        await core.heartbeat(
            Heartbeat(
                site=site, incarnation=INCARNATION, policy_version=0, state_root=run.roots[0], tokens_per_s=1.0,
                problem=f"site {number} " + 4000 * chr(0x1F525),
            )
        )  # fmt: skip

    status = await RunServicer(core.run).GetStatus(run_pb2.GetStatusRequest(), context=None)
    assert status.ByteSize() < 2 << 20
    assert {site.problem.split()[1] for site in status.sites} == {str(number) for number in range(200)}
    await core.close()


async def test_a_page_of_steps_ends_with_a_whole_step(core, run):
    await run.publish()
    # Step 3 had an effect only the second time.
    for step in (2, 3, 3):
        report = dataclasses.replace(REPORT, step=step)
        run.head = await core.publish_version(dataclasses.replace(await run.prepare(), reports=(report,)))

    pages = [await core.list_steps(after_step=0, limit=limit) for limit in (4, 3, 2)]
    assert [[report.step for report in page] for page in pages] == [[1, 2, 3, 3], [1, 2], [1, 2]]
    assert [report.step for report in await core.list_steps(after_step=2, limit=1)] == [3]


async def test_restart_keeps_everything_and_gives_leases_a_fresh_term(tmp_path, clock):
    first = await Coordinator.open(config_of(tmp_path), clock)
    run = Run(first, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    await run.push(1)
    (work,) = await run.lease(1)
    await first.close()

    class Slow(Database):
        async def run(self, operation):
            clock.advance(11)
            return await super().run(operation)

    clock.advance(119)
    second = await Coordinator.open(config_of(tmp_path), clock, store=Slow)
    try:
        with pytest.raises(LeaseHeld):
            await second.acquire_lease(holder="other", contract=CONTRACT, request_id="r2")
        run.api = second
        assert (await second.get_status()).head_version == 0
        (outcome,) = await second.push_groups([run.group(work)])
        assert outcome.status is PushStatus.ACCEPTED
        assert (await balanced(second)).pending == 2
    finally:
        await second.close()


async def test_data_directory_of_another_run_or_seed_is_refused(tmp_path, clock):
    core = await Coordinator.open(config_of(tmp_path), clock)
    await core.close()

    with pytest.raises(ContractMismatch, match="belongs to run"):
        await Coordinator.open(config_of(tmp_path, run_id="other"), clock)
    with pytest.raises(ContractMismatch, match="seed"):
        await Coordinator.open(config_of(tmp_path, seed=5), clock)


@pytest.mark.sqlite
@pytest.mark.slow
async def test_damaged_foreign_or_busy_store_is_refused_with_advice(tmp_path, clock):
    path = tmp_path / "data" / "coordinator.sqlite"
    core = await Coordinator.open(config_of(tmp_path), clock)
    with pytest.raises(CorruptStore, match="in use"):
        await Coordinator.open(config_of(tmp_path), clock)
    await core.close()
    good = path.read_bytes()
    path.write_bytes(good[:100] + b"\xff" * 300 + good[400:])
    with pytest.raises(CorruptStore):
        await Coordinator.open(config_of(tmp_path), clock)
    path.write_bytes(b"not a database, but long enough to be read as one" * 40)
    with pytest.raises(CorruptStore):
        await Coordinator.open(config_of(tmp_path), clock)
    import sqlite3

    path.unlink()
    for number in (7, 99):
        with sqlite3.connect(path) as connection:
            connection.execute(f"PRAGMA user_version={number}")
        connection.close()
        with pytest.raises(CorruptStore, match=f"schema {number}.*export the model"):
            await Coordinator.open(config_of(tmp_path), clock)


@pytest.mark.sqlite
async def test_failed_store_refuses_everything_and_says_so(core, run):
    def broken(connection):
        connection.execute("SELECT * FROM no_such_table")

    with pytest.raises(CorruptStore):
        await core.database.run(broken)
    assert core.on_fatal.done()
    with pytest.raises(CorruptStore, match="restarted"):
        await core.get_status()


async def test_failing_operation_undoes_itself_and_not_its_neighbours(core, run):
    def good(connection):
        connection.execute("INSERT INTO meta VALUES ('good', '1')")

    def bad(connection):
        connection.execute("INSERT INTO meta VALUES ('bad', '1')")
        raise InvalidRequest("no")

    results = await asyncio.gather(
        core.database.run(good), core.database.run(bad), core.database.run(lambda c: None), return_exceptions=True
    )

    keys = await core.database.run(lambda c: {row[0] for row in c.execute("SELECT key FROM meta")})
    assert isinstance(results[1], InvalidRequest)
    assert "good" in keys
    assert "bad" not in keys
    assert LAYOUT.num_elements == 40


@pytest.mark.files
async def test_upload_cut_between_its_last_byte_and_its_name_is_published(core, run, tmp_path):
    # T6: complete means that all bytes are durable and right, whatever was interrupted on the way there.
    request = await run.prepare()
    (payload,) = manifest_from_bytes(request.manifest).payloads
    named = tmp_path / "data" / "blobs" / payload.digest[:2] / payload.digest
    partial = tmp_path / "data" / "partial" / payload.digest
    good = named.read_bytes()
    named.unlink()
    partial.write_bytes(bytes(len(good)))
    with pytest.raises(DigestMismatch):
        await core.publish_version(request)
    assert await core.query_upload(digest=payload.digest) == 0
    partial.write_bytes(good[:-1])
    with pytest.raises(PayloadMissing):
        await core.publish_version(request)
    partial.write_bytes(good)

    assert await core.publish_version(request) == 1
    assert named.read_bytes() == good


async def test_what_a_start_changed_is_kept_and_audited(run, core, caplog):
    first, second = {"learning rate": "0.0003", "task": "t"}, {"learning rate": "0.001", "task": "t"}
    await run.publish()
    for facts in (first, first):
        await core.describe_run(epoch=run.epoch, facts=facts)
    assert dict((await core.get_status()).facts) == first
    await run.publish(consumed=[])
    for facts in (second, second, {"learning rate": "0.002", "task": "t"}):
        await core.describe_run(epoch=run.epoch, facts=facts)

    (step,) = changed_steps((await core.get_status()).facts)
    words = (await core.get_status()).facts[f"changed after step {step}"]
    assert words == "learning rate 0.0003 -> 0.001, then learning rate 0.001 -> 0.002"
    rows = [row for row in await core.database.run(audit.read) if row.kind == "configuration"]
    assert [row.detail for row in rows] == [
        f"after step {step}: learning rate 0.0003 -> 0.001", f"after step {step}: learning rate 0.001 -> 0.002",
    ]  # fmt: skip
    assert "began with another configuration: learning rate 0.0003 -> 0.001" in caplog.text
