"""Work ahead: what a silent site holds counts against nobody, waits for its return, and is handed out again at last."""

import dataclasses

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.rollout import DropReason, GroupId, PushStatus
from heterorl.common.types.run import Heartbeat
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.groups.work_assignments import Term, next_look, term_of
from heterorl.coordinator.sites.sites import Declared
from heterorl.coordinator.store import tallies
from tests.support.clock import ManualClock
from tests.support.run import CONTRACT, INCARNATION, Run, credits_of

AHEAD_S, LEASE_S = 600.0, 100.0


@pytest.mark.parametrize(
    ("delay_s", "ahead_s", "is_silent", "is_replaced", "expected"),
    [
        (0, 0, False, False, Term(seconds=100)),
        (0, 0, True, False, Term(seconds=100)),
        (30, 0, False, False, Term(seconds=130)),
        (30, 0, True, False, Term(seconds=100)),  # one that died delivers nothing
        (30, 600, False, False, Term(seconds=730)),
        (30, 600, True, False, Term(seconds=730, is_away=True)),
        (30, 600, False, True, Term(seconds=730)),  # both live: it is not for the coordinator to say which is right
        (30, 600, True, True, Term(seconds=100)),  # a newer outbox has taken its place
    ],
)
def test_term_depends_on_what_was_declared_and_on_silence(delay_s, ahead_s, is_silent, is_replaced, expected):
    said = Declared(delay_s=delay_s, ahead_s=ahead_s)
    assert term_of(said, lease_s=LEASE_S, is_silent=is_silent, is_replaced=is_replaced) == expected


@pytest.mark.parametrize(
    ("delay_s", "ahead_s", "seen", "is_silent", "seconds", "expected"),
    [
        (0, 0, 50, False, 100, 110),  # no silence changes it
        (30, 0, 50, False, 130, 140),  # silent at 150, but the term would end at 140 in any case
        (90, 0, 50, False, 190, 150),  # silent at 150: then it has ended
        (90, 0, 5, False, 190, 110),  # the lease itself ends later than the silence begins
        (0, 600, 50, False, 700, 150),  # goes away
        (0, 600, 50, True, 700, 710),
        (0, 600, 690, False, 700, 710),
    ],
)
def test_next_look_is_never_later_than_a_change(delay_s, ahead_s, seen, is_silent, seconds, expected):
    said = Declared(delay_s=delay_s, ahead_s=ahead_s)
    term = Term(seconds=seconds, is_away=is_silent)
    assert next_look(said, term, oldest=10, seen=seen, lease_s=LEASE_S, is_silent=is_silent) == expected


class World:
    def __init__(self, core, run, clock):
        self.core, self.run, self.clock = core, run, clock
        self.sequences = {}

    async def ask(self, site, count=4096, **changes):
        values = {"policy_version": self.run.head, **changes}
        return await self.core.lease_work(site=site, incarnation=INCARNATION, max_groups=count, **values)

    async def lease(self, site, count=4096, **changes):
        return (await self.ask(site, count, **changes)).assignments

    async def push(self, site, assignments, **changes):
        groups = []
        for work in assignments:
            self.sequences[site] = self.sequences.get(site, 0) + 1
            group_id = GroupId(site=site, incarnation=INCARNATION, sequence=self.sequences[site])
            groups.append(dataclasses.replace(self.run.group(work, **changes), id=group_id))
        return [outcome.reason or outcome.status for outcome in await self.core.push_groups(groups)]

    async def beat(self, *sites):
        for site in sites:
            beat = Heartbeat(site=site, incarnation=INCARNATION, policy_version=0, state_root="", tokens_per_s=0.0)
            await self.core.heartbeat(beat)

    async def pass_time(self, seconds, *living):
        """Time passes in which some sites are heard of."""
        while seconds > 0:
            self.clock.advance(min(seconds, 50.0))
            seconds -= 50.0
            await self.beat(*living)

    async def count(self, name):
        return await self.core.database.run(lambda connection: tallies.read(connection, name))

    async def status(self, site):
        return next(each for each in (await self.core.get_status()).sites if each.site == site)


