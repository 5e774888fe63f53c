"""One push stream: several commits under way, answers in the order of the groups, and an end that leaves nothing behind."""

import asyncio

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.common.rpc.server_limits import Caller
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import Group, GroupId, PushOutcome, PushStatus
from heterorl.coordinator.rpc.bounds import PUSH_GROUPS
from heterorl.coordinator.rpc.call_admission import Requests
from heterorl.coordinator.servicers import rollout_servicer as servicer
from heterorl.coordinator.servicers.rollout_servicer import COMMITS, PushStreams
from tests.support.groups import group_to_pb
from tests.support.run import CONTRACT, INCARNATION, SITE, rollout

PLENTY = COMMITS + 3


class Store:
    """Takes groups, and answers when it is told to."""

    def __init__(self):
        self.commits = []
        self.news = asyncio.Event()

    async def stated_contract(self):
        return CONTRACT

    async def take_groups(self, groups):
        answer = asyncio.get_running_loop().create_future()
        self.commits.append(([arrived.id.sequence for arrived in groups], answer))
        self.news.set()
        await answer
        return [PushOutcome(id=arrived.id, status=PushStatus.ACCEPTED) for arrived in groups]

    async def until(self, count):
        while len(self.commits) < count:
            self.news.clear()
            await self.news.wait()


class Messages(Requests):
    """Messages of a call as the door has them, and how many were settled at a time."""

    holder = Caller("sampler eu-1", is_privileged=False, is_proven=True)

    def __init__(self, *messages, then=None):
        self.messages, self.num_bytes, self.settled = iter(messages), 100, []
        self.then = then or StopAsyncIteration()

    def settle_by_hand(self):
        pass

    def settle(self, count):
        self.settled.append(count)

    async def __anext__(self):
        for one in self.messages:
            return one
        raise self.then


def message(sequence):
    value = Group(
        id=GroupId(site=SITE, incarnation=INCARNATION, sequence=sequence), assignment=sequence, prompt_index=1,
        prompt_token_ids=rollout(0).token_ids, rollouts=(rollout(0), rollout(0)), oldest_version=0,
        state_root=Digest("a" * 64), generation_s=1.0,
    )  # fmt: skip
    return [group_to_pb(value)]


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def store():
    return Store()


def numbered(count, *, then=None):
    return Messages(*map(message, range(1, count + 1)), then=then)


@pytest.fixture
def each_alone(monkeypatch):
    """Each message is a commit of its own."""
    monkeypatch.setattr(servicer, "BATCH_BYTES", 1)


@pytest.fixture
async def pushed(store):
    """Begin to push messages: a task that ends with the call, and the sequences that were answered."""
    before = asyncio.all_tasks()
    readers, streams = [], PushStreams(store, max_prompt_tokens=100)

    async def begin(messages):
        outcomes = []

        async def read():
            async for some in streams.outcomes(messages):
                outcomes.extend(outcome.id.sequence for outcome in some)

        readers.append(asyncio.create_task(read()))
        return readers[-1], outcomes

    yield begin
    for reader in readers:
        reader.cancel()
        await asyncio.wait([reader])
    # What the store has begun it ends, whoever waits for it.
    for _, answer in store.commits:
        if not answer.done():
            answer.set_result(None)
    await settled()
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}, "a loop of the call goes on"


@pytest.mark.usefixtures("each_alone")
async def test_commits_of_one_call_are_under_way_together_and_no_more_than_allowed(store, pushed):
    reader, outcomes = await pushed(numbered(PLENTY))
    await store.until(COMMITS)
    await settled()
    assert [sequences for sequences, _ in store.commits] == [[1], [2], [3]]

    # One that is answered makes room for another.
    store.commits[0][1].set_result(None)
    await store.until(COMMITS + 1)
    await settled()
    assert (len(store.commits), outcomes) == (COMMITS + 1, [1])
    for number in range(1, PLENTY):
        await store.until(number + 1)
        store.commits[number][1].set_result(None)
    await reader
    assert outcomes == list(range(1, PLENTY + 1))


@pytest.mark.usefixtures("each_alone")
async def test_answers_come_in_the_order_of_the_groups_whichever_commit_ends_first(store, pushed):
    reader, outcomes = await pushed(numbered(COMMITS))
    await store.until(COMMITS)
    for _, answer in reversed(store.commits):
        answer.set_result(None)
        await settled()
        if answer is not store.commits[0][1]:
            assert outcomes == []
    await reader

    assert outcomes == [1, 2, 3]


@pytest.mark.usefixtures("each_alone")
async def test_what_came_before_a_message_that_is_refused_is_committed_and_answered(store, pushed):
    reader, outcomes = await pushed(numbered(2, then=InvalidRequest("no message")))
    await store.until(2)
    for _, answer in store.commits:
        answer.set_result(None)

    with pytest.raises(InvalidRequest, match="no message"):
        await reader
    assert outcomes == [1, 2]


@pytest.mark.usefixtures("each_alone")
async def test_store_that_fails_ends_the_call_after_the_answers_before_it(store, pushed):
    reader, outcomes = await pushed(numbered(PLENTY))
    await store.until(COMMITS)
    store.commits[0][1].set_result(None)
    store.commits[1][1].set_exception(OSError("the disk is gone"))

    with pytest.raises(OSError, match="the disk is gone"):
        await reader
    assert outcomes == [1]


async def test_messages_that_came_together_share_a_commit_and_are_settled_when_it_is_answered(store, pushed):
    # As many groups as a message may have; the last is one more.
    messages = Messages(message(1), message(2), message(3) * (PUSH_GROUPS - 2), message(4))
    reader, outcomes = await pushed(messages)
    await store.until(2)
    await settled()
    together = [1, 2] + [3] * (PUSH_GROUPS - 2)
    assert ([sequences for sequences, _ in store.commits], messages.settled) == ([together, [4]], [])

    for _, answer in store.commits:
        answer.set_result(None)
    await reader
    assert (outcomes, messages.settled) == ([*together, 4], [3, 1])


@pytest.mark.usefixtures("each_alone")
async def test_calls_of_one_certificate_share_its_commits(store, pushed):
    readers = [await pushed(Messages(*map(message, range(first, first + COMMITS)))) for first in (1, 11)]
    await store.until(COMMITS)
    await settled()
    assert len(store.commits) == COMMITS

    for number in range(2 * COMMITS):
        await store.until(number + 1)
        store.commits[number][1].set_result(None)
    await asyncio.gather(*(reader for reader, _ in readers))
    assert [outcomes for _, outcomes in readers] == [[1, 2, 3], [11, 12, 13]]
