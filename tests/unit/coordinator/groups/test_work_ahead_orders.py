"""Many sites lease, fall silent, return and push in any order: nothing is answered twice, nobody starves, none is lost."""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GroupId, PushStatus
from heterorl.common.types.run import Heartbeat
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.store import tallies
from heterorl.coordinator.store.database import get_meta
from heterorl.coordinator.store.sqlite import SqliteEngine
from heterorl_research.lab.inline_store import InlineDatabase
from tests.support.clock import ManualClock
from tests.support.examples import examples
from tests.support.run import INCARNATION, Run

SITES = ("a", "b", "c", "d", "e")
LIMIT, PER_VERSION, LEASE_S, AHEAD_S = 24, 4, 100.0, 400.0
TERM_S = LEASE_S + AHEAD_S


class Orders:
    """The coordinator, and what must be true of it from the calls alone. Sites beat with every passing of time or are
    silent; each call is a sign of life too."""

    def __init__(self, core, run, clock):
        self.core, self.run, self.clock = core, run, clock
        self.seen = dict.fromkeys(SITES, clock.monotonic())
        self.silent = set()
        self.sequence = dict.fromkeys(SITES, 0)
        self.held = {site: {} for site in SITES}
        self.accepted = set()

    async def lease(self, site, count):
        now = self.clock.monotonic()
        grant = await self.core.lease_work(
            site=SiteId(site), incarnation=INCARNATION, max_groups=count, policy_version=self.run.head
        )
        self.seen[site] = now
        for work in grant.assignments:
            assert work.id not in self.accepted
            holders = [other for other in SITES if other != site and work.id in self.held[other]]
            for other in holders:
                # Handed out anew only when its time with the other one was over, or that one was not heard of again.
                assert now >= self.held[other][work.id] + TERM_S
            self.held[site][work.id] = now
        counted = await self.core.database.run(tallies.outstanding)
        if grant.assignments:
            assert counted <= LIMIT
        await self.has_its_share(site, count, len(grant.assignments), counted)

    async def has_its_share(self, site, count, granted, counted):
        def read(connection):
            owed, held = connection.execute("SELECT owed, held FROM temp.sharer WHERE site = ?", (site,)).fetchone()
            return owed, held, connection.execute("SELECT count(*) FROM temp.sharer WHERE counted > 0").fetchone()[0]

        owed, held, holding = await self.core.database.run(read)
        if granted == count or owed or counted >= LIMIT:
            return
        # It holds what is its own among all that may want something; those that are away are none of them.
        living = sum(self.clock.monotonic() - self.seen[each] <= LEASE_S for each in SITES)
        assert held >= min(LIMIT - LIMIT // 4, LIMIT // max(1, living, holding))

    async def push(self, site, count):
        self.seen[site] = self.clock.monotonic()
        groups = []
        for assignment in list(self.held[site])[:count]:
            del self.held[site][assignment]
            self.sequence[site] += 1
            given_ = dataclasses.make_dataclass("Given", ["id", "prompt_index"])
            prompt = await self.core.database.run(lambda c, n=assignment: self.prompt_of(c, n))
            group_id = GroupId(site=SiteId(site), incarnation=INCARNATION, sequence=self.sequence[site])
            groups.append(dataclasses.replace(self.run.group(given_(assignment, prompt)), id=group_id))
        for group, outcome in zip(groups, await self.core.push_groups(groups), strict=True):
            if outcome.status is PushStatus.ACCEPTED:
                assert group.assignment not in self.accepted
                self.accepted.add(group.assignment)

    def prompt_of(self, connection, assignment):
        row = connection.execute("SELECT prompt_index FROM work WHERE assignment = ?", (assignment,)).fetchone()
        return row[0] if row else 0

    async def consume(self, count):
        def oldest(connection):
            return connection.execute(
                "SELECT site, incarnation, sequence FROM groups WHERE state = 'pending' ORDER BY arrival LIMIT ?",
                (count,),
            ).fetchall()

        rows = await self.core.database.run(oldest)
        ids = [GroupId(site=a, incarnation=b, sequence=c) for a, b, c in rows]
        await self.core.abandon_groups(epoch=self.run.epoch, ids=ids, reason="trained")

    async def turn(self, site):
        self.silent ^= {site}

    async def wait(self, seconds):
        while seconds > 0:
            self.clock.advance(min(seconds, 50.0))
            seconds -= 50.0
            for site in set(SITES) - self.silent:
                self.seen[site] = self.clock.monotonic()
                await self.core.heartbeat(
                    Heartbeat(site=SiteId(site), incarnation=INCARNATION, policy_version=0, state_root="",
                              tokens_per_s=0.0)
                )  # fmt: skip

    async def finish(self):
        """All sites but one leave for good: the last one gets every prompt that nobody answered."""
        self.silent = set(SITES) - {"a"}
        self.held["a"].clear()
        await self.wait(TERM_S)
        last = int(await self.core.database.run(lambda c: get_meta(c, "next_assignment")) or 0)
        for _ in range(200):
            if self.accepted >= set(range(last)):
                break
            await self.consume(4 * LIMIT)
            await self.lease("a", 4096)
            await self.push("a", 4096)
        assert self.accepted >= set(range(last))
        counts = await self.core.database.run(ledger.counts)
        assert counts == await self.core.database.run(ledger.recount)
        assert counts.is_balanced


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.sampled_from(SITES), st.sampled_from([1, 5, 4096])),
        st.tuples(st.just("push"), st.sampled_from(SITES), st.sampled_from([1, 3, 50])),
        st.tuples(st.just("turn"), st.sampled_from(SITES)),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 60.0, 101.0, 450.0])),
        st.tuples(st.just("consume"), st.sampled_from([1, 4, 50])),
    ),
    max_size=40,
)


async def play(steps):
    clock = ManualClock()
    with tempfile.TemporaryDirectory(prefix="orders-") as directory:
        config = CoordinatorConfig(
            data_dir=Path(directory) / "data", groups_per_version=PER_VERSION, max_outstanding_groups=LIMIT,
            max_staleness_versions=64, max_superseded_s=1e9, work_lease_s=LEASE_S,
        )  # fmt: skip
        core = await Coordinator.open(config, clock, store=InlineDatabase)
        if isinstance(core.database._engine, SqliteEngine):
            core.database._engine.connection.execute("PRAGMA synchronous = OFF")
        run = Run(core, Path(directory))
        await run.begin()
        await run.publish()
        for site in SITES:
            await core.register(run.registration(site=SiteId(site), work_ahead_s=AHEAD_S))
        orders = Orders(core, run, clock)
        for name, *arguments in steps:
            await getattr(orders, name)(*arguments)
        await orders.finish()
        await core.close()


@pytest.mark.timeout(240)
@settings(max_examples=examples(24), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
@pytest.mark.slow
def test_any_order_of_silence_and_return(steps):
    asyncio.run(play(steps))
