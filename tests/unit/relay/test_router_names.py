"""What a relay counts of calls: the names of all of heterorl's, and how they ended."""

import asyncio
import importlib
import pkgutil
from types import SimpleNamespace

import pytest

import heterorl.v1
from heterorl.common.process.metrics import RPC_SECONDS
from heterorl.common.rpc.server_limits import MemoryQuota
from heterorl.relay import router


def test_every_rpc_of_the_protos_has_a_label_of_its_own():
    names = {each.name for each in pkgutil.iter_modules(heterorl.v1.__path__) if each.name.endswith("_pb2")}
    services = [
        service
        for name in names
        for service in importlib.import_module(f"heterorl.v1.{name}").DESCRIPTOR.services_by_name.values()
    ]

    assert len(services) >= 8
    assert {method.name for service in services for method in service.methods} == set(router.RPCS)


@pytest.mark.parametrize("end", [GeneratorExit, asyncio.CancelledError])
async def test_call_that_its_node_ends_while_a_message_is_sent_is_counted_as_cancelled(end):
    async def read():
        return b""

    def count():
        return sum(one.get() for one in RPC_SECONDS.labels("server", router.OTHER, "CANCELLED")._buckets)

    admission = router.NodeAdmission(
        own=lambda: None, revoked=frozenset(), places=8, places_of_node=8,
        budget=MemoryQuota(total_bytes=1 << 20, message_bytes=100),
    )  # fmt: skip
    relay = router.Router(weights=None, forwarder=None, admission=admission)
    handler = relay.service(SimpleNamespace(method=router.HEALTH)).stream_stream
    before = count()
    messages = handler(None, SimpleNamespace(auth_context=dict, read=read))
    await anext(messages)

    with pytest.raises(end):
        await messages.athrow(end)

    assert count() == before + 1
