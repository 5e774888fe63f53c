"""Tests that hang in any way are ended, named, and cost the run nothing else; only marked tests start processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import limits, processes

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
HANGING = '''
import asyncio, itertools, subprocess, threading, pytest

@pytest.mark.timeout(2)
async def test_waits_beside_a_busy_task():
    """asyncio keeps what a signal raises in the busy task."""
    async def busy():
        for _ in itertools.count():
            await asyncio.sleep(0)
    task = asyncio.create_task(busy())
    await asyncio.Event().wait()

@pytest.mark.timeout(2)
def test_waits_for_an_event():
    threading.Event().wait()

@pytest.mark.timeout(2)
def test_keeps_what_a_signal_raises():
    while True:
        try:
            threading.Event().wait()
        except BaseException:
            pass

def test_passes():
    pass
'''
STARTING = """
import subprocess, pytest

def test_starts():
    subprocess.run(["true"], check=True)

def test_hides_it():
    try:
        subprocess.run(["true"], check=True)
    except BaseException:
        pass

@pytest.mark.process
def test_may_start():
    subprocess.run(["true"], check=True)

def test_passes():
    pass
"""


def run(tmp_path, text, *words):
    """Run a file of tests with the plugins of this folder in a process of its own: code, output, results."""
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "conftest.py").write_text(
        'pytest_plugins = ["tests.support.limits", "tests.support.processes", "tests.support.results"]\n'
    )
    command = [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, *words]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HETERORL_TEST_RESULTS": str(tmp_path / "results.json"),
        "COVERAGE_FILE": str(tmp_path / ".coverage"),
        "HETERORL_TEST_PATIENCE": "1",
    }
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", tmp_path], capture_output=True, text=True, env=environment, check=False
    )
    return done.returncode, done.stdout + done.stderr, json.loads((tmp_path / "results.json").read_text())


@pytest.mark.slow
def test_three_tests_that_hang_in_three_ways_are_ended_and_the_others_run(tmp_path):
    code, said, results = run(tmp_path, HANGING, "-n", "1", "--dist", "loadfile")

    assert code == 1
    assert sorted(name.partition("::")[2] for name in results["failed"]) == [
        "test_keeps_what_a_signal_raises",
        "test_waits_beside_a_busy_task",
        "test_waits_for_an_event",
    ]
    assert results["outcomes"] == {"passed": 1, "failed": 3}
    assert "the coroutine was cancelled after 2 s" in said
    assert "Timeout (>2.0s) from pytest-timeout" in said
    # The worker that no exception ends writes where it hangs; another one takes its place.
    assert "Timeout (0:00:04)!" in said
    assert "crashed while running" in said


def test_fixture_that_hangs_behind_a_failed_test_is_ended(tmp_path):
    text = """
import threading, pytest

@pytest.fixture
def hanging():
    yield
    threading.Event().wait()

@pytest.mark.timeout(0.1)
def test_fails(hanging):
    raise AssertionError

def test_passes():
    pass
"""
    code, said, results = run(tmp_path, text, "-n", "1", "--dist", "loadfile", "-p", "no:randomly")

    assert (code, results["outcomes"]["passed"]) == (1, 1), said
    assert "crashed while running" in said


def test_files_behind_a_test_that_ends_its_worker_run_in_another_one(tmp_path):
    # The worker's first file is done: it must not go to the next worker.
    (tmp_path / "test_before.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "test_later.py").write_text("def test_it():\n    pass\n")
    text = "import os\n\ndef test_ends():\n    os._exit(1)\n\ndef test_it():\n    pass\n"
    _, said, results = run(tmp_path, text, "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")

    assert results["outcomes"] == {"passed": 3, "failed": 1}
    assert "crashed while running" in said


def test_matplotlib_may_list_fonts_in_any_test():
    guard = processes._Guard()
    guard.test = "test_it"

    guard("subprocess.Popen", (processes.FONTS, [processes.FONTS, "--help"]))
    with pytest.raises(processes.StartsProcess, match=r"subprocess\.Popen: true"):
        guard("subprocess.Popen", ("true", ["true"]))


def test_mark_that_a_conftest_adds_counts(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "conftest.py").write_text(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    [item.add_marker(pytest.mark.process) for item in items]\n"
    )
    text = "def test_it(request):\n    assert request.node.get_closest_marker('timeout').args[0] == 240.0 * PATIENCE\n"
    (tmp_path / "folder" / "test_there.py").write_text(f"from tests.support.limits import PATIENCE\n\n{text}")
    code, said, _ = run(tmp_path, "", "-n", "0")

    assert (code, "1 passed" in said) == (0, True), said


def test_process_without_the_mark_fails_its_test_even_where_the_test_hides_it(tmp_path):
    code, said, results = run(tmp_path, STARTING)

    assert code == 1
    assert {name.partition("::")[2] for name in results["failed"]} == {"test_starts", "test_hides_it"}
    assert "test_starts starts a process (subprocess.Popen: true): mark it with `process`" in said


def test_threads_may_start_at_once_under_coverage_since_no_hook_watches_them(tmp_path):
    code, said, _ = run(tmp_path, STARTING, "--cov", "--cov-report=")

    assert code == 0, said


def test_limit_is_longer_where_other_processes_want_the_cores(monkeypatch):
    monkeypatch.delenv("HETERORL_TEST_PATIENCE", raising=False)
    loads = {0.5: 1.0, 3.0: 3.0 / limits._CORES, 1000.0: limits.MOST_PATIENCE}
    for load, times in loads.items():
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 5000.0))
        monkeypatch.delenv("HETERORL_TEST_EXAMPLES", raising=False)
        assert limits.patience() == max(1.0, times)
        monkeypatch.setenv("HETERORL_TEST_EXAMPLES", "4")
        assert limits.patience() == 4 * max(1.0, times)
    monkeypatch.setenv("HETERORL_TEST_PATIENCE", "2.5")
    assert limits.patience() == 2.5


def test_limit_is_set_when_the_test_begins(tmp_path):
    text = (
        "import os, pytest\n"
        "@pytest.mark.parametrize('times', [3, 5])\n"
        "def test_it(request, times):\n"
        "    os.environ['HETERORL_TEST_PATIENCE'] = '5'\n"
        "    assert request.node.get_closest_marker('timeout').args[0] == 60.0 * (times if times == 5 else 1)\n"
    )
    code, said, _ = run(tmp_path, text, "-n", "0", "-p", "no:randomly")

    assert (code, "2 passed" in said) == (0, True), said
