"""Waits end by their ring or their time; delays have full jitter."""

import asyncio
import random

import pytest

from heterorl.common.errors import (
    ContractMismatch,
    InvalidRequest,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unreachable,
)
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import ring_or_time
from heterorl.common.types.common import peer_seconds
from tests.support.clock import ManualClock


async def test_wait_ends_by_the_ring_or_by_time_and_leaves_no_task():
    clock = ManualClock()
    for is_rung in (True, False):
        ticket = asyncio.Event()
        waiting = asyncio.create_task(ring_or_time(ticket, clock=clock, seconds=5.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        clock.advance(4.9)
        assert not waiting.done()
        if is_rung:
            ticket.set()
        else:
            clock.advance(0.2)
        await waiting

    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_delays_are_drawn_from_nothing_up_to_a_bound_that_doubles_to_the_cap():
    rows = []
    for seed in range(400):
        backoff = Backoff(clock=ManualClock(), rng=random.Random(seed), base_s=1.0, cap_s=8.0)
        rows.append([backoff.delay_s() for _ in range(6)])

    for number, longest in enumerate([1, 2, 4, 8, 8, 8]):
        drawn = [row[number] for row in rows]
        # Uniform on [0, d]: 400 draws leave a tenth at either end empty with probability 0.9^400 = 5e-19.
        assert 0 <= min(drawn) < longest / 10
        assert longest * 9 / 10 < max(drawn) <= longest


def test_delay_is_never_less_than_the_peer_asks_for_and_starts_anew_after_a_success():
    backoff = Backoff(clock=ManualClock(), rng=random.Random(0))
    assert backoff.next_delay(QuotaExceeded("full", retry_after_s=30.0)) >= 30.0
    for _ in range(40):
        assert backoff.next_delay(Unreachable("cut")) <= 15.0
    backoff.reset()

    assert backoff.delay_s() <= 1.0


@pytest.mark.parametrize(
    "error",
    [ContractMismatch("template"), InvalidRequest("site"), PermissionDenied("role"), Unauthenticated("revoked")],
)
def test_refusal_that_no_repetition_changes_is_not_waited_for(error):
    with pytest.raises(type(error)):
        Backoff(clock=ManualClock(), rng=random.Random(0)).next_delay(error)


def test_an_expired_certificate_is_waited_for_because_a_new_one_may_come():
    assert (
        Backoff(clock=ManualClock(), rng=random.Random(0)).next_delay(Unauthenticated("expired", retry_after_s=5.0))
        >= 5.0
    )


@pytest.mark.parametrize(
    ("asked", "waited"), [(3.0, 3.0), (1e18, 600.0), (float("inf"), 0.0), (float("nan"), 0.0), (-5.0, 0.0), (0.0, 0.0)]
)
def test_wait_that_a_peer_asks_for_has_an_end(asked, waited):
    assert peer_seconds(asked) == waited
    assert waited <= Backoff(clock=ManualClock(), rng=random.Random(0)).delay_s(asked_s=asked) <= waited + 1.0


def test_delays_stay_below_the_cap_through_an_outage_of_days():
    backoff = Backoff(clock=ManualClock(), rng=random.Random(0), base_s=1.0, cap_s=15.0)

    # 2^1024 is no float: 15 s a failure reach it after four hours.
    assert max(backoff.delay_s() for _ in range(20_000)) <= 15.0


def test_a_row_of_failures_ends_after_its_budget():
    clock = ManualClock()
    backoff = Backoff(clock=clock, rng=random.Random(0), budget_s=30.0)
    for _ in range(2):
        backoff.next_delay(Unreachable("cut"))
        clock.advance(29.0)
        backoff.next_delay(Unreachable("cut"))
        backoff.reset()
    backoff.next_delay(Unreachable("cut"))
    clock.advance(30.0)
    with pytest.raises(Unreachable):
        backoff.next_delay(Unreachable("cut"))
