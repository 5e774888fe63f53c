"""Processes end in order, and what a failed one wrote is shown as text."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from heterorl.demo import demo_run
from heterorl.demo.demo_config import TINY, DemoOptions
from heterorl.demo.demo_results import verdict
from heterorl.demo.processes import Child, ChildFailed, stop, stop_together

OBEDIENT = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(flush=True); signal.pause()"
)
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)\nwhile True: signal.pause()"


def child(tmp_path, name, code, *, wait=True):
    log = tmp_path / f"{name}.log"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    if wait:
        assert process.stdout.readline() == b"\n"
    process.stdout.close()
    return Child(name=name, process=process, log=log, file=log.open("ab"))


@pytest.mark.process
def test_processes_end_one_after_another_and_a_deaf_one_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("heterorl.demo.processes.GRACE_S", 2.0)
    names = ["coordinator", "learner", "site-east", "site-west"]
    children = [child(tmp_path, name, STUBBORN if name == "site-east" else OBEDIENT) for name in names]
    demo = demo_run._Demo(
        options=DemoOptions(out=tmp_path), regime=TINY, model_dir=tmp_path, console=Console(file=io.StringIO())
    )
    demo._children = children
    running_at_stop = {}

    def stop_and_look(group):
        running_at_stop.update({c.name: [x.name for x in children if x.exit_code is None] for c in group})
        return stop_together(group)

    monkeypatch.setattr(demo_run, "stop_together", stop_and_look)
    demo._stop()

    # When one is asked to end, exactly its equals and those behind it still run.
    assert running_at_stop == {
        "site-east": ["coordinator", "learner", "site-east", "site-west"],
        "site-west": ["coordinator", "learner", "site-east", "site-west"],
        "learner": ["coordinator", "learner"],
        "coordinator": ["coordinator"],
    }
    assert [c.exit_code for c in children] == [0, 0, -signal.SIGKILL, 0]


@pytest.mark.process
def test_failed_process_says_how_and_where_and_shows_its_log_as_text(tmp_path):
    failed = child(tmp_path, "learner", "raise SystemExit(3)", wait=False)
    failed.log.write_text("first\nall [/x] lost \x1b[31mred :smile:\n")
    failed.process.wait()

    with pytest.raises(ChildFailed) as raised:
        failed.check()
    stop([failed])

    message = str(raised.value)
    assert f"learner ended with code 3; log: {failed.log}" in message
    assert "all [/x] lost ?[31mred :smile:" in message


def test_process_ended_by_a_signal_is_named(tmp_path):
    assert "was ended by SIGKILL" in str(ChildFailed("learner", code=-9, log=Path("l"), tail=""))
    assert "was ended by signal 200" in str(ChildFailed("learner", code=-200, log=Path("l"), tail=""))


@pytest.mark.process
def test_failed_run_is_shown_and_summed_up_whatever_the_log_holds(tmp_path, monkeypatch):
    def start(service, *, name, tables, directory):
        # The coordinator dies at once, with brackets that a markup parser refuses.
        return child(tmp_path, name, "import sys; sys.exit(3)", wait=False)

    monkeypatch.setattr(demo_run, "start", start)
    (tmp_path / "coordinator.log").write_text("boom [/x] [bold]\n")
    screen = io.StringIO()
    console = Console(file=screen, markup=False, emoji=False, highlight=False)
    demo = demo_run._Demo(options=DemoOptions(out=tmp_path), regime=TINY, model_dir=tmp_path, console=console)

    summary = demo.run()
    for text in verdict(summary):
        console.print(text)

    assert "coordinator ended with code 3" in screen.getvalue()
    assert "boom [/x] [bold]" in screen.getvalue()
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["status"] == "failed"
    assert "boom [/x]" in written["failure"]
    assert (written["final_accuracy"], written["model_dir"], written["report"]) == (None, None, None)
    assert not (tmp_path / "model").exists()


def test_a_signal_ends_the_watch_and_a_second_one_not_the_stopping(tmp_path, monkeypatch):
    demo = demo_run._Demo(
        options=DemoOptions(out=tmp_path), regime=TINY, model_dir=tmp_path, console=Console(file=io.StringIO())
    )
    stopped = []

    async def start():
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    def stop():
        os.kill(os.getpid(), signal.SIGINT)
        stopped.append(demo.was_interrupted)

    monkeypatch.setattr(demo, "_start", start)
    monkeypatch.setattr(demo, "_stop", stop)
    # The tests may run where SIGINT is ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        summary = demo.run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)

    assert (stopped, summary["status"]) == ([True], "interrupted")
