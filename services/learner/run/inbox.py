"""The inbox of leased groups.

    who       waits for                                             unblocked by
    reader    a group of the stream, within the credits             the coordinator; the end of the stream
    scores    a reward worker; several groups at once               the worker; its time limit
    feed      the oldest group's scores, then its replay            the scores' task; a thread. One group at a time
    take      `count` whole groups                                  put, close
    credits   room for another group                                take, skip, close, the next `open_stream`

Groups reach the inbox in the order of the stream. A reward that hangs holds back later groups up to its time limit;
these are scored meanwhile. When a stream ends, its groups are handed on before the next stream names what is held.

The inbox has one condition, whose predicates are checked again after every wake-up. `put` never waits: the peer sends
at most the credits it was given, and groups beyond them are dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from heterorl.common.api import LearnerApi
from heterorl.common.errors import RemoteError, RunFinished
from heterorl.common.process.backoff import Backoff, is_transient
from heterorl.common.types.rollout import GroupId, QueuedGroup, Rejection
from heterorl.learner.checks.findings import SOUND, Finding
from heterorl.learner.checks.verifier import Limits, Scored, Verifier, judge
from heterorl.learner.sample_notes import SampleNotes

_LOG = logging.getLogger(__name__)
_Arrivals = asyncio.Queue[tuple[QueuedGroup, Finding, asyncio.Task[Scored] | None] | None]


class Inbox:
    """A bounded queue of whole groups that knows the held ones.

    A group is held from its arrival until `settle`, when the version with it is acknowledged.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Groups that may wait or be on their way here."""
        self._condition = asyncio.Condition()
        self._waiting: deque[QueuedGroup] = deque()
        self._held: dict[GroupId, float] = {}
        self._granted = 0
        self._stream = 0
        self.is_closed = False
        self.is_over = False
        """Whether it closed because the run has ended."""

    @property
    def held(self) -> tuple[GroupId, ...]:
        return tuple(self._held)

    def held_s(self, group_id: GroupId) -> float:
        """Seconds since a group arrived, by the event loop's clock."""
        now = asyncio.get_running_loop().time()
        return now - self._held.get(group_id, now)

    def open_stream(self) -> tuple[tuple[GroupId, ...], AsyncIterator[int]]:
        """Begin a stream: ids not to send again, and its credits.
        Ends the credits of an earlier stream."""
        self._stream += 1
        self._granted = 0
        return self.held, self._credits(self._stream)

    async def _credits(self, stream: int) -> AsyncIterator[int]:
        while True:
            async with self._condition:
                await self._condition.wait_for(lambda: self._is_over(stream) or self._room() > 0)
                if self._is_over(stream):
                    return
                credit = self._room()
                self._granted += credit
            yield credit

    def _is_over(self, stream: int) -> bool:
        return self.is_closed or stream != self._stream

    def _room(self) -> int:
        return self.capacity - len(self._waiting) - self._granted

    async def put(self, queued: QueuedGroup) -> None:
        """Take in a streamed group that is new and has a credit."""
        async with self._condition:
            self._granted = max(0, self._granted - 1)
            if queued.group.id not in self._held and len(self._waiting) < self.capacity:
                self._held[queued.group.id] = asyncio.get_running_loop().time()
                self._waiting.append(queued)
            self._condition.notify_all()

    async def skip(self) -> None:
        """Give the credit again of a group that was not taken in."""
        async with self._condition:
            self._granted = max(0, self._granted - 1)
            self._condition.notify_all()

    async def take(self, count: int) -> list[QueuedGroup]:
        """Wait for `count` groups and remove them, oldest first; empty after `close`."""
        assert 0 < count <= self.capacity, "more groups than ever fit are never there"
        async with self._condition:
            await self._condition.wait_for(lambda: self.is_closed or len(self._waiting) >= count)
            if self.is_closed:
                return []
            taken = [self._waiting.popleft() for _ in range(count)]
            self._condition.notify_all()
            return taken

    def settle(self, ids: Iterable[GroupId]) -> None:
        """Forget groups whose outcome the coordinator has recorded."""
        for group_id in ids:
            self._held.pop(group_id, None)

    async def close(self) -> None:
        async with self._condition:
            self.is_closed = True
            self._condition.notify_all()


