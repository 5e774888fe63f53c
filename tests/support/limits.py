"""A plugin of pytest: each test ends within its limit, however it hangs, and none of them ends the whole run.

A test's limit is its mark `timeout`, else 60 s, or 240 s with the mark `process` or `slow`. It is for a quiet machine:
`patience` multiplies it where other processes take the cores. Three guards, each for tests that the one before does not end:

- a coroutine is cancelled at its limit: asyncio keeps an exception that a signal raises in another task;
- any other test gets pytest-timeout's signal, a coroutine a quarter later;
- at 1.5 limits, fixtures included, the process writes all stacks and exits. xdist names the test and goes on in another
  worker.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import os
import signal
import time
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.support.examples import MORE

LIMIT_S = 60.0
PROCESS_LIMIT_S = 240.0
MOST_PATIENCE = 10.0
_CORES = len(os.sched_getaffinity(0))


def patience() -> float:
    """HETERORL_TEST_PATIENCE, else by how many processes want each core now, from 1 to MOST_PATIENCE.

    A tier of more random examples has that many times longer.
    """
    if stated := os.environ.get("HETERORL_TEST_PATIENCE"):
        return float(stated)
    return min(max(1.0, max(os.getloadavg()[:2]) / _CORES), MOST_PATIENCE) * int(os.environ.get(MORE, "1"))


PATIENCE = patience()
"""At the start of this process."""
WAIT_S = 30.0 * PATIENCE
"""Longest wait of a thread, a remote call or a fixture, which none of the guards ends."""
_LATER = 1.25
_STOP = 1.5
_stderr = pytest.StashKey[int]()
_usual_s = pytest.StashKey[float]()
_limit_s = pytest.StashKey[float]()
_stops_at = pytest.StashKey[float]()
_is_coroutine = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    # Tests' own standard error is a file of pytest's by the time that a test hangs.
    config.stash[_stderr] = os.dup(2)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last: a folder's conftest may add the mark `process`, as for a bucket.
    for item in items:
        marker = item.get_closest_marker("timeout")
        is_long = item.get_closest_marker("process") or item.get_closest_marker("slow")
        usual = PROCESS_LIMIT_S if is_long else LIMIT_S
        item.stash[_usual_s] = float(marker.args[0]) if marker else usual
        item.stash[_is_coroutine] = isinstance(item, pytest.Function) and _bound(item)
        _set_limit(item)


def _set_limit(item: pytest.Item) -> float:
    limit_s = item.stash[_limit_s] = patience() * item.stash[_usual_s]
    seconds = limit_s * (_LATER if item.stash[_is_coroutine] else 1)
    # Only while the test itself runs: raised while pytest writes its report, it would end the whole run.
    item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)
    return limit_s


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    seconds = _STOP * _set_limit(item) + 1
    item.stash[_stops_at] = time.monotonic() + seconds
    _stop_in(seconds, item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    # pytest itself cancels at a failure; the fixtures' ends are still to come.
    if isinstance(node, pytest.Item):
        _stop_in(max(node.stash[_stops_at] - time.monotonic(), 0.001), node)


def _stop_in(seconds: float, item: pytest.Item) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_stderr])


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Any:
    result = yield
    raise_timeout = signal.getsignal(signal.SIGALRM)
    if callable(raise_timeout):

        def at_a_line(number: int, frame: Any) -> None:
            # Between two lines a frame has no number, by which pytest's report of the whole run would end.
            if frame is not None and frame.f_lineno is None:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
            else:
                raise_timeout(number, frame)

        signal.signal(signal.SIGALRM, at_a_line)
    return result


class Scheduling(LoadFileScheduling):
    """By file, as xdist's own, with three repairs for a test that ended its worker.

    xdist runs that test in each new worker again, without an end. It hands out files that are done once more: a worker
    with nothing to run in its file waits for ever. So does one with a single test: it begins a test once it knows the
    next one, or that there is none.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work[node]
        ended = next((name for tests in files.values() for name, is_done in tests.items() if not is_done), None)
        if ended is not None:
            files[self._split_scope(ended)][ended] = True
        for path in [path for path, tests in files.items() if all(tests.values())]:
            del files[path]
        super().remove_node(node)
        return ended

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def _bound(item: pytest.Function) -> bool:
    """Give a coroutine test its limit; whether it is one."""
    holder, name = (item.obj.hypothesis, "inner_test") if hasattr(item.obj, "hypothesis") else (item, "obj")
    test = getattr(holder, name)
    if not inspect.iscoroutinefunction(test):
        return False

    @functools.wraps(test)
    async def within(*args: Any, **kwargs: Any) -> None:
        limit_s = item.stash[_limit_s]
        # The outer handle: a TimeoutError of the test's own is the test's.
        try:
            async with asyncio.timeout(limit_s) as limit:
                await test(*args, **kwargs)
        except TimeoutError:
            if limit.expired():
                pytest.fail(f"Timeout: the coroutine was cancelled after {limit_s:g} s")
            raise

    setattr(holder, name, within)
    return True
