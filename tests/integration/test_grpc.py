"""The coordinator behind a real server, asked by the real client: both implementations of the Protocol agree."""

import asyncio
import contextlib
import dataclasses
import random

import blake3
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heterorl.common import errors
from heterorl.common.errors import ConfigError
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.error_status import from_rpc_error
from heterorl.common.rpc.transport_options import BandwidthConfig
from heterorl.common.types.common import Digest, LearnerPhase, LearnerProgress
from heterorl.common.types.policy import PayloadKind, PayloadRef, PlanKind
from heterorl.common.types.rollout import DropReason, PushStatus, Rejection, ReturnReason
from heterorl.common.types.run import Command, Heartbeat
from heterorl.common.wire.policy_messages import frame_checksum
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups.schedule import seed_of
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.policy_servicer import PolicyServicer
from heterorl.coordinator.servicers.rollout_servicer import RolloutServicer
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.learner.publish.version_payloads import MAX_MISMATCHES, upload
from heterorl.v1 import policy_pb2, policy_pb2_grpc, rollout_pb2, rollout_pb2_grpc, run_pb2_grpc
from tests.support.groups import group_to_pb, push_of
from tests.support.links import PLAINTEXT
from tests.support.ports import free_port
from tests.support.run import CONTRACT, INCARNATION, SITE, Run, rollout

QUICK = RetryPolicy(budget_s=0.5, base_s=0.01, cap_s=0.05)


class Served:
    """A coordinator on a port of loopback, and a client of it."""

    def __init__(self, directory):
        self.config = CoordinatorConfig(data_dir=directory / "data", groups_per_version=2, max_message_bytes=2 << 20)

    async def __aenter__(self):
        self.core = await Coordinator.open(self.config, SystemClock())
        self.server = Server(self.config.model_copy(update={"max_concurrent_rpcs": 64, "tls": PLAINTEXT}))
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(
            PolicyServicer(self.core.policy, self.core.lease), self.server.grpc
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(self.core.rollout), self.server.grpc)
        run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(self.core.run), self.server.grpc)
        self.port = await self.server.start("127.0.0.1:0")
        self.client = CoordinatorClient(f"127.0.0.1:{self.port}", tls=PLAINTEXT, policy=QUICK)
        return self

    async def __aexit__(self, *exception):
        await self.client.close()
        await self.core.end_streams()
        await self.server.stop(0.2)
        await self.core.close()


@pytest.fixture
async def served(tmp_path):
    async with Served(tmp_path) as served:
        yield served


