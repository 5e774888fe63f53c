"""A plugin of pytest: writes to the file HETERORL_TEST_RESULTS how many tests passed, which failed, and seconds by file."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

VARIABLE = "HETERORL_TEST_RESULTS"


class Results:
    """What the process that prints the summary is told of every test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        # Of a test three phases are reported: the call counts, and what fails or skips before or after it.
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        seconds = {name: round(value, 2) for name, value in sorted(self.seconds.items())}
        self.path.write_text(json.dumps({"outcomes": self.outcomes, "failed": self.failed, "seconds": seconds}))


def pytest_configure(config: pytest.Config) -> None:
    if (path := os.environ.get(VARIABLE)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(Path(path)))
