"""The coordinator against a model of plain dicts: any order of calls, restarts and jumps of time; nothing is lost."""

import asyncio
import dataclasses
import math
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heterorl.common.errors import GroupNotAvailable, LeaseHeld, ParentNotHead, Quarantined, StaleEpoch
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, GroupId, PushStatus, Rejection
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger, work_assignments
from heterorl.coordinator.groups.queue import LATE_EVERY
from heterorl.coordinator.groups.work_assignments import MAX_IN_ROW, MAX_RETURNS
from tests.support.clock import ManualClock
from tests.support.examples import examples
from tests.support.limits import WAIT_S
from tests.support.run import CONTRACT, INCARNATION, Run

SITES = ("eu-1", "us-1")
PER_VERSION, BOUND, LIMIT = 2, 3, 9
MAX_AGE_S, WORK_LEASE_S, LEARNER_LEASE_S = 500.0, 60.0, 10.0
REOPENED_ELSEWHERE = {DropReason.STALE_AT_LEASE, DropReason.STALE_AT_COMMIT, DropReason.LINEAGE_ABANDONED,
                      DropReason.QUARANTINED, DropReason.UNKNOWN_VERSION}  # fmt: skip
SHARING_S = 60.0


@dataclasses.dataclass
class Work:
    """An assignment in the model; `deadline` is None when it is open, inf until the first request after a restart."""

    prompt_index: int
    seed: int
    site: str = ""
    deadline: float | None = None
    holders: set = dataclasses.field(default_factory=set)
    is_answered: bool = False
    open_from: int = 0
    returned: dict = dataclasses.field(default_factory=dict)