@pytest.fixture
async def run(served, tmp_path):
    run = Run(served.client, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    return run


async def stream(client, run, count, *, held=()):
    async def credits():
        yield count
        await asyncio.Event().wait()

    groups = []
    groups_stream = client.stream_groups(epoch=run.epoch, held=held, credits=credits())
    async for queued in groups_stream:
        groups.append(queued)
        if len(groups) == count:
            break
    await groups_stream.aclose()
    return groups


async def test_manifests_of_many_versions_fit_the_smallest_message(served, run):
    for _ in range(5):
        await run.publish()
    # As large as of a model of 130e9 elements.
    await served.core.database.run(lambda c: c.execute("UPDATE versions SET manifest = zeroblob(600000)"))

    listed = await served.client.list_manifests(first_version=0, last_version=5)

    assert [len(each) for each in listed] == [600_000] * 3


async def test_whole_life_of_a_group_over_the_wire(served, run):
    client = served.client
    ids = await run.push(4)
    received = await stream(client, run, 2)
    await run.publish(consumed=ids[:2])
    await client.abandon_groups(epoch=run.epoch, ids=ids[2:3], reason="test")
    await client.abandon_groups(epoch=run.epoch, ids=ids[3:], reason="equal", counted_as=DropReason.UNIFORM)
    (work,) = await run.lease(1)
    await client.abandon_work(site=SITE, incarnation=INCARNATION, assignments=[work.id])
    unscored = await run.lease(2)
    assert unscored[0] == work
    await client.abandon_work(
        site=SITE,
        incarnation=INCARNATION,
        assignments=[each.id for each in unscored],
        reason=ReturnReason.REWARD_FAILED,
    )
    assert not {each.id for each in unscored} & {each.id for each in await run.lease(2)}

    assert [queued.group.id for queued in received] == ids[:2]
    assert received[0].group.rollouts[0].sampler_logprobs.dtype == np.float32
    status = await client.get_status()
    assert (status.ledger.consumed, status.ledger.dropped) == (
        2, {DropReason.LEARNER_ABANDONED: 1, DropReason.UNIFORM: 1}
    )  # fmt: skip
    assert status.ledger.is_balanced
    assert (await client.renew_lease(epoch=run.epoch)).head_version == 1
    assert [report.step for report in await client.list_steps(after_step=0, limit=5)] == [1]
    assert await client.get_step(step_id=f"step-{run.epoch}-1") == 1
    assert await client.get_step(step_id="x") is None
    beat = Heartbeat(site=SITE, incarnation=INCARNATION, policy_version=1, state_root="", tokens_per_s=1)
    assert await client.heartbeat(beat) == ()
    assert not (await client.get_status()).sites[0].is_stopped
    await client.heartbeat(dataclasses.replace(beat, is_stopped=True))
    assert (await client.get_status()).sites[0].is_stopped
    assert (await client.renew_lease(epoch=run.epoch)).rollback_to == -1
    assert await client.rollback(to_version=0, request_id="back") == 1
    assert (await client.renew_lease(epoch=run.epoch)).rollback_to == 0
    progress = LearnerProgress(step=2, phase=LearnerPhase.EXAMINING, phase_s=1.5)
    await client.renew_lease(epoch=run.epoch, progress=progress)
    assert (await client.get_status()).progress == progress
    with pytest.raises(errors.UnknownVersion):
        await client.rollback(to_version=7, request_id="too far")
    await client.drain(reason="done")
    assert await client.heartbeat(beat) == (Command.DRAIN,)
    await client.release_lease(epoch=run.epoch)


async def test_rejected_groups_and_their_site_over_the_wire(served, run):
    client = served.client
    ids = await run.push(3)
    received = await stream(client, run, 3)
    assert [queued.seed for queued in received] == [seed_of(work, seed=0) for work in range(3)]
    rejections = [Rejection(id=group_id, reason=DropReason.LOGPROB_MISMATCH, detail="0.3 nats") for group_id in ids]
    await client.reject_groups(epoch=run.epoch, rejections=rejections[:2])
    assert (await client.get_status()).sites[0].groups_failed == 2
    await client.reject_groups(epoch=run.epoch, rejections=rejections)

    status = await client.get_status()
    assert status.ledger.dropped == {DropReason.LOGPROB_MISMATCH: 3}
    assert "the last one: logprob_mismatch, 0.3 nats" in status.sites[0].quarantine
    with pytest.raises(errors.Quarantined, match="heterorl sites release"):
        await run.lease()
    assert await client.release_site(site=SITE, reason="sorry") == status.sites[0].quarantine
    assert len(await run.lease()) == 1
    with pytest.raises(errors.InvalidRequest, match="reason"):
        await client.release_site(site=SITE, reason="")


async def test_groups_are_given_up_for_reasons_of_any_length_in_any_characters(served, run):
    """What a learner says of a group may hold a completion, and a refusal would end it again after every start."""
    client = served.client
    first, second = await run.push(2)
    await stream(client, run, 2)
    reason = "not an answer: \x00\n\ud800" + "so 7 " * 200_000

    await client.abandon_groups(epoch=run.epoch, ids=[first], reason=reason)
    rejection = Rejection(id=second, reason=DropReason.REWARD_MISMATCH, detail=reason)
    await client.reject_groups(epoch=run.epoch, rejections=[rejection])

    dropped = (await client.get_status()).ledger.dropped
    assert (dropped[DropReason.LEARNER_ABANDONED], dropped[DropReason.REWARD_MISMATCH]) == (1, 1)


async def test_payloads_and_heads_stream_over_the_wire(served, run):
    client = served.client
    await run.publish()
    plan = await client.plan_pull(have_version=0, have_root=run.roots[0], want_version=-1)
    data = b"".join([frame async for frame in client.read_payload(digest=plan.payloads[0].digest, offset=0)])

    assert plan.kind is PlanKind.DELTA
    assert len(data) == plan.payloads[0].num_bytes
    assert await client.query_upload(digest=plan.payloads[0].digest) == len(data)
    watch = client.watch_head(after_version=-1)
    assert (await anext(watch)).version == 1
    await watch.aclose()


async def test_ranges_of_a_payload_stream_over_the_wire(served, run, tmp_path):
    plan = await served.client.plan_pull(have_version=-1, have_root="", want_version=-1)
    payload = plan.payloads[0]
    whole = b"".join([frame async for frame in served.client.read_payload(digest=payload.digest, offset=0)])
    part = b"".join([frame async for frame in served.client.read_payload(digest=payload.digest, offset=3, stop=20)])

    assert part == whole[3:20]
    with pytest.raises(errors.InvalidRequest, match="not within"):
        await anext(served.client.read_payload(digest=payload.digest, offset=0, stop=len(whole) + 1))


async def test_damaged_frames_are_told_at_once_in_both_directions(served, run, monkeypatch):
    plan = await served.client.plan_pull(have_version=-1, have_root="", want_version=-1)
    data = b"some bytes of a payload"
    digest = Digest(blake3.blake3(data).hexdigest())

    async def frames():
        yield data

    alternating = _Alternating()
    for module in ("common.rpc.client", "coordinator.servicers.policy_servicer"):
        monkeypatch.setattr(f"heterorl.{module}.frame_checksum", alternating)
    with pytest.raises(errors.Unreachable, match="damaged"):
        await anext(served.client.read_payload(digest=plan.payloads[0].digest, offset=0))
    with pytest.raises(errors.Busy, match="damaged"):
        await served.client.upload_payload(
            epoch=run.epoch, digest=digest, num_bytes=len(data), offset=0, frames=frames()
        )
    assert await served.client.query_upload(digest=digest) == 0


async def test_link_that_damages_frames_again_and_again_is_waited_for(served, run, monkeypatch, tmp_path):
    """It is no proof that the file is wrong, of which a few are enough to give it up."""
    data = b"some bytes of a payload"
    (tmp_path / "file").write_bytes(data)
    payload = PayloadRef(
        kind=PayloadKind.SNAPSHOT,
        from_version=-1,
        to_version=1,
        digest=Digest(blake3.blake3(data).hexdigest()),
        num_bytes=len(data),
    )
    damaged = iter(range(MAX_MISMATCHES + 2))
    monkeypatch.setattr(
        "heterorl.common.rpc.client.frame_checksum", lambda frame: frame_checksum(frame) ^ (next(damaged, -1) >= 0)
    )
    backoff = Backoff(clock=_SleepingClock(), rng=random.Random(0), asked_cap_s=1e-3, base_s=1e-4, cap_s=1e-3)

    await upload(served.client, payload, tmp_path / "file", epoch=run.epoch, backoff=backoff)

    assert next(damaged, None) is None
    assert await served.client.query_upload(digest=payload.digest) == len(data)


class _Alternating:
    """A checksum that sender and receiver never agree on."""

    def __init__(self):
        self._number = 0

    def __call__(self, frame):
        self._number += 1
        return self._number


async def test_caps_slow_payloads_down(served, run):
    cap = 2_000_000.0
    payload = (await served.client.plan_pull(have_version=-1, have_root="", want_version=-1)).payloads[0]
    clock = _SleepingClock()
    bandwidth = BandwidthConfig(down_bytes_per_s=cap)
    async with CoordinatorClient(
        f"127.0.0.1:{served.port}", tls=PLAINTEXT, policy=QUICK, bandwidth=bandwidth, clock=clock
    ) as slow:
        num_bytes = sum([len(frame) async for frame in slow.read_payload(digest=payload.digest, offset=0)])

    assert num_bytes == payload.num_bytes
    assert sum(clock.slept) == pytest.approx(num_bytes / cap)


class _SleepingClock(SystemClock):
    """Stands still, and notes how long it is asked to sleep."""

    def __init__(self):
        self.slept = []

    def monotonic(self):
        return 0.0

    async def sleep(self, seconds):
        self.slept.append(seconds)


async def test_manifests_of_a_way_come_in_one_call_newest_first(served, run):
    await run.publish()
    await run.publish()

    found = await served.client.list_manifests(first_version=1, last_version=2)
    assert found == (
        (await served.client.get_signed_manifest(version=2)).data,
        (await served.client.get_signed_manifest(version=1)).data,
    )


async def test_typed_refusals_arrive_typed(served, run):
    client = served.client
    with pytest.raises(errors.LeaseHeld) as held:
        await client.acquire_lease(holder="other", contract=CONTRACT, request_id="x")
    assert held.value.retry_after_s > 0
    with pytest.raises(errors.StaleEpoch):
        await client.renew_lease(epoch=99)
    with pytest.raises(errors.StaleEpoch):
        await stream(client, dataclasses.make_dataclass("Old", [("epoch", int)])(99), 1)
    with pytest.raises(errors.UnknownVersion):
        await client.get_signed_manifest(version=99)
    with pytest.raises(errors.UnknownVersion):
        await client.list_manifests(first_version=0, last_version=99)
    with pytest.raises(errors.InvalidRequest, match="not a range"):
        await client.list_manifests(first_version=1, last_version=0)
    with pytest.raises(errors.InvalidRequest, match="digest"):
        await client.query_upload(digest="../../etc/passwd")
    with pytest.raises(errors.UnknownPayload):
        await anext(client.read_payload(digest="0" * 64, offset=0))
    with pytest.raises(errors.ContractMismatch, match="vocab_size.*set model_dir to the run.s model"):
        await client.register(run.registration(contract=dataclasses.replace(CONTRACT, vocab_size=21)))
    with pytest.raises(errors.DigestMismatch):
        await run.upload(b"content", "1" * 64)
    with pytest.raises(errors.ParentNotHead):
        await run.publish(parent_version=7)


async def test_one_bad_group_in_a_stream_disturbs_no_other(served, run):
    work = await run.lease(3)
    groups = [run.group(one) for one in work]
    groups[1] = dataclasses.replace(groups[1], rollouts=(rollout(0),))

    outcomes = await served.client.push_groups(groups)

    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED, PushStatus.DROPPED, PushStatus.ACCEPTED]
    assert "group size" in outcomes[1].message