@pytest.fixture
async def begin(tmp_path):
    worlds = []

    async def start(*, clock=None, again=None, contract=CONTRACT, **changes):
        clock = clock or ManualClock()
        values = {
            "data_dir": tmp_path / "data", "groups_per_version": 8, "max_outstanding_groups": 32,
            "max_staleness_versions": 8, "work_lease_s": LEASE_S, **changes,
        }  # fmt: skip
        core = await Coordinator.open(CoordinatorConfig(**values), clock)
        if again is not None:
            again.core, again.run.api = core, core
            return again
        run = Run(core, tmp_path)
        run.contract = contract
        await run.begin()
        await run.publish()
        for site in ("far", "near"):
            await core.register(run.registration(site=site, work_ahead_s=AHEAD_S))
        worlds.append(World(core, run, clock))
        return worlds[-1]

    yield start
    for world in worlds:
        await world.core.close()


async def test_site_alone_leaves_room_for_a_newcomer(begin):
    world = await begin()
    assert len(await world.lease("far")) == 24
    assert (await world.ask("far")).reason == "quota: the site holds 24 assignments, its share is 24"
    assert len(await world.lease("near")) == 8
    assert await world.count("out") == 32


async def test_what_a_silent_site_holds_counts_against_nobody_and_is_taken_when_it_returns(begin):
    world = await begin()
    far = await world.lease("far")
    await world.pass_time(LEASE_S + 1, "near")

    # It is away: the other one is alone, and gets new prompts, not those of the site that is away.
    near = await world.lease("near")
    assert len(near) == 24
    assert not {work.id for work in near} & {work.id for work in far}
    assert (await world.count("out"), await world.count("away")) == (24, 24)
    status = await world.status("far")
    assert (status.work_leased, status.work_away, status.work_ahead_s) == (24, 24, AHEAD_S)

    await world.pass_time(AHEAD_S - LEASE_S - 50, "near")
    assert await world.push("far", far[:20]) == [PushStatus.ACCEPTED] * 20
    # It holds the rest: no more for it. The others' share is not touched by what came back.
    assert (await world.status("far")).work_leased == 4
    assert await world.count("away") == 4
    counts = await world.core.database.run(ledger.counts)
    assert counts.pending == 20
    assert counts.is_balanced


async def test_returned_reserve_starves_nobody(begin):
    world = await begin()
    far = await world.lease("far")
    await world.pass_time(LEASE_S + 1, "near")
    near = await world.lease("near", 16)
    # It is back, and slow: 24 are out with it. Each of the two can hold its half.
    await world.pass_time(1, "far", "near")
    assert await world.lease("far") == ()
    assert await world.push("near", near) == [PushStatus.ACCEPTED] * 16
    ids = [GroupId(site="near", incarnation=INCARNATION, sequence=number + 1) for number in range(16)]
    await world.core.abandon_groups(epoch=world.run.epoch, ids=ids, reason="makes room")
    assert len(await world.lease("near")) == 16
    assert await world.push("far", far) == [PushStatus.ACCEPTED] * 24


async def test_site_that_left_for_good_keeps_no_prompt(begin):
    world = await begin()
    far = await world.lease("far")
    await world.pass_time(LEASE_S + AHEAD_S - 1, "near")
    near = await world.lease("near", 8)
    assert not {work.id for work in near} & {work.id for work in far}
    await world.pass_time(1, "near")
    near = await world.lease("near", 8)
    assert [work.id for work in near] == [work.id for work in far][:8]
    # It may still answer, once.
    assert await world.push("near", near[:1]) == [PushStatus.ACCEPTED]
    assert await world.push("far", far[:2]) == [DropReason.SURPLUS, PushStatus.ACCEPTED]


async def test_late_groups_beyond_the_staleness_bound_are_counted_and_their_prompts_handed_out_again(begin):
    world = await begin(max_staleness_versions=1)
    (work,) = await world.lease("far", 1)
    await world.pass_time(LEASE_S + 1, "near")
    for _ in range(2):
        await world.run.publish()
    assert await world.push("far", [work], version=0) == [DropReason.STALE_AT_INGEST]
    assert work.id not in [again.id for again in await world.lease("near", 8)], "it waits behind a version's worth"
    assert [again.id for again in await world.lease("near", 1)] == [work.id]


async def test_site_that_does_not_work_ahead_is_as_before(begin):
    world = await begin(max_work_ahead_s=0)
    answer = await world.core.register(world.run.registration(site="far", work_ahead_s=AHEAD_S))
    assert answer.work_ahead_s == 0
    far = await world.lease("far")
    assert len(far) == 32
    await world.pass_time(LEASE_S, "near")
    assert [work.id for work in await world.lease("near", 4)] == [work.id for work in far][:4]


