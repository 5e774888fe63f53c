"""An export that a signal ends leaves no file."""

import signal
import subprocess
import sys

import pytest

WAITS = """
import asyncio
from heterorl.common.rpc import client

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
@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
def test_export_that_a_signal_ends_leaves_no_file(tmp_path, number, interrupt):
    if (number, interrupt) == (signal.SIGINT, signal.SIG_IGN):
        pytest.skip("a shell has the command ignore it")
    out = tmp_path / "run.jsonl"

    def as_in_a_shell():
        # Tests may run under nohup.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupt)

    command = [sys.executable, "-c", WAITS, "samples", "export", str(out), "127.0.0.1:1", "--insecure"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=as_in_a_shell,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "asked\n"
        assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl.tmp"]
        process.send_signal(number)
        said = process.stderr.read()

    assert process.returncode == 130
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())