async def test_messages_that_no_value_can_hold_are_refused_one_by_one(served, run):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        rollouts = rollout_pb2_grpc.RolloutServiceStub(channel)
        policy = policy_pb2_grpc.PolicyServiceStub(channel)
        nameless = push_of(rollout_pb2.Group(lengths=bytes(8)))
        with pytest.raises(grpc.aio.AioRpcError, match="is not registered"):
            _ = [answer async for answer in rollouts.PushGroups(iter_of(nameless))]
        group = rollout_pb2.Group(lengths=bytes(12), endings=b"\x63\x63")
        group.id.site, group.id.incarnation, group.id.sequence = SITE, INCARNATION, 1
        bad = push_of(group)
        answers = [answer async for answer in rollouts.PushGroups(iter_of(bad, bad))]
        statuses = [rollout_pb2.PUSH_STATUS_DROPPED, rollout_pb2.PUSH_STATUS_DUPLICATE]
        assert [answer.outcomes[0].status for answer in answers] == statuses
        assert "id_bytes" in answers[0].outcomes[0].message
        ledger = (await served.client.get_status()).ledger
        assert (ledger.acked, ledger.dropped, ledger.is_balanced) == (1, {DropReason.INVALID: 1}, True)
        headless = policy_pb2.UploadPayloadRequest(frame=b"x")
        with pytest.raises(grpc.aio.AioRpcError, match="header"):
            await policy.UploadPayload(iter_of(headless))
        header = policy_pb2.UploadPayloadRequest(
            header=policy_pb2.UploadHeader(epoch=run.epoch, digest="3" * 64, num_bytes=5)
        )
        with pytest.raises(grpc.aio.AioRpcError, match="frames carry"):
            await policy.UploadPayload(iter_of(header, header))
        with pytest.raises(grpc.aio.AioRpcError, match="state the epoch"):
            async for _ in rollouts.StreamGroups(iter_of()):
                pass
        with pytest.raises(grpc.aio.AioRpcError, match="not a manifest"):
            await policy.PublishVersion(policy_pb2.PublishVersionRequest(epoch=run.epoch, manifest=b"\xff"))


