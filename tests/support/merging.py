"""A coordinator that merges, and samplers that lag behind it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from heterorl.common.api import CoordinatorApi
from heterorl.common.pull.puller import Puller
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.weights.arena import Layout, TensorSpec
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.arenas import random_arena
from tests.support.clock import ManualClock
from tests.support.run import CONTRACT, Run


def count_composed(core: Coordinator) -> list[PayloadRef]:
    """The merged deltas that are made from now on."""
    made: list[PayloadRef] = []
    add = core.merges.add

    def note(payload: PayloadRef, variant: str = "") -> None:
        made.append(payload)
        add(payload, variant)

    core.merges.add = note  # type: ignore[method-assign]
    return made


LARGER = Layout.build(
    [
        TensorSpec(name="embed", dtype="bf16", shape=(20, 1000)),
        TensorSpec(name="head", dtype="bf16", shape=(20, 1000), alias_of="embed"),
        TensorSpec(name="router", dtype="fp32", shape=(3000,)),
    ],
    chunk_elements=4096,
)
"""Two widths, a tied pair, six chunks; a snapshot of random bits is dearer than many deltas."""


class RandomRun(Run):
    """Each version changes few elements of random bits by small steps, and fewer by any step."""

    layout = LARGER
    contract = dataclasses.replace(CONTRACT, layout_id=LARGER.layout_id)

    def __init__(self, api: CoordinatorApi, directory: Path) -> None:
        super().__init__(api, directory)
        self.generator = np.random.default_rng(7)
        self.arena = random_arena(LARGER, seed=7)

    def step(self) -> None:
        for number in range(self.arena.num_chunks):
            chunk = self.arena.chunk(number)
            for count, largest in ((chunk.size // 400, 2), (2, 2**15)):
                chosen = self.generator.integers(0, chunk.size, count)
                chunk[chosen] += self.generator.integers(-largest, largest, count).astype(chunk.dtype)


class Counted:
    """A coordinator's api that counts what is read through it."""

    def __init__(self, api: Any, *, is_old: bool = False) -> None:
        self._api = api
        self.is_old = is_old
        self.num_read = 0
        self.kinds: Counter[PayloadKind] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def plan_pull(self, *, accept_merged: bool = False, **wanted: Any) -> Any:
        plan = await self._api.plan_pull(accept_merged=accept_merged and not self.is_old, **wanted)
        self.kinds = Counter(payload.kind for payload in plan.payloads)
        return plan

    async def read_payload(self, *, digest: str, offset: int) -> AsyncIterator[bytes]:
        self.num_read += 1
        async for frame in self._api.read_payload(digest=digest, offset=offset):
            yield frame


def puller(api: Any, spool: Path, **changes: Any) -> Puller:
    return Puller(api=api, spool=spool, layout=LARGER, clock=ManualClock(), **changes)


@contextlib.asynccontextmanager
async def merging(directory: Path, **changes: Any) -> AsyncIterator[Coordinator]:
    """A coordinator whose composer runs."""
    core = await Coordinator.open(CoordinatorConfig(data_dir=directory / "data", **changes), ManualClock())
    task = asyncio.create_task(core.merger.run())
    try:
        yield core
    finally:
        task.cancel()
        await asyncio.wait([task])
        await core.close()


async def published(core: Coordinator, directory: Path, count: int) -> RandomRun:
    """A run with versions 0 to `count`; begun anew when there is none."""
    run = RandomRun(core, directory)
    await run.begin()
    while run.head < count:
        await run.publish()
    return run


@contextlib.asynccontextmanager
async def keeping(directory: Path, **changes: Any) -> AsyncIterator[tuple[Coordinator, ManualClock]]:
    """A coordinator whose composer runs and whose keeper works when told; every plan of an earlier process has ended."""
    clock = ManualClock()
    values: dict[str, Any] = {"keep_versions": 4, "max_staleness_versions": 2, "snapshot_ratio": 0.05, **changes}
    core = await Coordinator.open(CoordinatorConfig(data_dir=directory / "data", **values), clock)
    clock.advance(2 * core.config.pull_lease_s)
    task = asyncio.create_task(core.merger.run())
    try:
        yield core, clock
    finally:
        task.cancel()
        await asyncio.wait([task])
        await core.close()


def stored_files(directory: Path) -> set[str]:
    """Names of the payloads on disk."""
    return {path.name for path in (directory / "data" / "blobs").rglob("*") if path.is_file()}
