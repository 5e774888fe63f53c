"""Logs for machines are JSON objects with who says them; what others write passes; times are in UTC."""

import datetime
import json
import logging
import os
import subprocess
import sys

import pytest

from heterorl.common.process.logs import ConsoleFormatter, Rarely, utc

NOISE = """
import logging, os, subprocess, sys, threading, warnings
from heterorl.common.process import logs
logs.configure(style="json", fields={"role": "sampler", "version": "1.2"})
logs.bind(site="eu-1", run="r", nothing="")
logging.getLogger("ours").info("hello %s", "world")
os.write(2, b"I0000 00:00 ssl.cc:1] of C++\\n")
warnings.warn("odd", UserWarning, stacklevel=1)
from transformers.utils import logging as theirs
from huggingface_hub.utils import logging as hub
theirs.get_logger("transformers.x").warning("from transformers")
hub.get_logger("huggingface_hub.x").warning("from the hub")
logging.getLogger("httpx2").info("HTTP Request: HEAD https://hub")
rank = "from heterorl.common.process import logs; import logging; logs.configure_as_parent(); logging.info('of a rank')"
subprocess.run([sys.executable, "-c", rank])
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
raise RuntimeError("the end")
"""


def run(program, **environment):
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env={**os.environ, "TZ": "America/New_York", **environment},
    )  # fmt: skip
    return result


@pytest.mark.process
def test_each_line_of_ours_is_one_object_with_who_says_it_and_others_pass():
    result = run(NOISE)

    assert result.stdout == ""
    foreign = "I0000 00:00 ssl.cc:1] of C++"
    lines = result.stderr.splitlines()
    assert [line for line in lines if not line.startswith("{")] == [foreign]
    entries = [json.loads(line) for line in lines if line != foreign]
    said = {entry["message"]: entry for entry in entries}
    # Each once, though two of the libraries would print with handlers of their own.
    assert len(said) == len(entries)
    expected = {
        "hello world",
        "from transformers",
        "from the hub",
        "of a rank",
        "thread worker ended by an exception",
        "the end",
    }
    assert expected <= set(said), set(said)
    assert any("UserWarning: odd" in text for text in said)
    assert len(said) == len(expected) + 1
    for entry in entries:
        assert {"role": "sampler", "version": "1.2", "site": "eu-1", "run": "r"}.items() <= entry.items()
        assert "nothing" not in entry
        moment = datetime.datetime.fromisoformat(entry["time"])
        assert entry["time"].endswith("Z")
        assert abs(moment - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(minutes=2)
    assert "ZeroDivisionError" in said["thread worker ended by an exception"]["exception"]
    assert "RuntimeError: the end" in said["the end"]["exception"]


@pytest.mark.process
@pytest.mark.parametrize("style", ["json", "console"])
def test_service_that_cannot_start_says_why_in_its_style(style):
    program = f"import sys; sys.argv = ['heterorl', 'sampler', '--log', '{style}', '--set', 'colour=1']\n"
    result = run(program + "from heterorl.entry import main; main()")

    assert result.returncode == 2
    if style == "json":
        (entry,) = [json.loads(line) for line in result.stderr.splitlines()]
        assert entry["message"].startswith("error: colour: unknown key")
        assert (entry["level"], entry["role"]) == ("ERROR", "sampler")
    else:
        assert result.stderr.startswith("error: colour: unknown key")


def test_times_for_people_are_utc_too():
    record = logging.LogRecord("n", logging.INFO, "p", 1, "m", (), None)
    record.created = 0.0625

    assert utc(0.0625) == "1970-01-01T00:00:00.062Z"
    assert ConsoleFormatter("%(asctime)s %(message)s").format(record) == "1970-01-01T00:00:00.062Z m"


def test_a_kind_of_line_comes_once_a_minute_with_the_number_left_out(caplog):
    now = [0.0]
    said = Rarely(logging.getLogger("test"), lambda: now[0])
    for moment, kind in ((0, "a"), (1, "a"), (2, "b"), (59, "a"), (60, "a"), (61, "a"), (200, "b")):
        now[0] = float(moment)
        said.warn(kind, "%d %% lost", moment, count=3)

    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["0 % lost", "2 % lost", "60 % lost (6 more since the last such line)", "200 % lost"]