async def test_group_of_a_newer_program_is_recorded_like_any_other_that_is_invalid(served, run):
    """Its sampler is answered for good, so the ledger and the watermark know of it too."""
    work = await run.lease(3)
    groups = [group_to_pb(run.group(one)) for one in work]
    groups[1].endings = b"\x63" + groups[1].endings[1:]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        rollouts = rollout_pb2_grpc.RolloutServiceStub(channel)

        async def push(*chosen):
            requests = iter_of(*(push_of(group) for group in chosen))
            answers = [answer async for answer in rollouts.PushGroups(requests)]
            return [(one.id.sequence, one.status, one.reason) for answer in answers for one in answer.outcomes]

        accepted, dropped = rollout_pb2.PUSH_STATUS_ACCEPTED, rollout_pb2.PUSH_STATUS_DROPPED
        assert await push(*groups) == [
            (1, accepted, 0), (2, dropped, rollout_pb2.DROP_REASON_INVALID), (3, accepted, 0)
        ]  # fmt: skip
        assert await push(groups[1]) == [(2, rollout_pb2.PUSH_STATUS_DUPLICATE, 0)]
        groups[1].endings = b"\x62" + groups[1].endings[1:]
        assert await push(groups[1]) == [(2, dropped, rollout_pb2.DROP_REASON_CONFLICT)]

    status = await served.client.get_status()
    assert (status.ledger.acked, status.ledger.dropped) == (3, {DropReason.INVALID: 1})
    assert status.ledger.is_balanced
    assert (status.sites[0].groups_accepted, status.sites[0].groups_dropped) == (2, 1)
    assert (await served.client.register(run.registration())).next_sequence == 4
    watermark = "SELECT watermark FROM sites"
    assert await served.core.database.run(lambda c: c.execute(watermark).fetchone()) == (3,), "it leaves no hole"
    # Its prompt is handed out again, behind a version's worth of new ones.
    assert work[1] in [*await run.lease(2), *await run.lease(1)]


