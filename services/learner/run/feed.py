"""The loop that keeps an inbox filled from the coordinator, across broken links.

    reader    a group of the stream, in the room that credits give    the coordinator; the end of the stream
    scores    a worker of the reward                                  the worker; its time limit. Several groups at once
    feed      the oldest group's scores, then its replay              the scores' task; a thread. One group at a time

Groups reach the inbox in the order of the stream: one whose reward hangs holds back those behind it for as long as its
time limit lets it, and these are scored meanwhile. When a stream ends, what came by it is handed on before the next one
names what is held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from heterorl.common.api import LearnerApi
from heterorl.common.errors import RemoteError
from heterorl.common.process.patience import Patience, is_transient
from heterorl.common.types.rollout import QueuedGroup, Rejection
from heterorl.learner.checks.admission import Limits, judge
from heterorl.learner.checks.examiner import Examiner, Scored
from heterorl.learner.checks.judge import SOUND, Finding
from heterorl.learner.notes.notes import Notes
from heterorl.learner.run.inbox import Inbox

_LOG = logging.getLogger(__name__)
_Arrivals = asyncio.Queue[tuple[QueuedGroup, Finding, asyncio.Task[Scored] | None] | None]


async def feed(
    api: LearnerApi,
    inbox: Inbox,
    *,
    epoch: int,
    limits: Limits,
    patience: Patience,
    examiner: Examiner | None = None,
    notes: Notes | None = None,
) -> None:
    """Stream groups until the inbox closes; every new stream names the groups that are still held.

    A group that `examiner` finds fault with is rejected, one that it cannot check abandoned; neither is trained on.

    Raises:
        RemoteError: a refusal that waiting does not change, StaleEpoch above all.
    """

    async def hand_on(queued: QueuedGroup, finding: Finding) -> None:
        if finding.is_sound:
            await inbox.put(queued)
            return
        if finding.reason is not None:
            rejection = Rejection(id=queued.group.id, reason=finding.reason, detail=finding.detail)
            _LOG.warning("group %s is rejected: %s", queued.group.id, finding.detail)
            await api.reject_groups(epoch=epoch, rejections=[rejection])
            if notes is not None:
                notes.rejected([queued.group])
        else:
            _LOG.warning("group %s is abandoned: %s", queued.group.id, finding.detail)
            await api.abandon_groups(epoch=epoch, ids=[queued.group.id], reason=finding.detail)
            if notes is not None:
                notes.abandoned([queued])
        await inbox.skip()

    async def arriving(stream: AsyncIterator[QueuedGroup]) -> AsyncIterator[tuple[QueuedGroup, Finding]]:
        async for queued in stream:
            patience.reset()
            yield queued, judge(queued.group, limits)

    while not inbox.is_closed:
        held, credits = inbox.open_stream()
        problem: Exception | None = None
        arrivals = arriving(api.stream_groups(epoch=epoch, held=held, credits=credits))
        try:
            if examiner is None:
                async for queued, finding in arrivals:
                    await hand_on(queued, finding)
            else:
                await _examine(arrivals, examiner, hand_on, most=inbox.capacity)
        except (RemoteError, TimeoutError) as error:
            if not is_transient(error):
                raise
            problem = error
        if not inbox.is_closed:
            await patience.wait(problem)


async def _examine(
    arrivals: AsyncIterator[tuple[QueuedGroup, Finding]],
    examiner: Examiner,
    hand_on: Callable[[QueuedGroup, Finding], Awaitable[None]],
    *,
    most: int,
) -> None:
    """Score several groups at once and hand them on in their order; raises what ended the arrivals, behind them all."""
    # Credits bound what comes; this bounds what a coordinator sends that heeds none.
    arrived: _Arrivals = asyncio.Queue(most)
    scores: set[asyncio.Task[Scored]] = set()
    reading = asyncio.create_task(_read(arrivals, examiner, arrived, scores))
    try:
        while (entry := await arrived.get()) is not None:
            queued, finding, scoring = entry
            if scoring is not None:
                # Not awaited itself: a cancellation would go to it alone, and others would begin meanwhile.
                await asyncio.wait([scoring])
                scores.discard(scoring)
                finding = await examiner.conclude(queued, scoring.result())
                queued = examiner.labelled(queued)
            await hand_on(queued, finding)
        await reading
    finally:
        left = [reading, *scores]
        for task in left:
            task.cancel()
        # Threads are waited for, as everywhere.
        await asyncio.wait(left)


async def _read(
    arrivals: AsyncIterator[tuple[QueuedGroup, Finding]],
    examiner: Examiner,
    arrived: _Arrivals,
    scores: set[asyncio.Task[Scored]],
) -> None:
    try:
        async for queued, finding in arrivals:
            scoring = None
            if finding == SOUND:
                scoring = asyncio.create_task(examiner.score(queued))
                scores.add(scoring)
            await arrived.put((queued, finding, scoring))
    except Exception:
        await arrived.put(None)
        raise
    await arrived.put(None)
