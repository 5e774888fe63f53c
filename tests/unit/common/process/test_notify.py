"""What a service manager hears, at a socket that listens like one."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

from heterorl.common.process import notify
from heterorl.common.process.notify import Notifier, from_environment
from tests.support.limits import PATIENCE


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """A manager's socket and what NOTIFY_SOCKET says about it."""
    shown = str(tmp_path / "notify") if request.param == "path" else f"@heterorl-test-{os.getpid()}-{id(tmp_path)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(shown.replace("@", "\0", 1) if shown.startswith("@") else shown)
        listener.setblocking(False)
        yield listener, shown


def heard(listener):
    messages = []
    while True:
        try:
            messages.append(listener.recv(4096).decode())
        except BlockingIOError:
            return messages


class Ticks:
    """A clock that lets sleepers sleep as often as asked, then stops everything."""

    def __init__(self, num_sleeps):
        self.num_sleeps = num_sleeps
        self.sleeps = []

    async def sleep(self, seconds):
        self.sleeps.append(seconds)
        if len(self.sleeps) == self.num_sleeps:
            raise asyncio.CancelledError
        await asyncio.sleep(0)


def test_manager_hears_each_state_at_both_kinds_of_address(manager):
    listener, address = manager
    notifier = Notifier(address)

    notifier.ready("port 1")
    notifier.alive()
    notifier.stopping()

    assert heard(listener) == ["READY=1\nSTATUS=port 1", "WATCHDOG=1", "STOPPING=1\nSTATUS=stopping"]


def test_without_a_manager_nothing_is_sent_and_nothing_fails(monkeypatch):
    def refuse(*_):
        raise AssertionError("no socket without NOTIFY_SOCKET")

    notifier = from_environment({"WATCHDOG_USEC": "1000000"}, pid=1)
    monkeypatch.setattr(socket, "socket", refuse)

    notifier.ready("x")
    notifier.alive()
    notifier.stopping()
    assert notifier.watchdog_s == 0.0


def test_manager_that_went_away_is_reported_once_and_ends_nothing(tmp_path, caplog):
    notifier = Notifier(str(tmp_path / "gone"))

    notifier.ready("x")
    notifier.alive()

    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_manager_that_does_not_read_blocks_nobody(tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        notifier = Notifier(address)
        # More than any queue of datagrams (net.unix.max_dgram_qlen) holds; a blocking send would stop here for ever.
        for _ in range(5000):
            notifier.alive()


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({}, 0.0),
    ],
)
def test_watchdog_is_fed_only_by_the_process_it_watches(variables, watchdog_s):
    assert from_environment({"NOTIFY_SOCKET": "/run/x", **variables}, pid=7).watchdog_s == watchdog_s


async def test_watchdog_hears_the_loop_twice_per_interval(manager):
    listener, address = manager
    clock = Ticks(3)

    with pytest.raises(asyncio.CancelledError):
        await notify.feed_watchdog(Notifier(address, watchdog_s=30.0), clock, notify.Watch())

    assert clock.sleeps == [15.0, 15.0, 15.0]
    assert heard(listener) == ["WATCHDOG=1"] * 3


async def test_watchdog_is_not_fed_while_what_must_answer_is_silent(manager, caplog):
    listener, address = manager
    silences = [0.0, 14.9, 15.0, 30.0, 0.0]

    with pytest.raises(asyncio.CancelledError):
        await notify.feed_watchdog(
            Notifier(address, watchdog_s=30.0), Ticks(5), notify.Watch(silent_s=lambda: silences.pop(0))
        )

    assert heard(listener) == ["WATCHDOG=1"] * 3
    assert len(caplog.messages) == 2


async def test_watchdog_that_nobody_asked_for_ends_at_once():
    await notify.feed_watchdog(Notifier("@heterorl-nobody"), Ticks(1), notify.Watch())


async def test_signal_says_stopping_before_the_stop_takes_effect(manager):
    listener, address = manager
    stop = asyncio.Event()
    notify.on_stop([signal.SIGUSR1], notifier=Notifier(address), stop=stop.set)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        await stop.wait()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    assert heard(listener) == ["STOPPING=1\nSTATUS=stopping"]


# In a process of its own: pytest's limit is the same timer.
RUNS = """
import asyncio, faulthandler, re, threading
from heterorl.common.process import notify
notify.TICK_S, notify.HUNG_S = 0.1, SECONDS
calls = []
def noted(name):
    real = getattr(faulthandler, name)
    def call(*args, **options):
        calls.append(name)
        real(*args, **options)
    setattr(faulthandler, name, call)
noted("dump_traceback_later")
noted("cancel_dump_traceback_later")
async def main():
    before = asyncio.all_tasks()
    try:
        async with notify.running() as process:
            while len(calls) < 5:
                await asyncio.sleep(0.05)
            print("postponed", flush=True)
            BODY
    finally:
        assert asyncio.all_tasks() == before
        assert calls[-1] == "cancel_dump_traceback_later"
asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "words", "place"),
    [
        ("threading.Event().wait()", "Timeout (", "in main"),
        # A call that holds the GIL.
        ("re.match(r'(a*)*b', 'a' * 40)", "Timeout (", "in match"),
        ("process.watch.silent_s = lambda: notify.HUNG_S / 2; await asyncio.sleep(600)", "Timeout (", "in select"),
        ("raise ZeroDivisionError", "ZeroDivisionError", "in main"),
    ],
    ids=["waits", "holds the GIL", "watch", "error"],
)
def test_process_that_hangs_says_where_and_ends_as_do_its_errors(body, words, place):
    code = RUNS.replace("SECONDS", str(2.0 * PATIENCE)).replace("BODY", body)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (ended.returncode, ended.stdout) == (1, "postponed\n")
    assert words in ended.stderr
    assert "AssertionError" not in ended.stderr
    assert place in ended.stderr