async def test_small_groups_share_a_message_and_a_commit(served, run, monkeypatch):
    taken = []
    honest = served.core.rollout.take_groups

    async def take_groups(arrived):
        taken.append(len(arrived))
        return await honest(arrived)

    monkeypatch.setattr(served.core.rollout, "take_groups", take_groups)
    await served.client.register(run.registration())
    groups = [run.group(work) for work in await run.lease(4)]
    groups[2] = dataclasses.replace(groups[2], generation_s=-1.0)

    outcomes = await served.client.push_groups(groups)

    assert taken == [4]
    assert [outcome.id for outcome in outcomes] == [group.id for group in groups]
    accepted, dropped = PushStatus.ACCEPTED, PushStatus.DROPPED
    assert [outcome.status for outcome in outcomes] == [accepted, accepted, dropped, accepted]
    again = await served.client.push_groups(groups)
    assert {outcome.status for outcome in again} == {PushStatus.DUPLICATE}
    assert (await served.client.get_status()).ledger.is_balanced


@pytest.mark.parametrize("lie", ["fewer", "none", "another id", "another order"])
async def test_answers_settle_only_the_groups_that_they_name_in_order(served, run, monkeypatch, lie):
    """What a link cut short is kept; from the first outcome on that is not its group's, nothing is believed."""
    groups = [run.group(work) for work in await run.lease(3)]
    honest = served.core.rollout.take_groups

    async def take_groups(arrived):
        outcomes = await honest(arrived)
        if lie in ("fewer", "none"):
            return outcomes[:-1] if lie == "fewer" else []
        wrong = {"another id": {3: 99}, "another order": {1: 2, 2: 1}}[lie]
        sequences = [wrong.get(one.id.sequence, one.id.sequence) for one in outcomes]
        return [
            dataclasses.replace(one, id=dataclasses.replace(one.id, sequence=sequence))
            for one, sequence in zip(outcomes, sequences, strict=True)
        ]

    monkeypatch.setattr(served.core.rollout, "take_groups", take_groups)
    if lie in ("none", "another order"):
        with pytest.raises(errors.Unreachable, match="no outcome for the first of 3 groups"):
            await served.client.push_groups(groups)
    else:
        with contextlib.suppress(errors.Unreachable):
            # The first ones alone: which are missing depends on what came to the server together.
            answered = [outcome.id for outcome in await served.client.push_groups(groups)]
            assert answered == [group.id for group in groups[: len(answered)]]
            assert len(answered) <= 2
    monkeypatch.undo()
    outcomes = await served.client.push_groups(groups)
    assert [outcome.id for outcome in outcomes] == [group.id for group in groups]
    assert {outcome.status for outcome in outcomes} == {PushStatus.DUPLICATE}


