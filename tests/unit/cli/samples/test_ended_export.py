"""An export that a signal ends leaves no file."""

import signal
import subprocess
import sys

import pytest

WAITS = """
import asyncio, os, signal
from heterorl.common.rpc import client

# As coverage does, which measures the processes of a whole run of all tests.
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))

class Waiting:
    def __init__(self, *_, **__): ...
    async def __aenter__(self): return self
    async def __aexit__(self, *_): ...
    async def list_samples(self, **_):
        print("asked", flush=True)
        await asyncio.Event().wait()

client.CoordinatorClient = Waiting
from heterorl.entry import main
main()
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("interrupt", ["default", "ignore"], ids=["foreground", "background"])
def test_export_that_a_signal_ends_leaves_no_file(tmp_path, number, interrupt):
    if (number, interrupt) == (signal.SIGINT, "ignore"):
        pytest.skip("a shell has the command ignore it")
    out = tmp_path / "run.jsonl"

    # As in a shell; tests may run under nohup. A function that runs between fork and exec may meet gRPC's threads.
    command = [
        "env", "--default-signal=HUP,TERM", f"--{interrupt}-signal=INT",
        sys.executable, "-c", WAITS, "samples", "export", str(out), "127.0.0.1:1", "--insecure",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "asked\n"
        assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl.tmp"]
        process.send_signal(number)
        said = process.stderr.read()

    assert process.returncode == 130
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())
