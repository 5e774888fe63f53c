"""A coordinator whose descriptors strangers have taken: it loses no payload, and goes on when they are gone."""

import asyncio
import contextlib
import resource
import socket

import psutil
import pytest

from heterorl.common.errors import Busy
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.demo.processes import start, stop
from tests.support.limits import WAIT_S
from tests.support.ports import free_port
from tests.support.run import Run

ROOM = 24
"""Descriptors that are left when the strangers come."""


@pytest.fixture
def coordinator(tmp_path):
    port = free_port()
    tables = {
        "run_id": "run", "data_dir": str(tmp_path / "data"), "listen": f"127.0.0.1:{port}", "metrics_port": 0,
        "tls": {"insecure": True},
    }  # fmt: skip
    child = start("coordinator", name="coordinator", tables=tables, directory=tmp_path)
    yield port, psutil.Process(child.process.pid)
    stop([child])


async def test_silent_sockets_take_all_descriptors_and_destroy_nothing(coordinator, tmp_path, record_property):
    port, process = coordinator
    policy = RetryPolicy(budget_s=1.0, base_s=0.05, cap_s=0.1)
    address = f"127.0.0.1:{port}"
    async with CoordinatorClient(address, tls=TlsConfig(insecure=True), policy=policy) as client:
        await _until_it_serves(client)
        run = Run(client, tmp_path)
        await run.begin()
        await run.publish()
        (payload,) = (await _plan(client)).payloads
        limit = process.num_fds() + ROOM
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        with contextlib.ExitStack() as sockets:
            for _ in range(3 * ROOM):
                sockets.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            while process.num_fds() < limit:
                await client.get_status()
            # They are told to come again.
            refused = await asyncio.gather(*(_is_refused(client, payload) for _ in range(64)))
            assert [payload] == list((await _plan(client)).payloads)

        while await _is_refused(client, payload):
            pass
        assert await run.publish() == 1
        record_property("refused", sum(refused))
        assert process.is_running()
        assert not (tmp_path / "data" / "damaged").exists()


async def _is_refused(client, payload):
    try:
        data = [frame async for frame in client.read_payload(digest=payload.digest, offset=0)]
    except Busy:
        return True
    assert sum(map(len, data)) == payload.num_bytes
    return False


async def _plan(client):
    return await client.plan_pull(have_version=-1, have_root="", want_version=0)


async def _until_it_serves(client):
    while True:
        with contextlib.suppress(Exception):
            return await client.get_status()