async def test_lost_answer_of_a_grant_costs_no_assignment(served, run, monkeypatch):
    """The client repeats the call under its id; a repetition gets what the lost answer gave."""
    honest, asked = served.core.lease_work, []

    async def lease_work(**wanted):
        asked.append(wanted["request_id"])
        grant = await honest(**wanted)
        if len(asked) == 1:
            raise errors.StoreFull("full, but it was done", retry_after_s=0.01)
        return grant

    monkeypatch.setattr(served.core.rollout, "lease_work", lease_work)
    assert [work.id for work in await run.lease(3)] == [0, 1, 2]
    assert len(asked) == 2
    assert asked[0] == asked[1] != ""


async def test_drain_of_an_earlier_epoch_drains_nothing(served, run):
    old, client = run.epoch, served.client
    await run.begin(request_id="the next one")
    with pytest.raises(errors.StaleEpoch):
        await client.drain(reason="its last step", epoch=old)
    with pytest.raises(errors.StaleEpoch):
        await client.drain(reason="stated, and none", epoch=0)
    assert not (await client.get_status()).is_draining
    await client.drain(reason="its last step", epoch=run.epoch)
    assert (await client.get_status()).is_draining


async def iter_of(*messages):
    for message in messages:
        yield message


def _huge(run, work):
    # The limit is 2 MiB; a million tokens are about 5 MB.
    ids = np.full(1_000_000, 5, np.int32)
    huge = rollout(0, token_ids=ids, sampler_logprobs=np.full(ids.size, -1, np.float32))
    return run.group(work, rollouts=(huge, huge))


