"""A plugin of pytest: only tests with the mark `process` or `slow` start processes, so that the others stay quick.

What lies in the folders of servers and whole runs has the mark `process` by its place.

An audit hook sees every start: subprocess, fork, exec and what stands on them. multiprocessing's `spawn` has no event.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

FONTS = "fc-list"
"""matplotlib's first import on a machine runs it to find fonts."""
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
FOLDERS = {"e2e", "engines", "faults", "gpu", "integration", "trackers", "verifiers"}


class StartsProcess(BaseException):
    """A test without the mark `process` started one; no `except Exception` of the code under test hides it."""


class _Guard:
    def __init__(self) -> None:
        self.test = ""
        self.started = ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.test and event in STARTS and args[:1] != (FONTS,):
            self.started = f"{self.test} starts a process ({event}: {args[0] if args else ''}): mark it with `process`"
            raise StartsProcess(self.started)


_guard = _Guard()


def pytest_configure(config: pytest.Config) -> None:
    """Watch, but not where coverage traces: two threads that start at once would fail.

    Python lets another thread run within an audit hook, and refuses a second `sys.settrace` until the first has ended.
    """
    if not getattr(config.option, "cov_source", None):
        sys.addaudithook(_guard)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave unread what the tier has no test of: reading all files takes 40 s of each worker."""
    is_ours = collection_path.is_relative_to(config.rootpath)
    is_by_place = is_ours and bool(FOLDERS & set(collection_path.relative_to(config.rootpath).parts))
    if config.option.markexpr.startswith("not process"):
        return is_by_place or None
    if config.option.markexpr.startswith("process") and collection_path.name.startswith("test_") and not is_by_place:
        return re.search(r"mark\.process\b", collection_path.read_text()) is None or None
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    if FOLDERS & set(item.path.relative_to(item.config.rootpath).parts):
        item.add_marker("process")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    is_free = item.get_closest_marker("process") or item.get_closest_marker("slow")
    _guard.test = "" if is_free else item.nodeid
    try:
        return (yield)
    finally:
        _guard.test = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    # Raised in a thread, or where a test awaits an error, it would pass unseen.
    if _guard.started and (report.failed or call.when == "teardown"):
        if report.passed:
            report.outcome, report.longrepr = "failed", _guard.started
        _guard.started = ""
    return report
