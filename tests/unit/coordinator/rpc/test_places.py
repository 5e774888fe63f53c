"""Places for calls and room for messages: by certificate, with something kept for the learner and the operator."""

import asyncio
import contextlib

from heterorl.common.errors import QuotaExceeded
from heterorl.common.identity.identity import Identity, LocalPeer, Role
from heterorl.coordinator.rpc.budget import OF_PRIVILEGED, OF_SITE, Budget
from heterorl.coordinator.rpc.calls import Shares
from heterorl.coordinator.rpc.holders import Holder, holder_of

HEARTBEAT = "/heterorl.v1.RunService/Heartbeat"
DIAGNOSE = "/heterorl.v1.DiagnosisService/Diagnose"
RENEW = "/heterorl.v1.PolicyService/RenewLease"
EVIL, HONEST = (Holder(f"sampler {name}", False, is_proven=True) for name in ("evil", "honest"))
LEARNER, OPERATOR = (Holder(f"{name} main", True, is_proven=True) for name in ("learner", "operator"))
MESSAGE = 100
_HELD = []
"""Places that are not given back."""


def _take(shares, holder, count, method=HEARTBEAT):
    """Up to `count` places; returns how many there were."""
    for number in range(count):
        try:
            place = shares.place(holder, method)
            place.__enter__()
            _HELD.append(place)
        except QuotaExceeded as error:
            return number if error.retry_after_s > 0 else -1
    return count


def _peer(role, site):
    return Identity(run="run", site=site, role=role, serial=1, not_before=0.0, not_after=1.0)


def test_one_certificate_is_one_holder_whatever_it_dials_from():
    first, second = (holder_of(_peer(Role.SAMPLER, "eu-1"), HEARTBEAT, address) for address in ("a:1", "b:2"))

    assert first == second
    assert first != holder_of(_peer(Role.SAMPLER, "eu-2"), HEARTBEAT, "a:1")
    assert first != holder_of(_peer(Role.LEARNER, "eu-1"), RENEW, "a:1")
    assert [holder_of(_peer(role, "x"), DIAGNOSE, "").is_privileged for role in Role] == [
        role not in (Role.SAMPLER, Role.RELAY) for role in Role
    ]


def test_without_certificates_connections_and_what_is_called_tell_callers_apart():
    learner = holder_of(LocalPeer(), RENEW, "ipv4:127.0.0.1:1")
    node = holder_of(LocalPeer(), HEARTBEAT, "ipv4:127.0.0.1:1")

    assert learner.is_privileged
    assert not node.is_privileged
    assert node != holder_of(LocalPeer(), HEARTBEAT, "ipv4:127.0.0.1:2")


def test_one_site_takes_its_share_and_others_find_places():
    shares = Shares(places=1024, per_site=32)

    assert _take(shares, EVIL, 1000) == 32
    assert _take(shares, HONEST, 5) == 5


def test_all_sites_together_leave_places_to_the_learner_and_the_operator():
    shares = Shares(places=1024, per_site=32)
    sites = [Holder(f"sampler {number}", False, is_proven=True) for number in range(100)]

    assert sum(_take(shares, site, 32) for site in sites) == 896
    assert _take(shares, HONEST, 1) == 0
    assert _take(shares, LEARNER, 1000, RENEW) == 64
    assert _take(shares, OPERATOR, 1000, DIAGNOSE) == 1
    assert _take(shares, OPERATOR, 1000, RENEW) == 63


def test_smallest_server_keeps_a_place_for_both():
    shares = Shares(places=8, per_site=32)

    assert _take(shares, EVIL, 10) == 3
    assert _take(shares, HONEST, 10) == 3
    assert _take(shares, Holder("sampler third", False, is_proven=True), 1) == 0
    assert _take(shares, LEARNER, 1, RENEW) == 1
    assert _take(shares, OPERATOR, 1, RENEW) == 1


def test_place_is_given_back_however_a_call_ends():
    shares = Shares(places=8, per_site=1)
    for _ in range(5):
        with contextlib.suppress(ZeroDivisionError), shares.place(EVIL, DIAGNOSE):
            assert _take(shares, EVIL, 1, DIAGNOSE) == 0
            raise ZeroDivisionError

    assert _take(shares, EVIL, 1, DIAGNOSE) == 1


async def _rooms(budget, holder, count):
    """Up to `count` rooms that need no waiting."""
    rooms = []
    for _ in range(count):
        task = asyncio.create_task(budget.room(holder))
        await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            break
        rooms.append(task.result())
    return rooms


async def test_one_site_waits_for_its_own_room_only():
    budget = Budget(total_bytes=100 * MESSAGE, message_bytes=MESSAGE)

    taken = await _rooms(budget, EVIL, 100)
    waiting = asyncio.create_task(budget.room(EVIL))
    await asyncio.sleep(0)

    assert len(taken) == OF_SITE
    assert len(await _rooms(budget, HONEST, 2)) == 2
    assert not waiting.done()
    taken[0].shrink(0)
    assert (await waiting).num_bytes == MESSAGE


async def test_total_holds_for_samplers_and_never_for_the_learner():
    budget = Budget(total_bytes=10 * MESSAGE, message_bytes=MESSAGE)
    sites = [Holder(f"sampler {number}", False, is_proven=True) for number in range(10)]

    taken = [room for site in sites for room in await _rooms(budget, site, 100)]

    assert len(taken) == 10
    assert len(await _rooms(budget, LEARNER, 100)) == OF_PRIVILEGED
    for room in taken:
        room.close()
        room.close()
    assert len(await _rooms(budget, HONEST, 100)) == OF_SITE


async def test_small_messages_leave_room():
    budget = Budget(total_bytes=4 * MESSAGE, message_bytes=MESSAGE)
    for _ in range(50):
        (room,) = await _rooms(budget, EVIL, 1)
        room.shrink(5)

    # 250 bytes are held: one more of unknown size fits, a second does not.
    assert len(await _rooms(budget, EVIL, 9)) == 1


async def test_wait_that_is_cancelled_leaves_nothing_behind():
    budget = Budget(total_bytes=4 * MESSAGE, message_bytes=MESSAGE)
    taken = await _rooms(budget, EVIL, 4)
    waiting = [asyncio.create_task(budget.room(EVIL)) for _ in range(3)]
    await asyncio.sleep(0)

    # The first is cancelled in the moment in which its turn comes.
    taken[0].close()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for room in taken:
        room.close()

    assert len(await _rooms(budget, EVIL, 9)) == OF_SITE


async def test_rooms_come_in_the_order_of_their_calls():
    budget = Budget(total_bytes=4 * MESSAGE, message_bytes=MESSAGE)
    taken = await _rooms(budget, EVIL, 4)
    order = []

    async def wait(name):
        await budget.room(HONEST)
        order.append(name)

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    for room in taken[:3]:
        room.close()
    await asyncio.gather(*tasks)

    assert order == [0, 1, 2]
