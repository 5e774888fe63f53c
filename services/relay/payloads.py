"""Payloads for a site: from cache, running fetch, or new fetch.

One fetch of a payload runs at a time. A broken fetch resumes from the bytes on disk, also after a restart. A cached
payload is verified once, and each block whenever it is sent; a damaged one is fetched again. A payload that cannot be
cached is passed on: a complete one may come from the bucket, a range comes from the coordinator.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

from heterorl.common.api import WeightsApi
from heterorl.common.errors import Busy, CorruptData, DiskFull, Draining, InvalidRequest, LimitExceeded, UnknownPayload
from heterorl.common.process.clock import Bell, Clock, ring_or_time
from heterorl.common.process.metrics import RELAY_BYTES, RELAY_READS
from heterorl.common.process.threads import in_thread
from heterorl.common.pull.fetcher import Fetcher, RunningDigest
from heterorl.common.pull.payload_reader import DamagedFile, PayloadReader
from heterorl.common.rpc.calls import WeightCalls
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadRef, PullPlan
from heterorl.common.weights.payload import FRAME_BYTES, FrameCutter
from heterorl.relay.cache import CacheDirectory

_LOG = logging.getLogger(__name__)
FROM_COORDINATOR, FROM_BUCKET, TO_NODES = "from_coordinator", "from_bucket", "to_nodes"
"""Ways of a payload's bytes."""
MAX_KNOWN = 1 << 14
"""Payloads whose sizes are remembered, those that were planned last."""
HIT, JOINED, FETCHED, PASSED, DAMAGED = "hit", "joined", "fetched", "passed", "damaged"
"""How a read was answered; the last one is a kept payload that was thrown away."""
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
"""The system lacks something for now; the file may be right."""
LOOK_S = 0.2
"""A frame that was received is in the file a moment later; a look costs one system call."""


