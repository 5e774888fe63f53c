"""Reservation for messages at a relay: each node has its share, however little is left for all of them."""

import asyncio

from heterorl.common.rpc.server_limits import OF_CALLER, MemoryQuota
from heterorl.relay.node_admission import Node, NodeAdmission


class Call:
    """A call whose messages come when the test says so."""

    def __init__(self):
        self.message = asyncio.get_running_loop().create_future()

    async def read(self):
        return await self.message


async def test_a_node_has_room_for_its_share_of_messages_where_all_together_are_given_none():
    door = NodeAdmission(
        own=lambda: None, revoked=frozenset(), places=8, places_of_node=8,
        budget=MemoryQuota(total_bytes=0, message_bytes=100),
    )  # fmt: skip
    calls = [Call() for _ in range(OF_CALLER + 1)]
    reads = [asyncio.create_task(door.message(Node(name="local"), "/heterorl.v1.X/Y", call)) for call in calls]
    for call in calls:
        call.message.set_result(bytes(100))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert [read.done() for read in reads] == [True] * OF_CALLER + [False]
    (await reads[0])[0].close()
    assert (await reads[-1])[1] == bytes(100)
