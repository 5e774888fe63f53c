"""A sampler as the operating system sees it: signals, exit codes, and last words."""

import asyncio
import signal

import pytest

from tests.support.cluster import Cluster


async def line_in(path, text):
    """Wait until a log says something."""
    while True:
        if text in path.read_text():
            return
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_sampler_ends_at_a_signal_while_the_coordinator_is_unreachable(tmp_path, number):
    child = Cluster(tmp_path).start("site-a")
    try:
        await line_in(child.log, "site site-a registers")
        child.process.send_signal(number)
        code = await asyncio.to_thread(child.process.wait)
    finally:
        child.process.kill()
        child.process.wait()
        child.file.close()

    assert code == 0, child.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_fatal_error_ends_the_process_with_code_2_and_says_what_to_do(tmp_path):
    record = tmp_path / "site-a" / "versions.jsonl"
    record.parent.mkdir()
    record.write_text("damaged\n")
    child = Cluster(tmp_path).start("site-a")
    try:
        code = await asyncio.to_thread(child.process.wait)
    finally:
        child.process.kill()
        child.process.wait()
        child.file.close()

    assert code == 2
    last = child.log.read_text().strip().splitlines()[-1]
    assert last.startswith("error:")
    assert "line 1" in last
    assert "move it away" in last