class Payloads:
    """Payload reads of a site.
    Belongs to the event loop; `on_gone` is called when a planned payload is gone."""

    def __init__(
        self, *, api: WeightsApi, cache: CacheDirectory, clock: Clock, on_gone: Callable[[], None] = lambda: None
    ) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._on_gone = on_gone
        self._bell = Bell()
        self._reader = PayloadReader()
        self._known: OrderedDict[Digest, PayloadRef] = OrderedDict()
        self._arrivals: dict[Digest, Arrival] = {}
        self._fetcher = Fetcher(
            api=api, spool=cache.incoming, clock=clock, max_bytes=cache.max_bytes, on_frame=self._bell.ring
        )
        for outcome in (HIT, JOINED, FETCHED, PASSED, DAMAGED):
            RELAY_READS.labels(outcome)

    def note(self, plan: PullPlan) -> None:
        for ref in plan.payloads:
            self._known[ref.digest] = ref
            self._known.move_to_end(ref.digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def read(self, *, digest: Digest, offset: int, stop: int | None) -> AsyncIterator[bytes]:
        """Yield a payload's frames of [offset, stop); without `stop`, to its end.
        Raises UnknownPayload: neither cached nor planned since the start, plan again; RemoteError: the coordinator's
        error."""
        while True:
            source = self._source(digest, offset, stop)
            try:
                async for frame in source:
                    offset += len(frame)
                    RELAY_BYTES.labels(TO_NODES).inc(len(frame))
                    yield frame
            except _Again:
                continue
            finally:
                await source.aclose()
            return

    async def close(self) -> None:
        fetches = [arrival.fetching for arrival in self._arrivals.values()]
        for fetching in fetches:
            fetching.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        await self._reader.close()

    def _source(self, digest: Digest, offset: int, stop: int | None) -> AsyncGenerator[bytes, None]:
        path = self._cache.path(digest)
        if path is not None:
            return self._kept(digest, path, offset, stop)
        arrival = self._arrivals.get(digest)
        if arrival is not None:
            RELAY_READS.labels(JOINED).inc()
            return self._arriving(arrival, offset, stop)
        ref = self._known.get(digest)
        if ref is None:
            raise UnknownPayload(f"payload {digest[:12]} is not kept here and not planned since this relay began")
        if not self._cache.expect(digest, ref.num_bytes, keep=self._arrivals):
            return self._passed(digest, offset, stop)
        RELAY_READS.labels(FETCHED).inc()
        return self._arriving(self._begin(ref), offset, stop)

    async def _kept(self, digest: Digest, path: Path, offset: int, stop: int | None) -> AsyncGenerator[bytes, None]:
        RELAY_READS.labels(HIT).inc()
        try:
            async for frame in self._reader.read(digest, path, offset=offset, stop=stop):
                yield frame
        except (DamagedFile, OSError) as error:
            if isinstance(error, OSError) and error.errno in _SHORT:
                raise Busy(f"the relay cannot read a payload now: {error.strerror}", retry_after_s=1.0) from error
            RELAY_READS.labels(DAMAGED).inc()
            _LOG.error("cached payload %s is dropped and fetched again: %s", digest[:12], error)
            self._cache.remove(digest)
            raise _Again from error

    async def _arriving(self, arrival: Arrival, offset: int, stop: int | None) -> AsyncGenerator[bytes, None]:
        end = arrival.ref.num_bytes if stop is None else stop
        try:
            async for frame in arrival.read(offset=offset, stop=stop):
                offset += len(frame)
                yield frame
        except asyncio.CancelledError as error:
            if not arrival.fetching.cancelled():
                raise
            raise Draining("the relay is stopping", retry_after_s=1.0) from error
        except CorruptData as error:
            raise Busy(f"the payload arrived damaged at the relay: {error}", retry_after_s=1.0) from error
        except (DiskFull, OSError) as error:
            _LOG.warning("payload %s is passed on, cache_dir cannot keep it: %s", arrival.ref.digest[:12], error)
            async for frame in self._passed(arrival.ref.digest, offset, stop):
                offset += len(frame)
                yield frame
        if offset < end:
            raise _Again

    async def _passed(self, digest: Digest, offset: int, stop: int | None) -> AsyncGenerator[bytes, None]:
        RELAY_READS.labels(PASSED).inc()
        api = self._api
        num_bytes = self._known[digest].num_bytes if digest in self._known else -1
        is_whole = offset == 0 and stop in (None, num_bytes)
        try:
            with self._fetcher.sharing_cap():
                if isinstance(api, WeightCalls) and not is_whole:
                    # A range from the bucket cannot be verified here.
                    async for frame in api.read_from_peer(digest=digest, offset=offset, stop=stop):
                        yield frame
                    return
                running = RunningDigest()
                async for frame in api.read_payload(digest=digest, offset=offset, stop=stop):
                    running.update(frame)
                    offset += len(frame)
                    # Before the last frame leaves: after it the caller may ask no more.
                    if isinstance(api, WeightCalls) and offset == num_bytes and running.digest() != digest:
                        api.distrust_address(digest)
                    yield frame
        except UnknownPayload:
            self._on_gone()
            raise

    def _begin(self, ref: PayloadRef) -> Arrival:
        # A task of its own: the first caller may leave first.
        fetching = asyncio.ensure_future(self._fetch(ref))
        path = self._cache.incoming / ref.digest
        arrival = Arrival(ref, path, fetching=fetching, bell=self._bell, clock=self._clock)
        self._arrivals[ref.digest] = arrival
        fetching.add_done_callback(functools.partial(self._ended, ref))
        return arrival

    async def _fetch(self, ref: PayloadRef) -> None:
        try:
            await self._fetcher.fetch(ref)
            self._cache.adopt(ref.digest, await in_thread(self._cache.move, ref.digest))
        except (CorruptData, UnknownPayload) as error:
            if isinstance(error, LimitExceeded):
                _LOG.error("the relay refuses payload %s: %s", ref.digest[:12], error)
            self._cache.discard(ref.digest)
            self._on_gone()
            raise

    def _ended(self, ref: PayloadRef, fetching: asyncio.Future[None]) -> None:
        del self._arrivals[ref.digest]
        self._bell.ring()
        # Asked of every one: those who read it have left, perhaps.
        if not fetching.cancelled() and (error := fetching.exception()) is not None:
            _LOG.info("payload %s did not arrive: %s", ref.digest[:12], error)


class _Again(Exception):
    """The remaining bytes come from another source."""


class Arrival:
    """A payload being fetched into `path`; `bell` rings when bytes arrive.

    `fetching` ends when the payload is complete and in the cache, or with the error.
    """

    def __init__(
        self, ref: PayloadRef, path: Path, *, fetching: asyncio.Future[None], bell: Bell, clock: Clock
    ) -> None:
        self.ref = ref
        self.fetching = fetching
        self._path = path
        self._bell = bell
        self._clock = clock

    async def read(self, *, offset: int, stop: int | None) -> AsyncIterator[bytes]:
        """Yield [offset, stop) as it arrives.

        It ends early if the payload completed before its file was opened. Frames have verified checksums; the last ones
        wait for the digest.
        Raises InvalidRequest: the range is outside the payload; HeterorlError, OSError: why it does not arrive.
        """
        end = self.ref.num_bytes if stop is None else stop
        if not 0 <= offset <= end <= self.ref.num_bytes:
            raise InvalidRequest(f"bytes {offset} to {end} are not within the payload's {self.ref.num_bytes}")
        descriptor, cutter = -1, FrameCutter()
        try:
            while offset < end:
                ticket, is_over = self._bell.ticket(), self.fetching.done()
                if descriptor < 0:
                    descriptor = self._open()
                size = os.fstat(descriptor).st_size if descriptor >= 0 else 0
                if offset < min(size, end):
                    num_bytes = min(FRAME_BYTES, size - offset, end - offset)
                    block = await in_thread(os.pread, descriptor, num_bytes, offset)
                    offset += len(block)
                    if offset == self.ref.num_bytes:
                        # The last bytes leave once the digest is right: a damaged payload is fetched again here.
                        await asyncio.shield(self.fetching)
                    for frame in cutter.cut(block):
                        yield frame
                elif is_over:
                    self.fetching.result()
                    return
                else:
                    await ring_or_time(ticket, clock=self._clock, seconds=LOOK_S)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
