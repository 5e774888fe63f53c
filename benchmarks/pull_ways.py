"""Pulls of the same payloads by each way that a deployment has.

    s3           ranges, from addresses that a coordinator with a bucket gives; the bucket is moto's server, a process
    relay_cold   through a relay that has nothing: it fetches from the coordinator while the caller reads
    relay        through the same relay, which has the payload now
    stream       the coordinator's own, in the same turns

A run more of each counts the CPU of all processes, the caller's too. moto's server is Python and copies objects in
memory: `s3` says what a node can read from it, not what a bucket gives.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.costs import family_cpu_s
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.fetcher import Fetcher
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.policy import PayloadRef
from heterorl.common.weights.arena import Layout
from heterorl.common.weights.payload import max_file_bytes
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.demo.processes import Child, start, stop
from tests.support.bucket import BucketServer
from tests.support.ports import free_port

RANGES = 4
"""Streams from the bucket at once."""
INSECURE = TlsConfig(insecure=True)
Publish = Callable[[CoordinatorClient, Path], Awaitable[Sequence[PayloadRef]]]
Fastest = Callable[..., Awaitable[tuple[dict[str, Any], dict[str, float]]]]


class Ways:
    """Processes beside one coordinator, which has the payloads already."""

    def __init__(self, directory: Path, *, address: str, layout: Layout, prepare: Callable[[int], None]) -> None:
        self._directory = directory
        self._prepare = prepare
        self._address = address
        self._max_bytes = max_file_bytes(layout.chunks)
        self._num_relays = itertools.count()

    async def measure(
        self, refs: Sequence[PayloadRef], *, publish: Publish, best_of: Fastest
    ) -> list[dict[str, float]]:
        """GB/s of each payload by each way."""
        bucket = BucketServer()
        payloads = bucket.config(self._directory, prefix="bench", cache_bytes=64 << 30)
        address = f"127.0.0.1:{free_port()}"
        tables = {
            "run_id": "bench", "data_dir": str(self._directory / "in-bucket"), "listen": address, "metrics_port": 0,
            "tls": {"insecure": True}, "payloads": payloads.model_dump(mode="json"),
        }  # fmt: skip
        child = start("coordinator", name="in-bucket", tables=tables, directory=self._directory)
        try:
            async with AsyncExitStack() as clients:
                there, beside = [
                    await clients.enter_async_context(CoordinatorClient(each, tls=INSECURE, payload_urls="any"))
                    for each in (address, self._address)
                ]
                in_bucket = await publish(there, self._directory)
                assert [ref.digest for ref in in_bucket] == [ref.digest for ref in refs]
                return [await self._row(ref, there, beside, best_of) for ref in refs]
        finally:
            stop([child])
            bucket.stop()

    async def _row(
        self, ref: PayloadRef, there: CoordinatorClient, beside: CoordinatorClient, best_of: Fastest
    ) -> dict[str, float]:
        relays: list[tuple[Child, CoordinatorClient]] = []

        async def end_relay() -> None:
            for relay, client in relays:
                await client.close()
                stop([relay])
            relays.clear()

        async def begin_relay() -> None:
            # Outside of what is counted: `relay_cold` is a relay without a payload, not one without a process.
            await end_relay()
            number = next(self._num_relays)
            address, cache = f"127.0.0.1:{free_port()}", self._directory / f"relay-{number}"
            tables = {
                "coordinator": self._address, "listen": address, "cache_dir": str(cache), "metrics_port": 0,
                "tls": {"insecure": True},
            }  # fmt: skip
            relay = start("relay", name=f"relay-{number}", tables=tables, directory=self._directory)
            relays.append((relay, CoordinatorClient(address, tls=INSECURE)))
            await plan(relays[0][1])

        async def plan(client: CoordinatorClient) -> None:
            have = await client.plan_pull(
                have_version=ref.from_version, have_root=roots[ref.from_version], want_version=ref.to_version
            )
            assert ref in have.payloads

        prepare = functools.partial(self._prepare, 2 * ref.num_bytes)
        roots = {-1: "", **await _roots(beside)}
        await plan(there)
        runs: dict[str, Callable[[], Awaitable[Any]]] = {
            "s3": lambda: self._fetch(there, ref, streams=RANGES),
            "stream": lambda: self._fetch(beside, ref),
            "relay_cold": lambda: self._fetch(relays[0][1], ref),
            "relay": lambda: self._fetch(relays[0][1], ref),
        }
        try:
            _, seconds = await best_of(runs, prepare=prepare, before={"relay_cold": begin_relay})
            spent = {}
            for name, run in runs.items():
                if name == "relay_cold":
                    await begin_relay()
                prepare()
                before = family_cpu_s(os.getpid())
                await run()
                spent[name] = family_cpu_s(os.getpid()) - before
        finally:
            await end_relay()
        gigabytes = ref.num_bytes / 1e9
        return {
            **{f"{name}_gb_s": round(gigabytes / some, 4) for name, some in seconds.items()},
            **{f"{name}_cpu_s_per_gb": round(some / gigabytes, 2) for name, some in spent.items()},
        }

    async def _fetch(self, client: CoordinatorClient, ref: PayloadRef, *, streams: int = 1) -> Path:
        fetcher = Fetcher(
            api=client,
            spool=self._directory / "spool",
            clock=SystemClock(),
            num_streams=streams,
            max_bytes=self._max_bytes,
        )
        return await fetcher.fetch(ref)


async def _roots(client: CoordinatorClient) -> dict[int, str]:
    manifests = await client.list_manifests(first_version=0, last_version=1)
    return {manifest.version: manifest.state_root for manifest in map(manifest_from_bytes, manifests)}
