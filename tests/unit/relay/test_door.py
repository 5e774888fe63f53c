"""Room for messages at a relay: each node has its share, however little is left for all of them."""

import asyncio

from heterorl.relay.door import MESSAGES_OF_NODE, Door, Node


async def test_a_node_has_room_for_its_share_of_messages_where_all_together_are_given_none():
    door = Door(own=lambda: None, revoked=frozenset(), places=8, places_of_node=8, messages=0)
    held, release = [], asyncio.Event()

    async def hold():
        async with door.room(Node(name="local")):
            held.append(True)
            await release.wait()

    tasks = [asyncio.create_task(hold()) for _ in range(MESSAGES_OF_NODE + 1)]
    # Room that is there is taken without waiting: in the first turn of the loop.
    await asyncio.sleep(0)

    assert len(held) == MESSAGES_OF_NODE
    release.set()
    await asyncio.gather(*tasks)
    assert len(held) == MESSAGES_OF_NODE + 1
