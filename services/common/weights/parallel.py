"""The same work on many chunks at once: results in order, a bounded number under way.

numpy, zstandard and xxhash let go of the interpreter while they work, so threads share the cores. Results do not depend
on the number of threads. Memory is that of `threads` chunks in work, and one result that is written.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def num_threads(threads: int) -> int:
    """What a configured number of threads means: 0 is one for each core that this process may use."""
    if threads:
        return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[ItemT], ResultT], items: Iterable[ItemT], *, threads: int) -> Iterator[ResultT]:
    """Results of `work` for each item, in the items' order, from `threads` threads; 1 uses the caller's.

    `items` is read by the caller's thread, at most threads + 1 ahead. The first error in the order of the items is
    raised; what is under way then ends first.
    """
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="weights") as executor:
        waiting: deque[Future[ResultT]] = deque()
        try:
            for item in items:
                waiting.append(executor.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
