"""Hundreds of connections that do nothing: a site at work does not notice, and the coordinator gets rid of them.

What protects: certificates are read again only when they change (credentials.py; else gRPC aborts under so many
handshakes), grpc.server_handshake_timeout_ms, keepalive pings.
"""

import asyncio
import statistics
import time

import psutil
import pytest

from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.transport_options import server_options
from heterorl.demo.processes import start, stop
from tests.support.certificates import Certificates
from tests.support.ports import free_port, serves
from tests.support.slow_peers import Kind, SlowPeers

NUM_PEERS = 900
GRPCS_OWN_MS = 120_000
GROWTH_BYTES = 128 << 20


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_900_slow_peers_delay_no_call_and_are_thrown_out(tmp_path, record_property):
    # Else the first kinds of peers would go by gRPC's own timeout.
    assert dict(server_options(1 << 20))["grpc.server_handshake_timeout_ms"] < GRPCS_OWN_MS
    certificates = Certificates(tmp_path / "certs", run="kills")
    port = free_port()
    address = f"127.0.0.1:{port}"
    tables = {
        "run_id": "kills", "data_dir": str(tmp_path / "data"), "listen": address, "metrics_port": 0,
        "tls": certificates.server_tls().model_dump(),
    }  # fmt: skip
    child = start("coordinator", name="coordinator", tables=tables, directory=tmp_path)
    operator = certificates.tls("operator", "desk")
    try:
        await serves(child.process, address)
        await _seconds_of_a_call(address, operator)
        process = psutil.Process(child.process.pid)
        fds, rss = process.num_fds(), process.memory_info().rss

        async with SlowPeers(port=port, node=certificates.node("sampler", "eu-1"), count=NUM_PEERS) as peers:
            times, is_crowded = [], False
            while not is_crowded:
                await asyncio.sleep(0.1)
                if peers.num_open < 0.9 * NUM_PEERS:
                    continue
                times = [await _seconds_of_a_call(address, operator) for _ in range(7)]
                # A server that waits for the slow answers when they are gone.
                is_crowded = peers.num_open >= 0.8 * NUM_PEERS
            crowded = process.num_fds()
            certificates.renew("coordinator", "main")
            await _seconds_of_a_call(address, operator)
            await peers.tire()

        record_property("median_s", statistics.median(times))
        assert min(peers.num_thrown_out[kind] for kind in Kind) >= NUM_PEERS // len(Kind)
        # Two descriptors each at most, and none of them stays.
        assert crowded < fds + 2 * NUM_PEERS
        while process.num_fds() > fds + 16:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.1)
        assert process.memory_info().rss < rss + GROWTH_BYTES
    finally:
        stop([child])


async def _seconds_of_a_call(address, tls) -> float:
    """A link of its own, handshake and all."""
    started = time.perf_counter()
    async with CoordinatorClient(address, tls=tls, policy=RetryPolicy(budget_s=60.0, cap_s=0.1)) as client:
        await client.get_status()
    return time.perf_counter() - started
