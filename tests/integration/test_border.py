"""What one peer can do to everybody else with calls and messages, asked of a real server with certificates."""

import asyncio
import logging
import threading
import time

import grpc.aio
import pytest

from heterorl.common import errors
from heterorl.common.identity.spiffe import Role
from heterorl.common.rpc import server_limits
from heterorl.common.rpc.error_status import from_rpc_error
from heterorl.common.rpc.maintenance import MAX_ANSWER_BYTES
from heterorl.common.types.rollout import DropReason
from heterorl.coordinator.rpc import call_admission
from heterorl.coordinator.rpc.access import RULES
from heterorl.coordinator.rpc.bounds import bound_of
from heterorl.v1 import diagnosis_pb2, policy_pb2, rollout_pb2, run_pb2
from tests.support.groups import group_to_pb, push_of
from tests.support.limits import WAIT_S
from tests.support.protos import METHODS, NOT_SERVED, bytes_field, entries, fields, is_repeated, wrapped
from tests.support.run import INCARNATION, SITE
from tests.support.secure_run import SecureRun

OURS = sorted(name for name in METHODS if name not in NOT_SERVED)
LEASE = "/heterorl.v1.RolloutService/LeaseWork"
ROLE_OF = {name: min(RULES[name].roles, key=lambda role: (role is not Role.SAMPLER, role)) for name in OURS}


@pytest.fixture
async def secure(tmp_path):
    async with SecureRun(tmp_path) as secure:
        yield secure


def _channel(secure, role, site=SITE, *, own=False):
    pair = secure.certificates.pair(role, site)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)] if own else []
    credentials = grpc.ssl_channel_credentials(secure.certificates.ca, pair.key, pair.cert)
    return grpc.aio.secure_channel(secure.address, credentials, options=options)


def _start(channel, name, *data):
    """A call with raw bytes."""
    method = METHODS[name]
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(name)
    return call(_each(data), timeout=WAIT_S) if method.client_streaming else call(data[0], timeout=WAIT_S)


async def _each(data):
    for one in data:
        yield one


async def _refusal(channel, name, *data):
    call = _start(channel, name, *data)
    try:
        if METHODS[name].server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), from_rpc_error(error)
    return grpc.StatusCode.OK, None


def _places(secure):
    """Calls that are counted now, and bytes of requests."""
    admission = secure.server.admission
    return admission.shares.num_calls, admission.budget.num_bytes


async def _settled(secure):
    """Until nothing is counted: streams that a test cut end a moment later."""
    await _until(lambda: _places(secure) == (0, 0))


async def _until(is_so):
    # Counted in the server, which tells nobody.
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0)


def _bounded(request):
    """Ways to fields, but those of maps, that a message of the largest size has room to break."""
    return [
        way
        for way in fields(request)
        for bound in [bound_of(way[-1].containing_type.name, way[-1].name)]
        if not any(field.message_type and field.message_type.GetOptions().map_entry for field in way)
        and (bound.count < 1 << 15 if is_repeated(way[-1]) else bound.length < 1 << 13)
    ]


async def test_bytes_that_are_no_message_are_refused_at_every_rpc_and_leave_nothing(secure, caplog):
    caplog.set_level(logging.INFO)
    answers = {}
    for name in OURS:
        site = "main" if ROLE_OF[name] is Role.COORDINATOR else SITE
        async with _channel(secure, ROLE_OF[name], site) as channel:
            code, error = await _refusal(channel, name, b"\xff\xff\xff\xff")
        answers[name] = (code, type(error))
        await _settled(secure)

    refused = (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest)
    assert {name: answer for name, answer in answers.items() if answer != refused} == {}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_too_much_in_one_field_is_refused_at_every_rpc_by_the_fields_name(secure):
    names = [name for name in OURS if not name.startswith("/grpc.") and _bounded(METHODS[name].input_type)]
    wrong = {}
    for name in names:
        way = max(_bounded(METHODS[name].input_type), key=lambda way: (is_repeated(way[-1]), len(way)))
        path = ".".join(field.name for field in way)
        data = wrapped(way, entries(way[-1], 1 << 15) if is_repeated(way[-1]) else bytes_field(way[-1], b"a" * 8192))
        async with _channel(secure, ROLE_OF[name]) as channel:
            code, error = await _refusal(channel, name, data)
        if code is not grpc.StatusCode.INVALID_ARGUMENT or path not in str(error):
            wrong[name] = (path, code, str(error))
        await _settled(secure)

    assert len(names) >= 28
    assert wrong == {}