class Model(RuleBasedStateMachine):
    """Each rule calls the coordinator and predicts its answer from dicts."""

    lease_order = "oldest"

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="conservation-"))
        self.clock = ManualClock()
        self.core = None
        self.groups = {}  # GroupId -> [state, reason, oldest version, arrival, assignment]
        self.pushed = {}  # GroupId -> Group
        self.work = {}
        self.published = {}
        self.abandoned = set()
        self.failures = dict.fromkeys(SITES, 0)
        self.quarantined = set()
        self.sequences = dict.fromkeys(SITES, 0)
        self.lease_ends = 0.0
        self.asked = {}
        self.owed = dict.fromkeys(SITES, 0)
        self.in_row = dict.fromkeys(SITES, 0)
        self.closed = Counter()

    def wait(self, awaitable):
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, WAIT_S))

    @initialize()
    def begin(self):
        self.open()
        self.run = Run(self.core, self.directory)
        self.wait(self.run.begin())
        self.lease_ends = self.clock.monotonic() + LEARNER_LEASE_S
        self.publish_now()
        for site in SITES:
            self.wait(self.run.register(site))

    def open(self):
        config = CoordinatorConfig(
            data_dir=self.directory / "data",
            groups_per_version=PER_VERSION,
            max_staleness_versions=BOUND,
            max_superseded_s=MAX_AGE_S,
            max_outstanding_groups=LIMIT,
            work_lease_s=WORK_LEASE_S,
            learner_lease_s=LEARNER_LEASE_S,
            quarantine_failures=2,
            lease_order=self.lease_order,
        )
        self.core = self.wait(Coordinator.open(config, self.clock))

    def teardown(self):
        if self.core is not None:
            self.wait(self.core.close())
        self.loop.close()
        shutil.rmtree(self.directory)

    # the model

    def of(self, *states):
        chosen = [(entry[2], entry[3], group_id) for group_id, entry in self.groups.items() if entry[0] in states]
        return [group_id for _, _, group_id in sorted(chosen)]

    def drop(self, group_id, reason):
        entry = self.groups[group_id]
        entry[:2] = "dropped", reason
        if reason in REOPENED_ELSEWHERE:
            work = self.work[entry[4]]
            self.work[entry[4]] = Work(prompt_index=work.prompt_index, seed=work.seed)

    def drop_stale(self):
        now = self.clock.wall()
        for group_id in self.of("pending"):
            version = self.groups[group_id][2]
            if self.run.head - version > BOUND or self.is_old(version, now):
                self.drop(group_id, DropReason.STALE_AT_LEASE)

    def next_groups(self, count):
        """What is leased to a learner with so many credits."""
        return self.of("pending")[:count]

    def is_old(self, version, now):
        """Whether a newer version could be had for longer than the bound."""
        newer = [at for other, at in self.published.items() if other > version and other not in self.abandoned]
        return any(now - at > MAX_AGE_S for at in newer)

    def allowance(self, site, now):
        """How many assignments a site may hold: its share, less what it owes."""
        leased = [work.site for work in self.work.values() if work.deadline is not None]
        self.asked = {name: at for name, at in self.asked.items() if now - at <= SHARING_S}
        wanting = {site, *leased, *self.asked}
        if len(wanting) == 1:
            return LIMIT, leased.count(site)
        equal = math.ceil(LIMIT / len(wanting))
        paying = {name for name in wanting if self.owed[name] < equal}
        share = math.ceil(LIMIT / len(paying)) if site in paying else equal
        self.owed[site] = min(self.owed[site], share)
        return max(1, share - self.owed[site]), leased.count(site)

    def expected_reason(self, site, assignment, version):
        work = self.work[assignment]
        if site in self.quarantined:
            return DropReason.QUARANTINED
        if version in self.abandoned:
            return DropReason.UNKNOWN_VERSION
        if work.is_answered:
            return DropReason.SURPLUS
        if site not in work.holders:
            return DropReason.INVALID
        is_old = self.is_old(version, self.clock.wall())
        return DropReason.STALE_AT_INGEST if self.run.head - version > BOUND or is_old else None

    def publish_now(self, **changes):
        version = self.wait(self.run.publish(**changes))
        self.published[version] = self.clock.wall()

    # the rules

    @rule(site=st.sampled_from(SITES), wanted=st.integers(1, 5), lag=st.integers(0, 5))
    def lease_work(self, site, wanted, lag):
        now, head = self.clock.monotonic(), self.run.head
        version = max(0, head - lag)
        if site in self.quarantined and version not in self.abandoned:
            with pytest.raises(Quarantined):
                self.wait(self.core.lease_work(
                    site=SiteId(site), incarnation=INCARNATION, max_groups=wanted, policy_version=version
                ))  # fmt: skip
            return
        grant = self.wait(
            self.core.lease_work(site=SiteId(site), incarnation=INCARNATION, max_groups=wanted, policy_version=version)
        )
        if version in self.abandoned:
            assert grant.assignments == ()
            return
        for work in self.work.values():
            if work.deadline == math.inf:
                work.deadline = now + WORK_LEASE_S
            elif work.deadline is not None and work.deadline <= now:
                work.deadline = None
                self.owed[work.site] += 1
        if head - version <= BOUND:
            self.asked[site] = now
        allowed, held = self.allowance(site, now)
        outstanding = len(self.of("pending", "leased")) + sum(w.deadline is not None for w in self.work.values())
        granted = 0
        while (
            granted < wanted
            and held + granted < allowed
            and outstanding + granted < LIMIT
            and head + (outstanding + granted) // PER_VERSION - version <= BOUND
        ):
            granted += 1
        unanswered = sorted(
            number
            for number, work in self.work.items()
            if not work.is_answered and work.deadline is None and work.open_from <= len(self.work)
        )
        expected = (unanswered + list(range(len(self.work), len(self.work) + granted)))[:granted]
        assert [entry.id for entry in grant.assignments] == expected, grant.reason
        assert grant.reason
        assert grant.assignments or grant.retry_after_s > 0
        for entry in grant.assignments:
            work = self.work.setdefault(entry.id, Work(prompt_index=entry.prompt_index, seed=entry.seed))
            # The same prompt with the same seed, however often it is handed out.
            assert (work.prompt_index, work.seed) == (entry.prompt_index, entry.seed)
            work.site, work.deadline = site, now + WORK_LEASE_S
            work.holders.add(site)

    @precondition(lambda self: self.work)
    @rule(site=st.sampled_from(SITES), chosen=st.integers(0, 10**6), lag=st.integers(0, 5), skip=st.booleans())
    def push(self, site, chosen, lag, skip):
        # Mostly recent assignments; a skipped sequence leaves a gap below the watermark's successor.
        assignment = len(self.work) - 1 - chosen % min(len(self.work), 6)
        version = max(0, self.run.head - lag)
        self.sequences[site] += 2 if skip else 1
        group_id = GroupId(site=SiteId(site), incarnation=INCARNATION, sequence=self.sequences[site])
        work = self.work[assignment]
        # `Run.group` reads only these two fields of an assignment.
        given = dataclasses.make_dataclass("Given", ["id", "prompt_index"])(assignment, work.prompt_index)
        group = self.run.group(given, version=version, id=group_id)
        reason = self.expected_reason(site, assignment, version)
        (outcome,) = self.wait(self.core.push_groups([group]))
        assert (outcome.status, outcome.reason) == (PushStatus.DROPPED if reason else PushStatus.ACCEPTED, reason), (
            outcome.message
        )
        self.pushed[group_id] = group
        self.groups[group_id] = ["dropped" if reason else "pending", reason, version, len(self.groups), assignment]
        if reason is None:
            work.is_answered, work.deadline = True, None
            self.owed[site] = max(0, self.owed[site] - 1)
            self.in_row[site] = 0
        elif reason in work_assignments.RETURNED:
            self.take_back(assignment, site, work_assignments.RETURNED[reason])
        elif reason is not DropReason.SURPLUS:
            self.give_back(work, site)

    @precondition(lambda self: self.pushed)
    @rule(chosen=st.integers(0, 10**6), is_forged=st.booleans())
    def push_again(self, chosen, is_forged):
        group = list(self.pushed.values())[chosen % len(self.pushed)]
        sent = dataclasses.replace(group, generation_s=group.generation_s + 1) if is_forged else group
        (outcome,) = self.wait(self.core.push_groups([sent]))
        expected = (PushStatus.DROPPED, DropReason.CONFLICT) if is_forged else (PushStatus.DUPLICATE, None)
        assert (outcome.status, outcome.reason) == expected

    @rule(count=st.integers(1, 4), forget=st.integers(0, 2))
    def stream(self, count, forget):
        held = self.of("leased")[forget:]
        for group_id in self.of("leased")[:forget]:
            self.groups[group_id][0] = "pending"
        self.drop_stale()
        expected = self.next_groups(count)

        async def credits():
            yield count

        async def take():
            return [q async for q in self.core.stream_groups(epoch=self.run.epoch, held=held, credits=credits())]

        received = self.wait(take())
        assert [queued.group.id for queued in received] == expected
        for queued in received:
            self.groups[queued.group.id][0] = "leased"
            sent = self.pushed[queued.group.id]
            assert queued.group.rollouts[0].token_ids.tolist() == sent.rollouts[0].token_ids.tolist()
            assert queued.policy_age_s == self.clock.wall() - self.published[queued.group.oldest_version]
        if len(received) < count:
            # It asked for the rest once more.
            self.drop_stale()

    @rule(count=st.integers(0, 3))
    def publish(self, count):
        ids = self.of("leased", "pending")[:count]
        stale = [group_id for group_id in ids if self.run.head - self.groups[group_id][2] > BOUND]
        arena = self.run.arena
        if stale:
            with pytest.raises(GroupNotAvailable):
                self.publish_now(consumed=ids, step_id="refused")
            self.run.arena = arena
            for group_id in stale:
                self.drop(group_id, DropReason.STALE_AT_COMMIT)
            return
        self.publish_now(consumed=ids)
        for group_id in ids:
            self.groups[group_id][:2] = "consumed", self.run.head

    @precondition(lambda self: self.run.head >= 1)
    @rule(back=st.integers(1, 3))
    def roll_back(self, back):
        alive = [version for version in range(self.run.head) if version not in self.abandoned]
        lineage = alive[-min(back, len(alive))]
        lost = set(range(lineage + 1, self.run.head + 1)) - self.abandoned
        self.publish_now(lineage_version=lineage, snapshot=True)
        self.abandoned |= lost
        for group_id in self.of("consumed"):
            if self.groups[group_id][1] in lost:
                self.drop(group_id, DropReason.LINEAGE_ABANDONED)

        for group_id in self.of("pending", "leased"):
            if self.groups[group_id][2] in lost:
                self.drop(group_id, DropReason.UNKNOWN_VERSION)

    def give_back(self, work, site):
        if work.site == site and work.deadline is not None:
            work.deadline = None
            work.holders.discard(site)

    def take_back(self, assignment, site, reason):
        work = self.work[assignment]
        if work.site != site or work.deadline is None:
            return
        wanting = {*self.asked, *(each.site for each in self.work.values() if each.deadline is not None)}
        self.give_back(work, site)
        if self.in_row[site] < MAX_IN_ROW:
            self.in_row[site] += 1
            work.returned[site] = work.returned.get(site, 0) + 1
            if sum(work.returned.values()) >= MAX_RETURNS and (len(work.returned) > 1 or len(wanting) == 1):
                work.is_answered = True
                self.closed[reason] += 1
        work.open_from = len(self.work) + (PER_VERSION << max(0, sum(work.returned.values()) - 1))

    @rule(is_other=st.booleans())
    def take_over(self, is_other):
        holder = "other" if is_other else "learner"
        is_held = self.current_holder() != holder and self.clock.monotonic() < self.lease_ends
        request = self.wait(self.run.prepare(step_id="zombie"))
        call = self.core.acquire_lease(holder=holder, contract=CONTRACT, request_id=f"r{self.run.epoch + 1}")
        if is_held:
            with pytest.raises(LeaseHeld):
                self.wait(call)
            return
        old = self.run.epoch
        self.run.epoch = self.wait(call).epoch
        assert self.run.epoch == old + 1
        self.lease_ends = self.clock.monotonic() + LEARNER_LEASE_S
        for group_id in self.of("leased"):
            self.groups[group_id][0] = "pending"
        with pytest.raises(StaleEpoch):
            self.wait(self.core.publish_version(request))

    def current_holder(self):
        return self.wait(self.core.get_status()).learner

    @precondition(lambda self: self.of("leased"))
    @rule(reason=st.sampled_from([DropReason.LEARNER_ABANDONED, DropReason.UNIFORM]))
    def learner_abandons(self, reason):
        group_id = self.of("leased")[0]
        for _ in range(2):
            self.wait(self.core.abandon_groups(epoch=self.run.epoch, ids=[group_id], reason="test", counted_as=reason))
        self.drop(group_id, reason)

    @precondition(lambda self: self.of("leased"))
    @rule(is_repeated=st.booleans())
    def learner_rejects(self, is_repeated):
        group_id = self.of("leased")[0]
        rejection = Rejection(id=group_id, reason=DropReason.LOGPROB_MISMATCH, detail="0.3 nats")
        for _ in range(1 + is_repeated):
            self.wait(self.core.reject_groups(epoch=self.run.epoch, rejections=[rejection]))
        self.drop(group_id, DropReason.LOGPROB_MISMATCH)
        site = group_id.site
        self.failures[site] += 1
        if self.failures[site] >= 2 and site not in self.quarantined:
            self.quarantined.add(site)
            for pending in [other for other in self.of("pending") if other.site == site]:
                self.drop(pending, DropReason.QUARANTINED)
            for work in self.work.values():
                if work.site == site:
                    work.deadline = None

    @rule(site=st.sampled_from(SITES))
    def operator_releases(self, site):
        self.wait(self.core.release_site(site=SiteId(site), reason="test"))
        self.quarantined.discard(site)
        self.failures[site] = 0

    @rule(site=st.sampled_from(SITES), chosen=st.integers(0, 10**6))
    def site_abandons(self, site, chosen):
        assignment = chosen % (len(self.work) + 1)
        self.wait(self.core.abandon_work(site=SiteId(site), incarnation=INCARNATION, assignments=[assignment]))
        work = self.work.get(assignment)
        if work is not None:
            self.give_back(work, site)

    @rule()
    def lost_race_for_the_head(self):
        request = self.wait(self.run.prepare(step_id="late"))
        with pytest.raises(ParentNotHead):
            self.wait(self.core.publish_version(dataclasses.replace(request, parent_version=self.run.head - 1)))

    @rule(seconds=st.sampled_from([1.0, 11.0, 59.0, 200.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def restart(self):
        now = self.clock.monotonic()
        self.wait(self.core.close())
        self.open()
        self.run.api = self.core
        self.lease_ends = now + LEARNER_LEASE_S
        for work in self.work.values():
            work.deadline = work.deadline and math.inf
        # Who asked and who owes is not durable: it decides only who works.
        self.asked, self.owed = {}, dict.fromkeys(SITES, 0)

    @invariant()
    def every_group_has_one_account(self):
        if self.core is None:
            return
        counts = self.wait(self.core.database.run(ledger.counts))
        assert counts == self.wait(self.core.database.run(ledger.recount))
        assert counts.is_balanced
        states = [entry[0] for entry in self.groups.values()]
        assert (counts.acked, counts.pending, counts.leased, counts.consumed) == (
            len(states),
            states.count("pending"),
            states.count("leased"),
            states.count("consumed"),
        )
        dropped = [entry[1] for entry in self.groups.values() if entry[0] == "dropped"]
        assert counts.dropped == {reason: dropped.count(reason) for reason in set(dropped)}
        assert counts.closed == self.closed


class NewestFirst(Model):
    """The same under the other order: newest version first, then by arrival within the window; each fourth behind it."""

    lease_order = "newest"
    num_passed = 0

    def open(self):
        super().open()
        self.num_passed = 0

    def newest_taken(self):
        return max((self.groups[group_id][2] for group_id in self.of("leased", "consumed")), default=-1)

    def next_groups(self, count):
        taken, pending, chosen = self.newest_taken(), self.of("pending"), []
        while len(chosen) < count:
            left = [one for one in pending if one not in chosen]
            waiting = [one for one in left if self.groups[one][2] >= taken - BOUND // 2]
            late = [one for one in left if one not in waiting]
            if not left:
                break
            if late and (not waiting or self.num_passed == LATE_EVERY - 1):
                # In the order of pending groups: by version, then by arrival.
                chosen.append(late[0])
                self.num_passed = 0
                continue
            self.num_passed += bool(late)
            newest = max(self.groups[one][2] for one in waiting)
            first = [one for one in waiting if self.groups[one][2] == newest] if newest > taken else waiting
            chosen.append(min(first, key=lambda one: self.groups[one][3]))
            taken = max(taken, newest)
        return chosen


SETTINGS = settings(
    max_examples=examples(5), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
Model.TestCase.settings = NewestFirst.TestCase.settings = SETTINGS
TestConservation = pytest.mark.timeout(300)(Model.TestCase)
TestConservationNewestFirst = pytest.mark.timeout(300)(NewestFirst.TestCase)
