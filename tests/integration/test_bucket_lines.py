"""Narrow lines to a bucket: reads that take longer than a request may, or break off, go on where they were."""

import pytest

from heterorl.common.errors import Busy
from heterorl.coordinator.store import bucket_storage as requests
from tests.support.bucketed import copies, run_at
from tests.support.narrow import Narrow

MIB = 1 << 20


@pytest.fixture
async def line(bucket):
    line = Narrow(f"127.0.0.1:{bucket.port}")
    async with line.open():
        yield line


@pytest.fixture
async def run(bucket, line, prefix, tmp_path):
    endpoint = f"http://127.0.0.1:{line.port}"
    async with run_at(tmp_path / "run", bucket.config(tmp_path, prefix=prefix, endpoint=endpoint)) as run:
        yield run


async def read_anew(run):
    """Have the coordinator fetch its only payload, which it has no copy of."""
    (copy,) = copies(run)
    data = copy.read_bytes()
    copy.unlink()
    assert b"".join([frame async for frame in run.core.read_payload(digest=copy.name, offset=0)]) == data
    return len(data)


async def test_object_that_takes_longer_than_a_request_may_is_read(bucket, prefix, tmp_path, line, monkeypatch):
    monkeypatch.setattr(requests, "RANGE_S", 1.5)
    endpoint = f"http://127.0.0.1:{line.port}"
    async with run_at(tmp_path / "run", bucket.config(tmp_path, prefix=prefix, endpoint=endpoint)) as run:
        line.down_bytes_per_s = 2e6
        before = line.num_connections
        assert await read_anew(run) > 3 * 1.5e6
        assert line.num_connections - before > 1, "one request would have been enough"


async def test_object_that_breaks_off_again_and_again_is_read_from_where_it_was(run, line):
    line.most_down = 3 * MIB // 2
    before = line.down
    size = await read_anew(run)
    assert line.down - before < 2 * size


async def test_line_that_brings_nothing_ends_a_read(run, line):
    line.most_down = 1 << 16
    with pytest.raises(Busy, match="cannot be read now"):
        await read_anew(run)