async def test_compressed_message_is_measured_decompressed(secure):
    small, bomb = (
        bytes_field(METHODS[LEASE].input_type.fields_by_name["site"], bytes(size)) for size in (8192, 64 << 20)
    )
    refused = {}
    for name, data in (("small", small), ("bomb", bomb)):
        async with _channel(secure, "sampler", own=True) as channel:
            call = channel.unary_unary(LEASE)(data, compression=grpc.Compression.Gzip, timeout=WAIT_S)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
        refused[name] = error.value.code()
        await _settled(secure)

    assert refused == {"small": grpc.StatusCode.INVALID_ARGUMENT, "bomb": grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_malformed_group_ends_the_stream_after_those_before_it(secure):
    work = await secure.run.lease(1)
    sound = push_of(group_to_pb(secure.run.group(work[0]))).SerializeToString()
    async with _channel(secure, "sampler") as channel:
        call = _start(channel, "/heterorl.v1.RolloutService/PushGroups", sound, b"\xff\xff")
        answer = rollout_pb2.PushGroupsResponse.FromString(await call.read())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()

    assert answer.outcomes[0].status == rollout_pb2.PUSH_STATUS_ACCEPTED
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await _settled(secure)


async def test_one_certificate_cannot_take_the_places_of_others(secure):
    await secure.run.lease(1)
    channels = [_channel(secure, "sampler", "us-1", own=True) for _ in range(4)]
    watch = policy_pb2.WatchHeadRequest(after_version=9).SerializeToString()
    calls = [
        _start(channel, name, data)
        for channel in channels
        for name, data in (("/heterorl.v1.PolicyService/WatchHead", watch),) * 40
    ]
    reads = [asyncio.ensure_future(call.read()) for call in calls]
    while len([read for read in reads if read.done()]) < 156:
        await asyncio.wait([read for read in reads if not read.done()], return_when=asyncio.FIRST_COMPLETED)
    counted, _ = _places(secure)
    grant = await secure.learner.renew_lease(epoch=secure.run.epoch)
    status = await secure.operator.get_status()
    work = await secure.sampler.lease_work(site=SITE, incarnation=INCARNATION, max_groups=1, policy_version=0)
    kinds = {type(from_rpc_error(read.exception())) for read in reads if read.done()}
    for channel in channels:
        await channel.close()
    await asyncio.gather(*reads, return_exceptions=True)

    assert counted == 4
    assert kinds == {errors.QuotaExceeded}
    assert grant.epoch == secure.run.epoch
    assert status.head_version == 0
    assert len(work.assignments) == 1
    await _settled(secure)


async def test_calls_that_never_send_their_request_are_counted_for_their_own_site(secure):
    async def nothing():
        await asyncio.Event().wait()
        yield b""

    async with _channel(secure, "sampler", "us-1", own=True) as channel:
        # On the wire a unary call and a stream are the same.
        calls = [channel.stream_unary("/heterorl.v1.RunService/Heartbeat")(nothing()) for _ in range(60)]
        await _until(lambda: _places(secure)[0] >= 28)
        held = _places(secure)
        assert (await secure.operator.get_status()).head_version == 0
        await secure.run.lease(1)
        for call in calls:
            call.cancel()

    # Half of what samplers may have, and four messages of the largest size.
    assert held == (28, 4 * (2 << 20))
    await _settled(secure)


async def test_silent_calls_of_many_certificates_stop_nobody(secure, monkeypatch):
    monkeypatch.setattr(server_limits, "SHORT_PATIENCE_S", 0.0)
    monkeypatch.setattr(server_limits, "LONG_PATIENCE_S", 0.0)
    secure.server.admission.budget = server_limits.MemoryQuota(total_bytes=32 << 20, message_bytes=2 << 20)
    (work,) = await secure.run.lease(1)

    async def nothing():
        await asyncio.Event().wait()
        yield b""

    channels = [_channel(secure, "sampler", f"bad-{number}", own=True) for number in range(4)]
    calls = [
        channel.stream_stream(f"/heterorl.v1.{name}")(nothing())
        for channel in channels
        for name in ("RunService/Heartbeat", "RolloutService/PushGroups")
        for _ in range(4)
    ]
    # All room of both lanes: of four messages in one, of twelve in the other.
    await _until(lambda: _places(secure)[1] == (4 + 12) * (2 << 20))
    work_2 = await secure.sampler.lease_work(site=SITE, incarnation=INCARNATION, max_groups=1, policy_version=0)
    (outcome,) = await secure.sampler.push_groups([secure.run.group(work)])
    for channel in channels:
        await channel.close()
    await asyncio.gather(*(call.code() for call in calls))

    assert (len(work_2.assignments), outcome.status.name) == (1, "ACCEPTED")
    await _settled(secure)


async def test_answers_that_nobody_reads_are_few_and_short(secure):
    data = diagnosis_pb2.DiagnoseRequest(answer_bytes=MAX_ANSWER_BYTES).SerializeToString()
    async with _channel(secure, "sampler", "us-1", own=True) as channel:
        outcomes = await asyncio.gather(
            *(_refusal(channel, "/heterorl.v1.DiagnosisService/Diagnose", data) for _ in range(30))
        )
        code, error = await _refusal(
            channel,
            "/heterorl.v1.DiagnosisService/Diagnose",
            diagnosis_pb2.DiagnoseRequest(answer_bytes=MAX_ANSWER_BYTES + 1).SerializeToString(),
        )

    kinds = [type(error) for _, error in outcomes]
    assert set(kinds) <= {type(None), errors.QuotaExceeded}
    assert kinds.count(errors.QuotaExceeded) > 0
    assert (code, type(error)) == (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest)
    await _settled(secure)


async def test_messages_of_one_site_in_memory_are_bounded_while_they_are_many(secure):
    (work,) = await secure.run.lease(1)
    group = group_to_pb(secure.run.group(work))
    group.token_ids += bytes(1_500_000)
    data = push_of(group).SerializeToString()
    peak = 0
    async with _channel(secure, "sampler", own=True) as channel:
        pushes = [
            asyncio.ensure_future(_refusal(channel, "/heterorl.v1.RolloutService/PushGroups", *[data] * 6))
            for _ in range(4)
        ]
        while not all(push.done() for push in pushes):
            peak = max(peak, _places(secure)[1])
            await asyncio.sleep(0)
    assert 2 << 20 < peak <= 4 * (2 << 20)
    assert {push.result()[0] for push in pushes} == {grpc.StatusCode.OK}
    ledger = (await secure.operator.get_status()).ledger
    assert (ledger.acked, ledger.dropped, ledger.is_balanced) == (1, {DropReason.INVALID: 1}, True)
    await _settled(secure)


async def test_refused_group_of_an_assignment_that_no_store_can_hold_is_counted_like_any_other(secure):
    work = await secure.run.lease(2)
    refused, sound = (group_to_pb(secure.run.group(one)) for one in work)
    refused.assignment = 2**63
    refused.endings = refused.endings[:1]
    data = [push_of(group).SerializeToString() for group in (refused, sound)]
    async with _channel(secure, "sampler", own=True) as channel:
        call = _start(channel, "/heterorl.v1.RolloutService/PushGroups", *data)
        answers = [rollout_pb2.PushGroupsResponse.FromString(answer).outcomes[0] async for answer in call]

    assert [answer.status for answer in answers] == [rollout_pb2.PUSH_STATUS_DROPPED, rollout_pb2.PUSH_STATUS_ACCEPTED]
    assert "endings: 1 entries, lengths states 2" in answers[0].message
    assert (await secure.operator.get_status()).ledger.dropped == {DropReason.INVALID: 1}


async def test_others_are_answered_while_a_long_message_is_read(secure, monkeypatch):
    is_read, go_on = threading.Event(), threading.Event()

    def parse(*arguments, **more):
        message = real(*arguments, **more)
        if message.DESCRIPTOR.name == "DiagnoseRequest":
            is_read.set()
            go_on.wait()
        return message

    real = call_admission.parse
    monkeypatch.setattr(call_admission, "parse", parse)
    data = diagnosis_pb2.DiagnoseRequest(padding=bytes(call_admission.INLINE_BYTES)).SerializeToString()
    async with _channel(secure, "sampler", own=True) as channel:
        call = asyncio.ensure_future(_refusal(channel, "/heterorl.v1.DiagnosisService/Diagnose", data))
        try:
            await asyncio.to_thread(is_read.wait)
            await secure.operator.get_status()
            assert not call.done()
        finally:
            go_on.set()
        code, _ = await call

    assert code is grpc.StatusCode.OK


async def test_work_is_given_back_by_registered_sites_in_bounded_calls(secure):
    abandon = rollout_pb2.AbandonWorkRequest(site=SITE, incarnation="never", assignments=[1]).SerializeToString()
    many = rollout_pb2.AbandonWorkRequest(site=SITE, incarnation=INCARNATION, assignments=[1] * 4097)
    async with _channel(secure, "sampler") as channel:
        name = "/heterorl.v1.RolloutService/AbandonWork"
        _, unknown = await _refusal(channel, name, abandon)
        _, too_many = await _refusal(channel, name, many.SerializeToString())
        # Our own client asks as often as it takes.
        await secure.sampler.abandon_work(site=SITE, incarnation=INCARNATION, assignments=list(range(9000)))

    assert type(unknown) is errors.NotRegistered
    assert "more than 4096" in str(too_many)


async def test_texts_of_a_peer_are_one_line_and_its_names_are_names(secure):
    forged = "hf\n2026-01-01 00:00:00,000 CRITICAL heterorl.coordinator.store.database: the store failed"
    for change in ({"engine": forged}, {"dtype": forged}, {"incarnation": forged}, {"engine": "e" * 4_000}):
        with pytest.raises(errors.InvalidRequest, match=next(iter(change))):
            await secure.sampler.register(secure.run.registration(**change))


async def test_stated_limit_is_the_coordinators(secure):
    grant = await secure.learner.acquire_lease(
        holder="learner", contract=secure.run.contract, request_id=f"again-{time.time_ns()}"
    )
    answer = await secure.sampler.register(secure.run.registration())

    assert grant.max_message_bytes == answer.max_message_bytes == 2 << 20
    heartbeat = run_pb2.HeartbeatRequest(site=SITE, incarnation=INCARNATION).SerializeToString()
    async with _channel(secure, "sampler") as channel:
        assert (await _refusal(channel, "/heterorl.v1.RunService/Heartbeat", heartbeat))[0] is grpc.StatusCode.OK
