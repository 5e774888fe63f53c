"""A relay between samplers and a coordinator, over real sockets: whose calls pass, what crosses the line, what is kept."""

import asyncio
import os

import grpc.aio
import pytest

from heterorl.common.errors import (
    CorruptData,
    HeterorlError,
    NotRegistered,
    PermissionDenied,
    Unauthenticated,
    UnknownPayload,
    UnknownVersion,
    Unreachable,
)
from heterorl.common.identity.signing import Trust, new_key
from heterorl.common.identity.spiffe import NODE_KEY
from heterorl.common.rpc import server_limits
from heterorl.common.rpc.channel import check_health, stubs_of
from heterorl.common.rpc.error_status import from_rpc_error
from heterorl.common.types.policy import SignedManifest
from heterorl.common.types.rollout import GroupId
from heterorl.relay import relay_app
from heterorl.v1 import run_pb2
from tests.support.groups import group_to_pb, push_of
from tests.support.limits import WAIT_S
from tests.support.relayed import HASTY, Site, counted, large_run, registration, since

REGISTER = "/heterorl.v1.RunService/Heartbeat"


@pytest.fixture
async def run(tmp_path):
    async with large_run(tmp_path / "run") as run:
        yield run


@pytest.fixture
async def site(run, tmp_path):
    async with Site(run, tmp_path / "relay") as site:
        yield site


async def _head_known(site):
    async for _ in site.client("eu.watch").watch_head(after_version=-1):
        return


async def _carried(run, pair, shown, *, site="eu.1", method=REGISTER):
    """The error of a call that shows a certificate, by whatever other end."""
    credentials = grpc.ssl_channel_credentials(run.certificates.ca, pair.key, pair.cert)
    request = run_pb2.HeartbeatRequest(site=site, incarnation="inc-1").SerializeToString()
    async with grpc.aio.secure_channel(run.address, credentials) as channel:
        try:
            await channel.unary_unary(method)(request, metadata=[(NODE_KEY, each) for each in shown], timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
    return None


async def test_a_samplers_calls_are_its_own_behind_the_relay(run, site):
    client = site.client("eu.1")

    answer = await client.register(registration(run.run, "eu.1"))
    grant = await client.lease_work(site="eu.1", incarnation="inc-1", max_groups=1, policy_version=0)

    assert (answer.run_id, len(grant.assignments)) == ("run", 1)
    assert {entry.site for entry in (await run.operator.get_status()).sites} >= {"eu.1"}
    # The coordinator's own words, with their type.
    with pytest.raises(PermissionDenied, match="eu.1 may not speak for site 'eu.2'"):
        await client.register(registration(run.run, "eu.2"))
    with pytest.raises(NotRegistered):
        await client.lease_work(site="eu.1", incarnation="other", max_groups=1, policy_version=0)
    with pytest.raises(UnknownVersion):
        await client.get_signed_manifest(version=7)


async def test_silent_calls_take_nothing_at_the_coordinator_and_stop_nobody_at_the_relay(run, site, monkeypatch):
    monkeypatch.setattr(server_limits, "SHORT_PATIENCE_S", 0.0)
    site.server.admission.budget = server_limits.MemoryQuota(total_bytes=256 << 20, message_bytes=16 << 20)
    client = site.client("eu.1")
    await client.register(registration(run.run, "eu.1"))
    before = run.server.admission.shares.num_calls
    pair = run.certificates.pair("sampler", "eu.bad")
    credentials = grpc.ssl_channel_credentials(run.certificates.ca, pair.key, pair.cert)

    async def nothing():
        await asyncio.Event().wait()
        yield b""

    async with grpc.aio.secure_channel(f"127.0.0.1:{site.port}", credentials) as channel:
        names = ("RolloutService/LeaseWork", "PolicyService/PlanPull", "RolloutService/PushGroups")
        calls = [channel.stream_stream(f"/heterorl.v1.{name}")(nothing()) for name in names for _ in range(8)]
        # All room of short messages, and what one node may have of the others'.
        while site.server.admission.budget.num_bytes < 8 * (16 << 20):  # noqa: ASYNC110
            await asyncio.sleep(0)
        held = run.server.admission.shares.num_calls - before
        grant = await client.lease_work(site="eu.1", incarnation="inc-1", max_groups=1, policy_version=0)
        health = await check_health(
            f"127.0.0.1:{site.port}", tls=run.certificates.tls("operator", "ops"), timeout_s=WAIT_S
        )
    await asyncio.gather(*(call.code() for call in calls))

    assert (held, len(grant.assignments), health.is_serving) == (0, 1, True)


async def test_who_is_not_of_the_site_is_refused_by_relay_and_coordinator(run, site):
    for role, name in (("sampler", "us-1"), ("sampler", "eux"), ("learner", "eu"), ("operator", "eu")):
        with pytest.raises(PermissionDenied):
            await site.client(name, role=role).lease_work(site=name, incarnation="i", max_groups=1, policy_version=0)

    pairs, relay = run.certificates.pair, run.certificates.pair("relay", "eu")
    good = pairs("sampler", "eu.1").cert
    assert await _carried(run, relay, [good]) is None
    forged = type(run.certificates)(run.directory / "other").pair("sampler", "eu.1").cert
    for pair, shown, refused in (
        (relay, [pairs("sampler", "us-1").cert], PermissionDenied),
        (relay, [pairs("learner", "eu.1").cert], PermissionDenied),
        (pairs("sampler", "eu.2"), [good], PermissionDenied),
        (pairs("relay", "us"), [good], PermissionDenied),
        (relay, [forged], Unauthenticated),
        (relay, [good, good], Unauthenticated),
        (relay, [b"no certificate"], Unauthenticated),
        # The relay itself has no work to lease and no groups to push.
        (relay, [], PermissionDenied),
    ):
        assert isinstance(await _carried(run, pair, shown), refused), (shown, refused)
    assert isinstance(await _carried(run, relay, [good], site="eu.2"), PermissionDenied)

    run.certificates.authority.revoke(str(run.certificates.node("sampler", "eu.1")))
    assert isinstance(await _carried(run, relay, [good]), Unauthenticated)
    run.certificates.authority.revoke(str(run.certificates.node("relay", "eu")))
    refused = await _carried(run, relay, [pairs("sampler", "eu.2").cert], site="eu.2")
    assert isinstance(refused, Unauthenticated)
    assert "the relay of eu" in str(refused)
    assert refused.is_transient


async def test_revocation_that_only_the_relay_knows_ends_what_it_answers_and_what_it_carries(run, site, monkeypatch):
    client, name = site.client("eu.1"), {"site": "eu.1", "incarnation": "inc-1"}
    await client.register(registration(run.run, "eu.1"))
    leased = await client.lease_work(**name, max_groups=2, policy_version=0)
    groups = [
        run.run.group(work, id=GroupId(**name, sequence=number)) for number, work in enumerate(leased.assignments, 1)
    ]
    is_asked, may_answer, lease_work = asyncio.Event(), asyncio.Event(), run.core.rollout.lease_work

    async def held(**request):
        grant = await lease_work(**request)
        is_asked.set()
        await may_answer.wait()
        return grant

    monkeypatch.setattr(run.core.rollout, "lease_work", held)
    watch = client.watch_head(after_version=-1)
    await anext(watch)
    pair = run.certificates.pair("sampler", "eu.1")
    credentials = grpc.ssl_channel_credentials(run.certificates.ca, pair.key, pair.cert)
    async with grpc.aio.secure_channel(f"127.0.0.1:{site.port}", credentials) as channel:
        push = stubs_of(channel)["PushGroups"]()
        await push.write(push_of(group_to_pb(groups[0])))
        await push.read()
        leasing = asyncio.ensure_future(client.lease_work(**name, max_groups=1, policy_version=0))
        await is_asked.wait()

        site.server.admission.revoked = {run.certificates.identity("sampler", "eu.1").serial}

        # An answer of the coordinator to a question of before.
        may_answer.set()
        with pytest.raises(Unauthenticated, match="revoked"):
            await leasing
        # An answer of the relay's own.
        await run.run.publish()
        with pytest.raises(Unauthenticated, match="revoked"):
            await anext(watch)
        # A message that the coordinator would take.
        await push.write(push_of(group_to_pb(groups[1])))
        assert await push.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await run.operator.get_status()).ledger.acked == 1


