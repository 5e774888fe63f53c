import asyncio

import pytest

from heterorl.learner.run.inbox import Inbox
from tests.support.learner_world import queued


async def test_inbox_gives_groups_in_the_order_they_came():
    inbox = Inbox(4)
    for number in (3, 1, 2):
        await inbox.put(queued(number))

    taken = await inbox.take(2)

    assert [entry.group.id.sequence for entry in taken] == [3, 1]


async def test_take_waits_until_all_groups_are_there():
    inbox = Inbox(4)
    waiting = asyncio.create_task(inbox.take(2))
    await inbox.put(queued(1))
    await asyncio.sleep(0)
    assert not waiting.done()

    await inbox.put(queued(2))

    assert len(await waiting) == 2


async def test_credits_never_exceed_the_room():
    inbox = Inbox(3)
    _, credits = inbox.open_stream()

    # 3 slots; one group arrives, so 2 credits are still out and nothing is left to give.
    assert await anext(credits) == 3
    await inbox.put(queued(1))
    following = asyncio.ensure_future(anext(credits))
    await asyncio.sleep(0)
    assert not following.done()

    await inbox.take(1)

    assert await following == 1


async def test_credit_comes_back_when_a_group_is_skipped():
    inbox = Inbox(1)
    _, credits = inbox.open_stream()
    assert await anext(credits) == 1

    await inbox.skip()

    assert await anext(credits) == 1


async def test_new_stream_ends_the_old_credits_and_names_what_is_held():
    inbox = Inbox(3)
    _, old = inbox.open_stream()
    assert await anext(old) == 3
    await inbox.put(queued(1))
    await inbox.put(queued(2))
    await inbox.take(1)

    held, new = inbox.open_stream()

    # Group 1 is being trained on and still held; 1 of 3 slots is occupied by group 2.
    assert [group_id.sequence for group_id in held] == [1, 2]
    assert await anext(new) == 2
    with pytest.raises(StopAsyncIteration):
        await anext(old)


async def test_group_that_is_held_is_not_taken_in_again():
    inbox = Inbox(3)
    await inbox.put(queued(1))
    await inbox.take(1)

    await inbox.put(queued(1))

    assert len(inbox._waiting) == 0


async def test_settled_group_is_no_longer_held():
    inbox = Inbox(3)
    await inbox.put(queued(1))
    await inbox.take(1)

    inbox.settle([queued(1).group.id])

    assert inbox.held == ()


async def test_close_wakes_everyone():
    inbox = Inbox(1)
    _, credits = inbox.open_stream()
    assert await anext(credits) == 1
    taking = asyncio.create_task(inbox.take(1))
    crediting = asyncio.ensure_future(anext(credits, 0))
    await asyncio.sleep(0)

    await inbox.close()

    assert await taking == []
    assert await crediting == 0
    assert await inbox.take(1) == []


async def test_inbox_knows_how_long_it_has_held_a_group(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    inbox = Inbox(2)
    first, unknown = queued(1), queued(2)
    await inbox.put(first)
    now[0] = 104.5

    assert inbox.held_s(first.group.id) == 4.5
    assert inbox.held_s(unknown.group.id) == 0.0