async def test_oversized_message_is_refused_before_parsing_by_an_error_of_its_own(served, run):
    (work,) = await run.lease(1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        message = push_of(group_to_pb(_huge(run, work)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in rollout_pb2_grpc.RolloutServiceStub(channel).PushGroups(iter_of(message)):
                pass

    assert type(from_rpc_error(refused.value)) is errors.MessageTooLarge
    assert (await served.client.get_status()).ledger.acked == 0


async def test_group_that_no_message_has_room_for_is_refused_for_good_and_those_behind_it_pass(served, run, caplog):
    work = await run.lease(2)
    groups = [_huge(run, work[0]), run.group(work[1])]

    outcomes = await served.client.push_groups(groups)

    assert [outcome.status for outcome in outcomes] == [PushStatus.DROPPED, PushStatus.ACCEPTED]
    assert outcomes[0].reason is DropReason.INVALID
    assert "max_message_bytes is 2097152" in caplog.text
    ledger = (await served.client.get_status()).ledger
    assert (ledger.acked, ledger.dropped, ledger.is_balanced) == (2, {DropReason.INVALID: 1}, True)


async def test_client_sends_up_to_the_limit_that_the_coordinator_states(served, run):
    work = await run.lease(1)
    group = run.group(work[0], prompt_token_ids=np.full(200_000, 3, np.int32))
    own = 1 << 16
    async with CoordinatorClient(
        f"127.0.0.1:{served.port}", tls=PLAINTEXT, policy=QUICK, max_message_bytes=own
    ) as client:
        await client.register(run.registration())
        (outcome,) = await client.push_groups([group])

    assert outcome.status is PushStatus.ACCEPTED


async def test_answer_that_is_no_message_is_worth_asking_again():
    class Garbage(grpc.GenericRpcHandler):
        def service(self, details):
            async def one(request, context):
                return b"\xff\xff"

            async def many(request, context):
                yield b"\xff\xff"

            if details.method.endswith("WatchHead"):
                return grpc.unary_stream_rpc_method_handler(many)
            return grpc.unary_unary_rpc_method_handler(one)

    server = grpc.aio.server(handlers=[Garbage()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT, policy=QUICK) as client:
            with pytest.raises(errors.Unreachable, match="GetStatus: the coordinator's answer cannot be read"):
                await client.get_status()
            with pytest.raises(errors.Unreachable, match="WatchHead: the coordinator's answer cannot be read"):
                await anext(client.watch_head(after_version=0))
    finally:
        await server.stop(0)


async def test_client_gives_up_after_its_budget_and_names_the_call(tmp_path):
    async with CoordinatorClient(f"127.0.0.1:{free_port()}", tls=PLAINTEXT, policy=QUICK) as client:
        with pytest.raises(errors.Unreachable, match="GetStatus: no answer"):
            await client.get_status()
        with pytest.raises(errors.Unreachable, match="WatchHead"):
            await anext(client.watch_head(after_version=0))


async def test_client_rides_through_a_restart_of_the_coordinator(tmp_path):
    async with Served(tmp_path) as served:
        run = Run(served.client, tmp_path)
        await run.begin()
        port = served.port
    patient = CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT, policy=RetryPolicy(budget_s=20))
    asking = asyncio.create_task(patient.get_status())
    core = await Coordinator.open(served.config, SystemClock())
    server = Server(CoordinatorConfig(max_message_bytes=2 << 20, max_concurrent_rpcs=8, run_id="run", tls=PLAINTEXT))
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    await server.start(f"127.0.0.1:{port}")

    assert (await asking).epoch == run.epoch

    await patient.close()
    await server.stop(0)
    await core.close()


async def test_health_says_serving_and_a_taken_port_is_a_typed_error(served):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    config = CoordinatorConfig(max_message_bytes=2 << 20, max_concurrent_rpcs=8, run_id="run", tls=PLAINTEXT)
    with pytest.raises(ConfigError, match="listen: .* already in use"):
        await Server(config).start(f"127.0.0.1:{served.port}")
