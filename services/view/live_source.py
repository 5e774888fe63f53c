"""The source of a running coordinator's samples, read by a thread.

It reads summaries first, the newest page before all others, then whole samples, newest first. It retries while the
coordinator is unreachable. Read samples stay, even after the coordinator dropped them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from heterorl.common.api import SamplesApi
from heterorl.common.errors import HeterorlError, UnknownSample, Unreachable
from heterorl.common.process.clock import Clock
from heterorl.common.types.sample import MAX_PAGE, Sample, SampleFilter, SampleList, SamplePage
from heterorl.view.sample_index import SampleIndex, SourceProgress

POLL_S = 2.0
AT_ONCE = 16
"""Concurrent requests for samples, which hide the round trip."""
BATCH = 64
"""Samples read between two polls for new summaries."""
FETCH_S = 5.0
LATE = 500
"""Newest samples whose texts may still arrive."""

Connect = Callable[[], AbstractAsyncContextManager[SamplesApi]]
"""Opens the link to the coordinator in the caller's event loop."""


class LiveSamples:
    """A Source over a coordinator's ring."""

    def __init__(self, name: str, index: SampleIndex, connect: Connect, clock: Clock) -> None:
        self.name, self._index, self._connect, self._clock = name, index, connect, clock
        self.progress = SourceProgress(is_live=True)
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._api: SamplesApi | None = None
        self._is_closed = False
        self._after = 0
        """All summaries up to this id were read."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)
        if self._thread.is_alive():
            self._thread.join()

    def fetch(self, sample_id: int) -> Sample | None:
        if self._loop is None or self._api is None:
            return None
        asked = asyncio.run_coroutine_threadsafe(self._read_one(self._api, sample_id), self._loop)
        try:
            return asked.result(FETCH_S)
        except TimeoutError:
            asked.cancel()
            raise Unreachable(
                f"{self.name}: no answer in {FETCH_S:g} s", action="open the sample again later"
            ) from None

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._follow())

    async def _follow(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        async with self._connect() as api:
            self._api = api
            while not self._is_closed:
                try:
                    await self._catch_up(api)
                except HeterorlError as error:
                    self._say(problem=str(error))
                await self._clock.sleep(POLL_S)

    async def _catch_up(self, api: SamplesApi) -> None:
        if self._after == 0:
            newest = await api.list_samples(wanted=SampleFilter(), page=SamplePage(limit=MAX_PAGE))
            self._add(newest)
        while True:
            await self._read_lines(api)
            missing = await asyncio.to_thread(self._index.unread, BATCH)
            if not missing:
                self._say(problem="", is_done=True)
                return
            await self._read_samples(api, missing)

    async def _read_lines(self, api: SamplesApi) -> None:
        first = await asyncio.to_thread(self._index.first_without_texts, newest=LATE)
        after = self._after if first is None else min(self._after, first - 1)
        page: SamplePage | None = SamplePage(limit=MAX_PAGE, after=after, is_oldest_first=True)
        while page is not None:
            found = await api.list_samples(wanted=SampleFilter(), page=page)
            self._add(found)
            seen = found.samples[-1].id if found.samples else 0
            page = found.next_page
            self._after = max(self._after, seen, page.after if page is not None else 0)

    def _add(self, found: SampleList) -> None:
        self._index.add_summaries(found.samples)
        remark = "" if found.limit_bytes else "The coordinator keeps no samples: its samples_bytes is 0."
        self._say(problem="", remark=remark, total=found.num_kept)

    async def _read_samples(self, api: SamplesApi, ids: Sequence[int]) -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def read(sample_id: int) -> Sample | None:
            async with room:
                return await self._read_one(api, sample_id, is_added=False)

        answers = await asyncio.gather(*(read(sample_id) for sample_id in ids), return_exceptions=True)
        await asyncio.to_thread(self._index.add_samples, [answer for answer in answers if isinstance(answer, Sample)])
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _read_one(self, api: SamplesApi, sample_id: int, *, is_added: bool = True) -> Sample | None:
        try:
            sample = await api.get_sample(sample_id=sample_id)
        except UnknownSample:
            # The coordinator dropped it: remove it from the index unless it was read.
            was_read = isinstance(self._index.get(sample_id), Sample)
            await asyncio.to_thread(self._index.keep if was_read else self._index.forget, sample_id)
            return None
        if is_added:
            await asyncio.to_thread(self._index.add_samples, [sample])
        return sample

    def _say(self, **fields: object) -> None:
        self.progress = dataclasses.replace(self.progress, **fields)  # type: ignore[arg-type] # names of SourceProgress
