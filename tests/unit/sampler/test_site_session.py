"""What a heartbeat's refusals mean for the process."""

import asyncio
import logging
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from heterorl.common.errors import InvalidRequest, PermissionDenied, QuotaExceeded, Unauthenticated, Unreachable
from heterorl.common.process.clock import Bell
from heterorl.common.types.run import Heartbeat
from heterorl.common.wire.common_messages import to_message
from heterorl.coordinator.rpc import bounds
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.site_session import MAX_HELD, Session
from heterorl.sampler.trust_record import TrustRecord
from heterorl.v1 import run_pb2
from tests.support.clock import ManualClock
from tests.support.run import SITE, Run

REPORT = Heartbeat(site=SITE, incarnation="1", policy_version=-1, state_root="", tokens_per_s=0.0)


class Refusing:
    """Answers every heartbeat with one error; `enough` is set at the third."""

    def __init__(self, error):
        self.error = error
        self.beats = 0
        self.enough = asyncio.Event()

    async def heartbeat(self, beat):
        self.beat, self.beats = beat, self.beats + 1
        if self.beats == 3:
            self.enough.set()
        raise self.error


class PassingClock(ManualClock):
    """Sleeps cost nothing."""

    async def sleep(self, seconds):
        self.advance(seconds)
        await asyncio.sleep(0)


@pytest.fixture
def outbox(tmp_path):
    outbox = Outbox(tmp_path / "spool")
    yield outbox
    outbox.close()


def session_of(api, outbox, tmp_path):
    return Session(
        api=api,
        registration=Run(None, tmp_path).registration(),
        outbox=outbox,
        record=TrustRecord(tmp_path / "versions.jsonl"),
        heartbeat_s=2.0,
        clock=PassingClock(),
        bell=Bell(),
        rng=random.Random(0),
    )


class Registering:
    """Takes every registration."""

    def __init__(self):
        self.returned = []

    async def abandon_work(self, **given):
        self.returned += given["assignments"]

    async def register(self, registration):
        self.stated = registration
        return SimpleNamespace(run_id="run", head_version=-1, next_sequence=1, work_ahead_s=0.0)


async def test_an_outbox_beyond_what_a_registration_states_still_accuses_the_rows_of_a_killed_process(outbox, tmp_path):
    rows = [(number, 0.0, 0, b"", b"", number) for number in range(1, MAX_HELD + 2)]
    outbox._connection.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)", rows)
    api = Registering()
    session = session_of(api, outbox, tmp_path)
    session.left = (MAX_HELD + 1, MAX_HELD + 2)
    await session.register()

    assert api.stated.held is None
    assert api.returned == [MAX_HELD + 2]
    # The reserve's questions know all of them.
    assert len(outbox.assignments()) == MAX_HELD + 1


async def test_a_long_problem_refuses_no_heartbeat(outbox, tmp_path):
    api = Refusing(Unauthenticated("it is the last one"))
    with pytest.raises(Unauthenticated):
        await session_of(api, outbox, tmp_path).beat(lambda: replace(REPORT, problem=f"refused:\n{'user, ' * 1000}"))

    bounds.check(to_message(run_pb2.HeartbeatRequest, api.beat))
    assert api.beat.problem.startswith("refused: user, ")


@pytest.mark.parametrize("error", [Unauthenticated("certificate 1 is revoked"), PermissionDenied("of another run")])
async def test_sampler_that_is_refused_for_good_ends_also_before_its_first_version(outbox, tmp_path, error):
    """Without a version it asks for no work, and every other loop waits for something that will never come."""
    api = Refusing(error)

    with pytest.raises(type(error)):
        await session_of(api, outbox, tmp_path).beat(lambda: REPORT)
    assert api.beats == 1


@pytest.mark.parametrize(
    "error",
    [
        Unauthenticated("the certificate has expired", retry_after_s=5.0),
        Unreachable("cut"),
        QuotaExceeded("too many", retry_after_s=1.0),
        InvalidRequest("problem: a field that this release writes otherwise"),
    ],
)
async def test_heartbeat_that_fails_otherwise_is_forgotten(outbox, tmp_path, caplog, error):
    caplog.set_level(logging.INFO)
    api = Refusing(error)
    beating = asyncio.create_task(session_of(api, outbox, tmp_path).beat(lambda: REPORT))
    await api.enough.wait()

    assert not beating.done()
    beating.cancel()
    await asyncio.wait([beating])
    is_the_links = isinstance(error, Unauthenticated | Unreachable)
    assert ("the heartbeat failed" in caplog.text) != is_the_links, "the link says it once, then rarely"
