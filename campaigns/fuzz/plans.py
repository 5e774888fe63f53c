"""Fuzz target: the plan of an untrusted coordinator, parsed, judged and fetched into files."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import blake3

from campaigns.fuzz.files import scratch
from heterorl.common.api import CoordinatorApi
from heterorl.common.errors import HeterorlError
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.fetcher import Fetcher
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PullPlan
from heterorl.common.wire.common_messages import to_value
from heterorl.v1 import policy_pb2

MAX_BYTES = 4096
NAMES = (
    "a" * 64, "0" * 64, "../victim", "/no-such-directory/victim", "victim", "", ".", "..", "a" * 63 + "/", "../" + "a" * 61,
    "A" * 64, "a" * 64 + ".7", "\0" * 64, "*" * 64, "a" * 65,
)  # fmt: skip
SIZES = (0, 1, 10, MAX_BYTES, MAX_BYTES + 1, 1 << 40, 2**63 - 1, 2**64 - 1)


class _Inline(ThreadPoolExecutor):
    """Runs calls at once: a thread's stack would count as memory of the case."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)
        return future


class _Source:
    """Sends the case's frames for any request."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = frames

    async def read_payload(self, *, digest: Digest, offset: int, stop: int | None = None) -> AsyncIterator[bytes]:
        for frame in self._frames:
            yield frame


class FetchTarget:
    """A plan and Fetcher: only files of the spool within size limits, or a typed error."""

    def __init__(self) -> None:
        self._root = scratch(self)
        (self._root / "victim").write_bytes(b"owner")

    def case(self, draw: random.Random) -> tuple[list[tuple[str, int]], list[bytes], list[int]]:
        """Stated payloads, sent frames, and lengths of files in the spool."""
        payloads = [(draw.choice(NAMES), draw.choice(SIZES)) for _ in range(draw.randrange(1, 4))]
        frames = [draw.randbytes(draw.choice((0, 1, 9, 100, MAX_BYTES + 1))) for _ in range(draw.randrange(4))]
        whole = b"".join(frames)
        if draw.random() < 0.5:
            payloads = [(blake3.blake3(whole).hexdigest(), len(whole))]
        return payloads, frames, [draw.randrange(20) for _ in range(draw.randrange(3))]

    def run(self, case: tuple[list[tuple[str, int]], list[bytes], list[int]]) -> None:
        payloads, frames, lying = case
        spool = self._root / "spool"
        spool.mkdir(exist_ok=True)
        for number, length in enumerate(lying):
            (spool / ("a" * 64 + (f".{number}" if number else ""))).write_bytes(bytes(length))
        message = policy_pb2.PlanPullResponse(
            kind=policy_pb2.PLAN_KIND_SNAPSHOT,
            payloads=[
                policy_pb2.PayloadRef(kind=policy_pb2.PAYLOAD_KIND_SNAPSHOT, digest=name, num_bytes=size)
                for name, size in payloads
            ],
        )
        # asyncio.run ends an executor by another thread; without memory for it the start would wait for ever.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._fetch(message, frames))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            names = {path.name.partition(".")[0] for path in spool.iterdir()}
            sizes = [path.stat().st_size for path in spool.iterdir()]
            for path in spool.iterdir():
                path.unlink()
            assert sorted(path.name for path in self._root.iterdir()) == ["spool", "victim"], "a file outside the spool"
            assert (self._root / "victim").read_bytes() == b"owner", "a file outside the spool was written"
            assert all(len(name) == 64 for name in names), "a file without a digest's name"
            assert sum(sizes) <= 4 * MAX_BYTES, "more on disk than allowed"

    async def _fetch(self, message: policy_pb2.PlanPullResponse, frames: list[bytes]) -> None:
        asyncio.get_running_loop().set_default_executor(_Inline(max_workers=1))
        plan = to_value(PullPlan, message)
        api = cast("CoordinatorApi", _Source(frames))
        fetcher = Fetcher(api=api, spool=self._root / "spool", clock=SystemClock(), max_bytes=MAX_BYTES)
        fetcher.keep_only(plan.payloads)
        refused: HeterorlError | None = None
        for payload in plan.payloads:
            try:
                await fetcher.fetch(payload)
            except HeterorlError as error:
                refused = error
        if refused is not None:
            raise refused
