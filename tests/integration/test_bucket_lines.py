"""Narrow lines to a bucket: reads and puts that take longer than a request may, or break off, go on where they were."""

import asyncio
import contextlib
import dataclasses
import http.server
import random
import threading

import numpy as np
import pytest

from heterorl.common.errors import Busy
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.rpc import presigned
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.weights.payload import file_digest
from heterorl.coordinator.store.bucket import bucket_storage
from heterorl.coordinator.store.bucket import objects as requests
from heterorl.coordinator.store.bucket.objects import Piece
from heterorl.learner.publish.version_payloads import MAX_TAKES, upload
from tests.support.bucketed import copies, incoming_of, received, run_at
from tests.support.narrow import Narrow
from tests.support.run import frames
from tests.support.secure_run import PATIENT

MIB = 1 << 20
SIZE = 5 * MIB


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


@contextlib.asynccontextmanager
async def learner(run):
    tls = run.certificates.tls("learner")
    async with CoordinatorClient(run.address, tls=tls, policy=PATIENT, payload_urls="any") as client:
        yield client


def payload_at(path, num_bytes=SIZE):
    path.write_bytes(np.random.default_rng(0).bytes(num_bytes))
    return PayloadRef(
        kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=1, digest=file_digest(path), num_bytes=num_bytes
    )


def backoff():
    return Backoff(clock=SystemClock(), rng=random.Random(0), base_s=0.01, cap_s=0.05)


async def upload_to(run, client, payload, path):
    await upload(client, payload, path, epoch=run.run.epoch, backoff=backoff())


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


async def test_take_that_broke_off_goes_on_where_it_was(run, line, tmp_path):
    payload = payload_at(tmp_path / "payload")
    data = (tmp_path / "payload").read_bytes()
    how = {"epoch": run.run.epoch, "digest": payload.digest, "num_bytes": SIZE}
    async with learner(run) as client:
        assert await client.put_payload(**how, frames=lambda offset, stop: frames(data[offset:stop]))
        line.cut_at_down = line.down + 7 * MIB // 2
        with pytest.raises(Busy, match="cannot be read now"):
            await client.take_payload(**how)
        have = await client.query_upload(digest=payload.digest)
        assert 2 * MIB <= have < SIZE
        line.mend()
        before = line.down
        assert await client.take_payload(**how) == SIZE
        assert line.down - before < SIZE - have + MIB // 2


@pytest.mark.slow
async def test_put_that_cannot_be_taken_is_streamed_after_a_few_attempts(run, line, tmp_path, caplog):
    payload, before = payload_at(tmp_path / "payload"), received()
    # Answers to puts are short: what is put gets there, and the way back brings nothing.
    line.most_down = 1 << 16
    takes = []
    async with learner(run) as client:
        take = client.take_payload

        async def counted(**how):
            takes.append(how)
            return await take(**how)

        client.take_payload = counted
        await upload_to(run, client, payload, tmp_path / "payload")
        assert len(takes) == MAX_TAKES
        assert await client.query_upload(digest=payload.digest) == SIZE
    assert received() - before == SIZE
    assert "through the coordinator: it could not be taken from the bucket" in caplog.text


async def test_put_that_breaks_off_is_gone_on_with_from_the_piece_that_is_missing(
    run, bucket, prefix, line, tmp_path, monkeypatch
):
    monkeypatch.setattr(bucket_storage, "PIECE_BYTES", MIB)
    monkeypatch.setattr(presigned, "AGAIN_S", 0.01)
    payload, before = payload_at(tmp_path / "payload"), received()
    how = {"epoch": run.run.epoch, "digest": payload.digest, "num_bytes": SIZE}
    data = (tmp_path / "payload").read_bytes()
    up = line.up
    line.break_at_up = up + 5 * MIB // 2
    async with learner(run) as client:
        assert await client.put_payload(**how, frames=lambda offset, stop: frames(data[offset:stop]))
        assert len(incoming_of(bucket.names(prefix))) == 5
        # Besides all bytes once, those of the piece that was cut.
        assert SIZE + MIB // 4 < line.up - up < SIZE + 3 * MIB // 2
        await upload_to(run, client, payload, tmp_path / "payload")
        assert await client.query_upload(digest=payload.digest) == SIZE
    assert received() == before
    assert incoming_of(bucket.names(prefix)) == []


class _Killed(Exception):
    pass


async def test_learner_that_starts_again_sends_the_pieces_that_are_missing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_storage, "PIECE_BYTES", MIB)
    payload = payload_at(tmp_path / "payload")
    data = (tmp_path / "payload").read_bytes()
    how = {"epoch": run.run.epoch, "digest": payload.digest, "num_bytes": SIZE}
    asked = []

    async def some(offset, stop):
        asked.append(offset)
        if len(asked) == 4:
            raise _Killed
        yield data[offset:stop]

    for _ in range(2):
        async with learner(run) as client:
            with contextlib.suppress(_Killed):
                assert await client.put_payload(**how, frames=some)
    assert asked == [0, MIB, 2 * MIB, 3 * MIB, 3 * MIB, 4 * MIB]
    async with learner(run) as client:
        assert await client.take_payload(**how) == SIZE


def test_pieces_count_as_far_as_they_are_whole_and_without_a_gap(monkeypatch):
    monkeypatch.setattr(bucket_storage, "PIECE_BYTES", 10)

    def whole(*found, num_bytes):
        pieces = [Piece(digest="d", offset=offset, num_bytes=size, put_at=0.0) for offset, size in found]
        return [piece.offset for piece in bucket_storage.whole_pieces(pieces, num_bytes)]

    assert whole(num_bytes=25) == []
    assert whole((0, 10), (10, 10), (20, 5), num_bytes=25) == [0, 10, 20]
    assert whole((0, 10), (20, 5), num_bytes=25) == [0]
    assert whole((0, 10), (10, 9), (20, 5), num_bytes=25) == [0]
    assert whole((0, 10), (10, 10), (20, 6), num_bytes=25) == [0, 10]
    assert whole((5, 10), (10, 10), num_bytes=25) == []
    assert whole((0, 10), (10, 10), num_bytes=10) == [0]


class _Refusing(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(403)

    def log_message(self, *_):
        pass


async def test_what_was_put_before_the_store_refused_is_not_streamed_again(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_storage, "PIECE_BYTES", MIB)
    monkeypatch.setattr(presigned, "AGAIN_S", 0.01)
    payload, before = payload_at(tmp_path / "payload"), received()
    stand_in = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=stand_in.serve_forever, daemon=True).start()
    place, asked = run.core.policy.put_place, []

    async def put_place(**how):
        found = await place(**how)
        if found.offset < 2 * MIB:
            return found
        asked.append(found.offset)
        return dataclasses.replace(found, url=f"http://127.0.0.1:{stand_in.server_port}/x")

    monkeypatch.setattr(run.core.policy, "put_place", put_place)
    try:
        async with learner(run) as client:
            await upload_to(run, client, payload, tmp_path / "payload")
            assert await client.query_upload(digest=payload.digest) == SIZE
    finally:
        await asyncio.to_thread(stand_in.shutdown)
        stand_in.server_close()
    assert received() - before == SIZE - 2 * MIB
    assert len(asked) == presigned.TRIES + 1