async def test_plan_that_is_kept_is_given_while_a_coordinator_hangs_over_a_sound_line(run, site, monkeypatch):
    asked = {"have_version": -1, "have_root": "", "want_version": 0}
    client = site.client()
    kept = await client.plan_pull(**asked)
    site.weights._plans.expire()

    async def hangs(**_asked):
        await asyncio.Event().wait()

    monkeypatch.setattr(run.core.policy, "plan_pull", hangs)
    monkeypatch.setattr(relay_app, "ASK_S", 0.5)

    assert await client.plan_pull(**asked) == kept


async def test_eight_pulls_cross_the_line_once(run, site, tmp_path):
    await _head_known(site)
    before = counted()

    pulled = await asyncio.gather(
        *(
            site.puller(tmp_path / f"spool-{number}", client=site.client(f"eu.{number}"), streams=1 + number % 2).pull(
                held=None, want_version=-1
            )
            for number in range(8)
        )
    )

    one = pulled[0].manifest.payloads[0].num_bytes
    assert one > 5 << 20
    assert {each.arena.state_root() for each in pulled} == {run.run.roots[0]}
    found = since(before)
    assert found["from_coordinator"] <= 1.05 * one
    assert found["served"] <= 1.05 * one
    assert found["to_nodes"] >= 8 * one
    assert found["fetched"] == 1


async def test_a_new_version_is_told_to_all_by_one_watch(run, site, tmp_path):
    async def next_version(number):
        async for update in site.client(f"eu.{number}").watch_head(after_version=0):
            return update.version
        return None

    await _head_known(site)
    watching = [asyncio.ensure_future(next_version(number)) for number in range(3)]
    await run.run.publish()

    assert await asyncio.gather(*watching) == [1, 1, 1]
    pulled = await site.puller(tmp_path / "spool").pull(held=None, want_version=-1)
    assert pulled.version == 1
    assert run.server.admission.shares._of_rpc.total() <= 1


