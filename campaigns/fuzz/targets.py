"""All fuzz targets by name, and the processes that run their cases under a memory cap."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from campaigns.fuzz.chunks import ChunkTarget, ZstdTarget
from campaigns.fuzz.files import ComposeTarget, ContainerTarget, PayloadTarget, StateTarget
from campaigns.fuzz.messages import ManifestTarget, MessageTarget, PlanTarget, StatementTarget
from campaigns.fuzz.plans import FetchTarget
from campaigns.fuzz.pushes import PushTarget
from campaigns.fuzz.routing import RoutingTarget
from heterorl.common.errors import HeterorlError

CAP_BYTES = 64 << 20
"""Memory that a case may add; the largest valid case needs some kilobytes."""
BATCH = 2000


class Target(Protocol):
    """One decoder: `case` draws an input, `run` decodes it; both depend only on their arguments."""

    def case(self, draw: random.Random) -> Any: ...
    def run(self, case: Any) -> None: ...


TARGETS: dict[str, Callable[[], Target]] = {
    "chunk1": partial(ChunkTarget, 1),
    "chunk2": partial(ChunkTarget, 2),
    "chunk4": partial(ChunkTarget, 4),
    "compose": ComposeTarget,
    "container": ContainerTarget,
    "fetch": FetchTarget,
    "manifest": ManifestTarget,
    "messages": MessageTarget,
    "payload": PayloadTarget,
    "plan": PlanTarget,
    "push": PushTarget,
    "routing": RoutingTarget,
    "safetensors": StateTarget,
    "statement": StatementTarget,
    "zstd": ZstdTarget,
}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Counts of one target: `refused` by typed errors, `crashes` as (case, error)."""

    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    crashes: list[tuple[int, str]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Cases a second on one core."""
        return self.cases / self.seconds if self.seconds else 0.0

    def add(self, other: Outcome) -> None:
        self.cases += other.cases
        self.refused += other.refused
        self.seconds += other.seconds
        self.crashes += other.crashes


def fuzz(name: str, *, cases: int, first: int = 0, processes: int = 0) -> Outcome:
    """Run cases `first` to `first + cases` of a target; 0 processes is one for each core."""
    numbers = [(start, min(start + BATCH, first + cases)) for start in range(first, first + cases, BATCH)]
    total = Outcome()
    # A fresh interpreter: the cap must not count what the caller holds, and threads do not survive a fork.
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as executor:
        for outcome in executor.map(partial(_batch_of, name), numbers):
            total.add(outcome)
    return total


def run_cases(name: str, target: Target, start: int, stop: int) -> Outcome:
    """Run cases in this process under the cap."""
    outcome = Outcome(cases=stop - start)
    started = time.process_time()
    with memory_cap(CAP_BYTES):
        for number in range(start, stop):
            try:
                target.run(target.case(random.Random(f"{name}:{number}")))
            except HeterorlError:
                outcome.refused += 1
            except Exception as error:  # noqa: BLE001
                outcome.crashes.append((number, f"{type(error).__name__}: {error}"[:200]))
    outcome.seconds = time.process_time() - started
    return outcome


def repeat(name: str, number: int) -> None:
    """Run one case without catching its error."""
    target = TARGETS[name]()
    case = target.case(random.Random(f"{name}:{number}"))
    print(f"{name} case {number}: {case!r}"[:2000])
    target.run(case)


@contextmanager
def memory_cap(num_bytes: int) -> Iterator[None]:
    """Limit how much memory this process can add; only on Linux."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


_targets: dict[str, Target] = {}


def _batch_of(name: str, numbers: tuple[int, int]) -> Outcome:
    if name not in _targets:
        _targets[name] = TARGETS[name]()
    return run_cases(name, _targets[name], *numbers)