async def feed(
    api: LearnerApi,
    inbox: Inbox,
    *,
    epoch: int,
    limits: Limits,
    backoff: Backoff,
    notes: SampleNotes,
    verifier: Verifier | None = None,
) -> None:
    """Stream groups until the inbox closes.

    Every new stream names the groups that are still held. A group that fails a check of `verifier` is rejected, one
    that cannot be checked abandoned; neither is trained on. Raises RemoteError at a final refusal, such as StaleEpoch.
    """

    async def hand_on(queued: QueuedGroup, finding: Finding) -> None:
        if finding.is_sound:
            await inbox.put(queued)
            return
        if finding.reason is not None:
            rejection = Rejection(id=queued.group.id, reason=finding.reason, detail=finding.detail)
            _LOG.warning("group %s is rejected: %s", queued.group.id, finding.detail)
            await api.reject_groups(epoch=epoch, rejections=[rejection])
            notes.rejected([queued.group])
        else:
            _LOG.warning("group %s is abandoned: %s", queued.group.id, finding.detail)
            await api.abandon_groups(epoch=epoch, ids=[queued.group.id], reason=finding.detail)
            notes.abandoned([queued])
        await inbox.skip()

    async def arriving(stream: AsyncIterator[QueuedGroup]) -> AsyncIterator[tuple[QueuedGroup, Finding]]:
        async for queued in stream:
            backoff.reset()
            yield queued, judge(queued.group, limits)

    while not inbox.is_closed:
        held, credits = inbox.open_stream()
        problem: Exception | None = None
        arrivals = arriving(api.stream_groups(epoch=epoch, held=held, credits=credits))
        try:
            if verifier is None:
                async for queued, finding in arrivals:
                    await hand_on(queued, finding)
            else:
                await _examine(arrivals, verifier, hand_on, most=inbox.capacity)
        except RunFinished as error:
            _LOG.info("no more groups come: %s", error)
            inbox.is_over = True
            await inbox.close()
        except (RemoteError, TimeoutError) as error:
            if not is_transient(error):
                raise
            problem = error
        if not inbox.is_closed:
            await backoff.wait(problem)


async def _examine(
    arrivals: AsyncIterator[tuple[QueuedGroup, Finding]],
    verifier: Verifier,
    hand_on: Callable[[QueuedGroup, Finding], Awaitable[None]],
    *,
    most: int,
) -> None:
    """Score several groups at once and hand them on in order.
    Then raise the error that ended the arrivals."""
    # Credits bound what comes; this bounds a coordinator that ignores them.
    arrived: _Arrivals = asyncio.Queue(most)
    scores: set[asyncio.Task[Scored]] = set()
    reading = asyncio.create_task(_read(arrivals, verifier, arrived, scores))
    try:
        while (entry := await arrived.get()) is not None:
            queued, finding, scoring = entry
            if scoring is not None:
                # Not awaited directly: a cancellation would cancel it only, and others would begin.
                await asyncio.wait([scoring])
                scores.discard(scoring)
                finding = await verifier.conclude(queued, scoring.result())
                queued = verifier.labelled(queued)
            await hand_on(queued, finding)
        await reading
    finally:
        left = [reading, *scores]
        for task in left:
            task.cancel()
        # Wait for their threads.
        await asyncio.wait(left)


async def _read(
    arrivals: AsyncIterator[tuple[QueuedGroup, Finding]],
    verifier: Verifier,
    arrived: _Arrivals,
    scores: set[asyncio.Task[Scored]],
) -> None:
    try:
        async for queued, finding in arrivals:
            scoring = None
            if finding == SOUND:
                scoring = asyncio.create_task(verifier.score(queued))
                scores.add(scoring)
            await arrived.put((queued, finding, scoring))
    except Exception:
        await arrived.put(None)
        raise
    await arrived.put(None)