async def test_bound_of_the_coordinator_is_told_and_kept(begin):
    world = await begin(max_work_ahead_s=200.0)
    answer = await world.core.register(world.run.registration(site="far", work_ahead_s=AHEAD_S))
    assert answer.work_ahead_s == 200.0
    far = await world.lease("far", 4)
    assert far[0].lease_s == LEASE_S + 200.0
    await world.pass_time(LEASE_S + 200.0, "near")
    assert [work.id for work in await world.lease("near", 4)] == [work.id for work in far]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_what_is_no_number_of_seconds_is_refused(begin, seconds):
    world = await begin()
    with pytest.raises(InvalidRequest, match="work_ahead_s"):
        await world.core.register(world.run.registration(site="far", work_ahead_s=seconds))


async def test_process_that_begins_anew_says_what_it_can_still_answer(begin):
    world = await begin()
    far = await world.lease("far")
    held = tuple(work.id for work in far[:3])
    await world.core.register(world.run.registration(site="far", work_ahead_s=AHEAD_S, held=held))
    assert (await world.status("far")).work_leased == 3

    # The others go on at once, and this process answers them no more.
    assert [work.id for work in await world.lease("near", 4)] == [work.id for work in far[3:7]]
    assert await world.push("far", far[2:4]) == [PushStatus.ACCEPTED, DropReason.INVALID]


async def test_newer_outbox_of_a_site_ends_the_wait_for_the_older_one(begin):
    world = await begin()
    far = await world.lease("far")
    await world.pass_time(LEASE_S + 1, "near")
    await world.lease("near", 1)
    assert await world.count("away") == 24
    await world.core.register(world.run.registration(site="far", incarnation="inc-2", work_ahead_s=AHEAD_S))
    assert [work.id for work in await world.lease("near", 4)] == [work.id for work in far[:4]]
    assert await world.count("away") == 0


async def test_terms_begin_anew_with_the_coordinator(begin, tmp_path):
    world = await begin()
    far = await world.lease("far")
    await world.pass_time(LEASE_S + AHEAD_S - 1, "near")
    await world.core.close()
    await begin(clock=world.clock, again=world)
    # Known from the store: the declared time, and what is out; it counts again until the site was silent for a lease.
    assert await world.count("out") == 24
    assert len(await world.lease("near")) == 8
    await world.pass_time(LEASE_S + 1, "near")
    assert len(await world.lease("near")) == 16
    assert await world.count("away") == 24
    await world.pass_time(AHEAD_S - 1, "near")
    await world.lease("near", 1)
    assert await world.count("away") == 0
    assert await world.push("far", far[:1]) == [PushStatus.ACCEPTED]


async def test_site_that_goes_away_twice_is_away_twice(begin):
    world = await begin()
    far = await world.lease("far", 4)
    await world.pass_time(LEASE_S + 1, "near")
    await world.lease("near", 1)
    await world.beat("far")
    assert len(await world.lease("far", 4)) == 4
    assert (await world.count("away"), await world.count("out")) == (4, 5)
    await world.pass_time(LEASE_S + 1, "near")
    await world.lease("near", 1)
    assert (await world.count("away"), await world.count("out")) == (8, 2)
    assert await world.push("far", far) == [PushStatus.ACCEPTED] * 4


LONG = dataclasses.replace(CONTRACT, max_turns=8, max_trajectory_tokens=64, trajectory_s=600.0)
"""Rollouts of several turns, of up to ten minutes."""


async def long_world(begin, **changes):
    """Sites that do not work ahead, and hold less than all."""
    return await begin(contract=LONG, max_work_ahead_s=0, site_work_groups=4, **changes)


async def rounds(world, seconds, *living):
    """The near site answers all it gets after 5 s, and every 8 groups are a version; returns what it was given."""
    given = []
    for _ in range(int(seconds / 5)):
        work = await world.lease("near", 4)
        given += [each.id for each in work]
        world.clock.advance(5.0)
        await world.beat(*living)
        assert await world.push("near", work, generation_s=5.0) == [PushStatus.ACCEPTED] * len(work)
        taken = world.run.api.stream_groups(epoch=world.run.epoch, held=[], credits=credits_of(4))
        await world.run.publish(consumed=[queued.group.id async for queued in taken])
    return given


@pytest.mark.slow
async def test_trajectory_of_ten_minutes_is_not_handed_out_again_while_its_site_lives(begin):
    world = await long_world(begin, max_staleness_versions=1000)
    far = await world.lease("far", 4)
    assert [work.lease_s for work in far] == [LEASE_S + 600.0] * 4
    given = await rounds(world, 600.0, "far", "near")

    assert len(given) == 480
    assert not set(given) & {work.id for work in far}
    assert (await world.status("far")).work_leased == 4
    assert await world.push("far", far, version=0, generation_s=600.0) == [PushStatus.ACCEPTED] * 4