async def test_what_is_kept_survives_a_restart_and_an_outage(run, site, tmp_path):
    first = await site.puller(tmp_path / "a").pull(held=None, want_version=-1)
    digest = first.manifest.payloads[0].digest
    await site.restart()
    before = counted()
    await site.puller(tmp_path / "b").pull(held=None, want_version=-1)
    assert (since(before)["from_coordinator"], since(before)["hit"]) == (0, 1)

    client = site.client("eu.1", policy=HASTY)
    await run.core.end_streams()
    await run.server.stop(0)
    again = await site.puller(tmp_path / "c", client=client).pull(held=None, want_version=-1)

    assert again.arena.state_root() == first.arena.state_root()
    with pytest.raises(Unreachable):
        await client.lease_work(site="eu.1", incarnation="inc-1", max_groups=1, policy_version=0)
    with pytest.raises(UnknownPayload):
        async for _ in client.read_payload(digest="0" * 64, offset=0):
            pass
    frames = [frame async for frame in client.read_payload(digest=digest, offset=10, stop=20)]
    assert len(b"".join(frames)) == 10
    assert (await check_health(f"127.0.0.1:{site.port}", tls=run.certificates.tls("operator", "ops"), timeout_s=WAIT_S)).is_serving  # fmt: skip
    # Plans are in memory alone.
    await site.restart()
    with pytest.raises(Unreachable):
        await site.puller(tmp_path / "d", client=site.client("eu.1", policy=HASTY)).pull(held=None, want_version=-1)


async def test_a_fetch_that_broke_goes_on_from_its_bytes(run, site, tmp_path):
    plan = await site.client().plan_pull(have_version=-1, have_root="", want_version=-1)
    (ref,) = plan.payloads
    head = b""
    async for frame in run.sampler.read_payload(digest=ref.digest, offset=0, stop=(2 << 20) + 17):
        head += frame
    (site.cache.incoming / ref.digest).write_bytes(head)
    before = counted()

    got = b"".join([frame async for frame in site.client().read_payload(digest=ref.digest, offset=5)])

    assert len(got) == ref.num_bytes - 5
    assert got.startswith(head[5:])
    assert since(before)["from_coordinator"] == ref.num_bytes - len(head)


@pytest.mark.parametrize("damage", ["a bit", "cut short"])
async def test_a_damaged_cache_is_noticed_and_fetched_anew(run, site, tmp_path, damage):
    first = await site.puller(tmp_path / "a").pull(held=None, want_version=-1)
    ref = first.manifest.payloads[0]
    await site.settled()
    path = site.cache.path(ref.digest)
    if damage == "a bit":
        with path.open("r+b") as file:
            file.seek(3 << 20)
            byte = file.read(1)
            file.seek(3 << 20)
            file.write(bytes([byte[0] ^ 1]))
    else:
        os.truncate(path, 1 << 20)
    before = counted()

    pulled = await site.puller(tmp_path / "b").pull(held=None, want_version=-1)

    assert pulled.arena.state_root() == first.arena.state_root()
    found = since(before)
    assert (found["damaged"], found["from_coordinator"]) == (1, ref.num_bytes)


async def test_a_relay_that_lies_is_refused_by_the_sampler(run, site, tmp_path, monkeypatch):
    one = (await site.client().plan_pull(have_version=-1, have_root="", want_version=-1)).payloads[0].num_bytes

    async def other_bytes(**request):
        for start in range(0, one, 1 << 20):
            yield bytes(min(1 << 20, one - start))

    puller = site.puller(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(site.weights.payloads, "read", other_bytes)
        with pytest.raises(CorruptData):
            await puller.pull(held=None, want_version=-1)

    async def other_manifest(**request):
        return SignedManifest(data=b"anything", signature=b"s" * 64)

    trusted = new_key(tmp_path / "key").public_key
    with monkeypatch.context() as patch:
        patch.setattr(site.weights, "get_signed_manifest", other_manifest)
        signed = await site.client().get_signed_manifest(version=0)
    with pytest.raises(HeterorlError):
        Trust([trusted]).check(signed.data, signed.signature, version=0)
    assert (await puller.pull(held=None, want_version=-1)).version == 0


async def test_the_disk_is_bounded_and_what_does_not_fit_is_passed_on(run, tmp_path):
    async with Site(run, tmp_path / "relay", cache_bytes=8 << 20) as site:
        await site.puller(tmp_path / "a").pull(held=None, want_version=0)
        await site.settled()
        await run.run.publish(snapshot=True)
        await site.puller(tmp_path / "b").pull(held=None, want_version=1)
        await site.settled()
        assert site.cache.num_bytes <= 8 << 20
        assert len(list((tmp_path / "relay" / "payloads").iterdir())) == 1

    async with Site(run, tmp_path / "small", cache_bytes=1 << 20) as site:
        before = counted()
        pulled = await site.puller(tmp_path / "c").pull(held=None, want_version=1)
        assert pulled.version == 1
        assert (since(before)["passed"], site.cache.num_bytes) == (1, 0)
