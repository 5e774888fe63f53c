"""Messages at a relay: each node has its share of room, and a certificate's end is the end of its messages."""

import asyncio

import pytest

from heterorl.common.errors import Unauthenticated
from heterorl.common.identity.spiffe import Identity, Role
from heterorl.common.rpc.server_limits import OF_CALLER, MemoryQuota
from heterorl.relay.router import Node, NodeAdmission


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


@pytest.mark.parametrize("end", ["is revoked", "has expired"])
async def test_message_after_the_end_of_its_nodes_certificate_is_not_taken_and_leaves_no_room_behind(end):
    revoked, instants = set(), [10.0]
    budget = MemoryQuota(total_bytes=1 << 20, message_bytes=100)
    door = NodeAdmission(
        own=lambda: None, revoked=revoked, places=8, places_of_node=8, budget=budget, wall_time=lambda: instants[-1]
    )
    identity = Identity(run="run", site="eu.1", role=Role.SAMPLER, serial=7, not_before=0.0, not_after=10.0)
    node = Node(name="sampler eu.1", identity=identity)
    before, after = Call(), Call()
    before.message.set_result(b"before")
    room, message = await door.message(node, "/heterorl.v1.X/Y", before)
    room.close()
    assert message == b"before"

    reading = asyncio.create_task(door.message(node, "/heterorl.v1.X/Y", after))
    await asyncio.sleep(0)
    if end == "is revoked":
        revoked.add(7)
    else:
        instants.append(10.5)
    after.message.set_result(b"after")

    with pytest.raises(Unauthenticated, match=end):
        await reading
    assert budget.num_bytes == 0
