"""Settings that every test shares."""

import functools
import gc
import json
import logging
import os
from pathlib import Path

import pytest
import typer.testing
from hypothesis import settings

from tests.support import needs
from tests.support.examples import examples

# Each call of a command in a test would read the signatures of all commands again.
typer.testing._get_command = functools.cache(typer.testing._get_command)

pytest_plugins = ["tests.support.limits", "tests.support.processes", "tests.support.results"]

# Examples are judged by what they show, never by how long a shared machine took over them. In CI they are the same ones
# every time: a change is not refused for what it did not touch. Everywhere else each run looks at new ones.
settings.register_profile("untimed", deadline=None, max_examples=examples(25), derandomize="CI" in os.environ)
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Refuse to run without what was promised."""
    lacking = needs.missing(os.environ.get(needs.VARIABLE, ""))
    if lacking:
        raise pytest.UsageError(f"{needs.VARIABLE} names what is not installed: {', '.join(lacking)} (make programs)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker is left with one at the end."""
    record = Path(__file__).parent / "tests" / "all.json"
    seconds = json.loads(record.read_text())["seconds_by_file"] if record.exists() else {}
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


def pytest_collection_finish() -> None:
    """Leave the tests and their modules out of garbage collections: a fifteenth of a run's processor time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Drop the log handler of a command that the test ran: its stream ends with the test."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if type(each) is logging.StreamHandler]:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_process() -> None:
    """Two cores serve several processes: threads inside torch would only fight each other."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
