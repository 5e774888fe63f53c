"""Pushes over links that break in the middle, and deadlines that know bytes and caps; over real sockets."""

import asyncio
import contextlib
from types import SimpleNamespace

import blake3
import grpc
import grpc.aio
import pytest

from heterorl.common.errors import Unreachable
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.pull.fetcher import STALL_S, Fetcher
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import MIN_UP_BYTES_PER_S, PUSH_TIMEOUT_S, CoordinatorClient
from heterorl.common.rpc.transport_options import BandwidthConfig
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.types.rollout import WorkAssignment
from heterorl.common.weights.payload import FRAME_BYTES
from heterorl.common.wire.rollout_messages import pushed_from_pb
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.payloads import Payloads
from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from tests.support.clock import ManualClock
from tests.support.run import Run


def _accepted(group_id):
    outcome = rollout_pb2.GroupOutcome(id=group_id, status=rollout_pb2.PUSH_STATUS_ACCEPTED)
    return rollout_pb2.PushGroupsResponse(outcomes=[outcome])


class Partial(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers some groups of a push, then ends as it is told."""

    def __init__(self, *, answered, then):
        self.answered, self.then = answered, then
        self.calls = 0
        self.left_s = 0.0

    async def PushGroups(self, request_iterator, context):
        self.calls += 1
        self.left_s = context.time_remaining()
        count = 0
        async for request in request_iterator:
            if count == self.answered:
                break
            count += 1
            (group,) = pushed_from_pb(request, limit_groups=1)
            yield _accepted(group.id)
        if self.then == "abort":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the link broke")
        if self.then == "more":
            for _ in range(100):
                yield _accepted(None)


@contextlib.asynccontextmanager
async def served(servicer, **options):
    server = grpc.aio.server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    policy = RetryPolicy(budget_s=0.2, base_s=0.01, cap_s=0.02)
    try:
        tls = TlsConfig(insecure=True)
        async with CoordinatorClient(f"127.0.0.1:{port}", tls=tls, policy=policy, **options) as api:
            yield api
    finally:
        await server.stop(0)


@pytest.fixture
def groups(tmp_path):
    run = Run(None, tmp_path)
    return [run.group(WorkAssignment(id=n, prompt_index=n, seed=1, lease_s=1.0), version=0) for n in range(4)]


@pytest.mark.parametrize("then", ["abort", "end"])
async def test_outcomes_before_the_break_are_kept(groups, then):
    servicer = Partial(answered=2, then=then)
    async with served(servicer) as api:
        outcomes = await api.push_groups(groups)

    assert [outcome.id for outcome in outcomes] == [group.id for group in groups[:2]]
    assert servicer.calls == 1


async def test_push_without_any_outcome_is_repeated_and_then_unreachable(groups):
    servicer = Partial(answered=0, then="abort")
    async with served(servicer) as api:
        with pytest.raises(Unreachable):
            await api.push_groups(groups)

    assert servicer.calls > 1


async def test_outcomes_beyond_the_groups_are_not_kept(groups):
    async with served(Partial(answered=9, then="more")) as api:
        assert len(await api.push_groups(groups)) == len(groups)


@pytest.mark.parametrize("cap", [0.0, 1e4])
async def test_deadline_of_a_push_knows_its_bytes_and_the_cap(groups, cap):
    servicer = Partial(answered=9, then="end")
    async with served(servicer, bandwidth=BandwidthConfig(up_bytes_per_s=cap)) as api:
        await api.push_groups(groups)
        # The largest batch over the slowest link, and the largest under a cap of that.
        slowest = api._push_timeout_s(4 << 20)

    assert servicer.left_s > PUSH_TIMEOUT_S - 5
    assert slowest >= (4 << 20) / MIN_UP_BYTES_PER_S
    if cap:
        assert slowest >= (4 << 20) / MIN_UP_BYTES_PER_S + (4 << 20) / cap


class Capped(CoordinatorClient):
    """A link whose frames wait for nothing but the cap."""

    contents: dict[str, bytes]

    async def read_payload(self, *, digest, offset, stop=None):
        data = self.contents[digest]
        for start in range(offset, len(data), FRAME_BYTES):
            frame = data[start : start + FRAME_BYTES]
            await self._pace(self._down, "down", len(frame))
            yield frame


FRAME_S = 15.0


@contextlib.asynccontextmanager
async def eight_payloads(clock):
    """A link under a cap of a frame in FRAME_S, and the payloads that it has, by their content."""
    datas = [bytes([number]) * (FRAME_BYTES + 1) for number in range(8)]
    refs = [
        PayloadRef(
            kind=PayloadKind.DELTA, from_version=0, to_version=1, digest=blake3.blake3(data).hexdigest(),
            num_bytes=len(data),
        )
        for data in datas
    ]  # fmt: skip
    bandwidth = BandwidthConfig(down_bytes_per_s=FRAME_BYTES / FRAME_S)
    async with Capped("127.0.0.1:1", tls=TlsConfig(insecure=True), clock=clock, bandwidth=bandwidth) as api:
        api.contents = {ref.digest: data for ref, data in zip(refs, datas, strict=True)}
        yield api, dict(zip(datas, refs, strict=True))


async def all_done(tasks, clock):
    """Seconds until all tasks are done."""
    began = clock.monotonic()
    while not all(task.done() for task in tasks):
        clock.advance(1.0)
        await asyncio.sleep(0.002)
    return clock.monotonic() - began


async def test_fetches_side_by_side_wait_for_their_cap_without_a_stall(tmp_path):
    clock = ManualClock()
    async with eight_payloads(clock) as (api, payloads):
        fetcher = Fetcher(api=api, spool=tmp_path, clock=clock, max_bytes=1 << 30)
        fetches = [asyncio.create_task(fetcher.fetch(ref)) for ref in payloads.values()]
        seconds = await all_done(fetches, clock)

    assert [fetch.result().read_bytes() for fetch in fetches] == list(payloads)
    # Threads write meanwhile; a stall costs STALL_S.
    assert len(fetches) * FRAME_S - 5 < seconds < len(fetches) * FRAME_S + STALL_S


async def test_fetch_of_a_relay_waits_for_payloads_that_it_passes_on_without_a_stall(tmp_path):
    clock = ManualClock()
    # One of them fits the cache.
    cache = CacheDirectory(tmp_path, max_bytes=FRAME_BYTES + 1)
    async with eight_payloads(clock) as (api, payloads):
        relay = Payloads(api=api, cache=cache, clock=clock)
        relay.note(SimpleNamespace(payloads=list(payloads.values())))

        async def read(ref):
            return b"".join([frame async for frame in relay.read(digest=ref.digest, offset=0, stop=None)])

        reads = [asyncio.create_task(read(ref)) for ref in payloads.values()]
        seconds = await all_done(reads, clock)
        await relay.close()
    cache.close()

    assert [each.result() for each in reads] == list(payloads)
    assert seconds < len(reads) * FRAME_S + STALL_S


@pytest.mark.parametrize(("stated", "used"), [(1, 1 << 20), (2 << 20, 2 << 20), (1 << 40, 512 << 20)])
async def test_limit_that_a_coordinator_states_never_silences_this_end(stated, used):
    async with CoordinatorClient("127.0.0.1:1", tls=TlsConfig(insecure=True)) as api:
        await api._channel.send_up_to(stated)
        assert api._channel.send_bytes == used