async def test_trajectories_stay_with_a_site_that_starts_again_within_a_lease(begin):
    world = await long_world(begin)
    far = await world.lease("far", 4)
    await world.pass_time(300.0, "far", "near")
    await world.pass_time(LEASE_S - 1, "near")
    held = tuple(work.id for work in far)
    await world.core.register(world.run.registration(site="far", held=held))
    await world.pass_time(300.0, "far", "near")

    assert not {work.id for work in await world.lease("near", 4)} & set(held)
    assert await world.push("far", far, version=0) == [PushStatus.ACCEPTED] * 4


async def test_trajectories_of_a_site_that_died_go_to_others_after_a_lease(begin):
    world = await long_world(begin)
    far = await world.lease("far", 4)
    await world.pass_time(LEASE_S + 1, "near")

    assert [work.id for work in await world.lease("near", 4)] == [work.id for work in far]


async def test_trajectories_that_end_never_go_to_others_after_their_time(begin):
    world = await long_world(begin)
    far = await world.lease("far", 4)
    await world.pass_time(LEASE_S + 600.0 - 1, "far", "near")
    (new,) = await world.lease("near", 1)
    assert new.id not in {work.id for work in far}
    await world.pass_time(1, "far", "near")

    near = await world.lease("near", 3)
    assert [work.id for work in near] == [work.id for work in far][:3]
    # Late, and not answered by another: taken. Answered: one too many.
    assert await world.push("near", near[:1]) == [PushStatus.ACCEPTED]
    assert await world.push("far", far[:2]) == [DropReason.SURPLUS, PushStatus.ACCEPTED]


@pytest.mark.slow
async def test_a_site_whose_groups_come_too_late_gets_work_when_versions_come_less_often(begin):
    world = await long_world(begin, max_staleness_versions=20)
    far = await world.lease("far", 4)
    assert len(far) == 4, "nothing is known of it yet"
    await rounds(world, 600.0, "far", "near")
    assert await world.push("far", far, version=0, generation_s=600.0) == [DropReason.STALE_AT_INGEST] * 4

    near = [*await world.lease("near", 4)]
    for site in ("third", "fourth"):
        await world.core.register(world.run.registration(site=site))
        near += await world.lease(site, 4)
    assert len((await world.ask("far", 4)).assignments) == 1, "its next group may be faster"
    grant = await world.ask("far", 4)
    assert (grant.assignments, grant.reason) == (
        (), "paced: 119 versions come while the site makes a group, at 0 behind; max_staleness_versions is 20",
    )  # fmt: skip
    # A run that stands still makes no group stale.
    await world.pass_time(30.0, "far", "near")
    assert len(await world.lease("far", 4)) == 3, "and it holds one"


async def test_a_site_that_became_faster_gets_its_work_again(begin):
    world = await long_world(begin, max_staleness_versions=8)
    far = await world.lease("far", 4)
    await rounds(world, 600.0, "far", "near")
    # The first groups also waited for a download.
    await world.push("far", far, version=0, generation_s=600.0)
    for site in ("third", "fourth"):
        await world.core.register(world.run.registration(site=site))
        await world.lease(site, 4)
    await world.lease("near", 4)
    granted = []
    while not granted or (granted[-1] < 4 and len(granted) < 60):
        work = (await world.ask("far", 4)).assignments
        granted.append(len(work))
        await world.push("far", work, generation_s=5.0)
        world.clock.advance(5.0)
        await world.beat("far", "near", "third", "fourth")
        taken = world.run.api.stream_groups(epoch=world.run.epoch, held=[], credits=credits_of(8))
        await world.run.publish(consumed=[queued.group.id async for queued in taken])
    assert granted[0] == 1
    assert granted[-1] == 4


async def test_a_site_alone_is_not_paced_by_its_own_versions(begin):
    world = await begin(contract=LONG, max_work_ahead_s=0, max_staleness_versions=20)
    held = list(await world.lease("near", 12))
    for _ in range(30):
        world.clock.advance(5.0)
        assert await world.push("near", held[:4], generation_s=600.0) == [PushStatus.ACCEPTED] * 4
        taken = world.run.api.stream_groups(epoch=world.run.epoch, held=[], credits=credits_of(4))
        await world.run.publish(consumed=[queued.group.id async for queued in taken])
        new = await world.lease("near", 4)
        assert len(new) == 4
        held = [*held[4:], *new]
