"""Learners that put payloads into the bucket themselves: what moves where, what is refused, and what failures cost."""

import asyncio
import contextlib
import http.server
import random
import re
import threading
import urllib.request

import numpy as np
import pytest

from heterorl.common.errors import DigestMismatch, InvalidRequest, PayloadMissing, StaleEpoch, Unreachable
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.rpc import presigned
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.policy import NO_PLACE, PayloadKind, PayloadRef, PutPlace
from heterorl.common.weights.payload import file_digest
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.store.bucket import bucket_storage
from heterorl.demo.processes import start, stop
from heterorl.learner.publish.version_payloads import upload
from heterorl.v1 import policy_pb2
from tests.support.bucket import KEY, SECRET
from tests.support.bucketed import incoming_of, payloads_of, received, run_at
from tests.support.cluster import Cluster
from tests.support.limits import WAIT_S
from tests.support.ports import free_port, serves
from tests.support.prometheus import metrics_port
from tests.support.relay import Relay
from tests.support.run import Run, frames
from tests.support.secure_run import PATIENT

SIZE = 5 << 20


@pytest.fixture
async def run(bucket, prefix, tmp_path):
    async with run_at(tmp_path / "run", bucket.config(tmp_path, prefix=prefix)) as run:
        yield run


@contextlib.asynccontextmanager
async def learner(run, *, urls="any"):
    tls = run.certificates.tls("learner")
    async with CoordinatorClient(run.address, tls=tls, policy=PATIENT, payload_urls=urls) as client:
        yield client


def payload_at(path, num_bytes=SIZE, seed=0):
    path.write_bytes(np.random.default_rng(seed).bytes(num_bytes))
    return PayloadRef(
        kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=1, digest=file_digest(path), num_bytes=num_bytes
    )


def backoff():
    return Backoff(clock=SystemClock(), rng=random.Random(0), base_s=0.05, cap_s=0.2)


def name_of(payload):
    return f"blobs/{payload.digest[:2]}/{payload.digest}"


# More than one request creates: the coordinator gives it to the bucket in parts.
@pytest.mark.parametrize("num_bytes", [SIZE, 37 << 20])
async def test_payload_goes_by_the_bucket_and_the_coordinator_receives_nothing(
    run, bucket, prefix, tmp_path, num_bytes
):
    payload = payload_at(tmp_path / "payload", num_bytes)
    before = received()
    async with learner(run) as client:
        await upload(client, payload, tmp_path / "payload", epoch=run.run.epoch, backoff=backoff())
        # As a restarted learner does.
        assert await client.query_upload(digest=payload.digest) == num_bytes
        await upload(client, payload, tmp_path / "payload", epoch=run.run.epoch, backoff=backoff())
        assert not await put(client, run, payload, tmp_path / "payload"), "there is an address for what is there"

    assert received() == before
    names = bucket.names(prefix)
    assert name_of(payload) in names
    assert num_bytes in bucket.sizes(prefix)
    assert incoming_of(names) == []


@pytest.mark.parametrize("where", ["none", "https", "put_bytes"])
async def test_learner_or_coordinator_can_have_it_streamed(bucket, prefix, tmp_path, where):
    changes = {"put_bytes": SIZE - 1} if where == "put_bytes" else {}
    payload = payload_at(tmp_path / "payload")
    async with run_at(tmp_path / "run", bucket.config(tmp_path, prefix=prefix, **changes)) as run:
        before = received()
        async with learner(run, urls="any" if where == "put_bytes" else where) as client:
            await upload(client, payload, tmp_path / "payload", epoch=run.run.epoch, backoff=backoff())
        assert received() - before == SIZE
        assert name_of(payload) in bucket.names(prefix)


def pieces_of(data):
    return lambda offset, stop: frames(data[offset:stop])


async def put(client, run, payload, path, *, num_bytes=None):
    data = path.read_bytes()
    return await client.put_payload(
        epoch=run.run.epoch, digest=payload.digest, num_bytes=num_bytes or len(data), frames=pieces_of(data)
    )


@pytest.mark.parametrize("wrong", ["bytes", "longer", "nothing"])
async def test_what_is_not_the_payload_is_refused_and_deleted(run, bucket, prefix, tmp_path, wrong):
    payload, other = payload_at(tmp_path / "payload"), tmp_path / "other"
    payload_at(other, SIZE + (wrong == "longer"), seed=1)
    expected = {"bytes": "has digest", "longer": f"has {SIZE + 1} bytes, not {SIZE}", "nothing": "was not put"}[wrong]
    async with learner(run) as client:
        how = {"epoch": run.run.epoch, "digest": payload.digest, "num_bytes": SIZE}
        if wrong != "nothing":
            assert await put(client, run, payload, other)
            assert incoming_of(bucket.names(prefix)) == [f"incoming/{payload.digest}/{0:016d}"]
        with pytest.raises(PayloadMissing if wrong == "nothing" else DigestMismatch, match=expected):
            await client.take_payload(**how)
        assert await client.query_upload(digest=payload.digest) == 0

        assert name_of(payload) not in bucket.names(prefix)
        assert incoming_of(bucket.names(prefix)) == []
        # And the right one is taken then.
        await upload(client, payload, tmp_path / "payload", epoch=run.run.epoch, backoff=backoff())
    assert name_of(payload) in bucket.names(prefix)


class _Expired(http.server.BaseHTTPRequestHandler):
    """Refuses, as a store does when an address is over."""

    asked = 0

    def do_PUT(self):
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(403)

    def log_message(self, *_):
        pass


class _Cut(_Expired):
    """Goes away in the middle."""

    def do_PUT(self):
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]) // 2)
        self.close_connection = True


class _Elsewhere(_Expired):
    """Sends the caller to another place."""

    def do_PUT(self):
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(307)
        self.send_header("Location", "http://127.0.0.1:9/x")
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize("kind", [_Expired, _Cut, _Elsewhere])
async def test_put_that_fails_is_streamed_and_said_without_the_address(run, tmp_path, monkeypatch, caplog, kind):
    caplog.set_level("DEBUG")
    payload = payload_at(tmp_path / "payload")
    handler = type("Handler", (kind,), {"asked": 0})
    stand_in = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=stand_in.serve_forever, daemon=True).start()

    async def put_place(*, num_bytes, **_):
        url = f"http://127.0.0.1:{stand_in.server_port}/x?X-Amz-Signature=5ec4e7"
        return PutPlace(url=url, offset=0, num_bytes=num_bytes)

    monkeypatch.setattr(run.core.policy, "put_place", put_place)
    before = received()
    try:
        async with learner(run) as client:
            await upload(client, payload, tmp_path / "payload", epoch=run.run.epoch, backoff=backoff())
            second = payload_at(tmp_path / "second", seed=2)
            await upload(client, second, tmp_path / "second", epoch=run.run.epoch, backoff=backoff())
    finally:
        await asyncio.to_thread(stand_in.shutdown)
        stand_in.server_close()

    assert received() - before == 2 * SIZE
    assert handler.asked == 1, "a store that failed is left alone for a while"
    assert caplog.text.count("through the coordinator: it could not be put into the bucket") == 1
    assert "5ec4e7" not in caplog.text


async def test_line_to_the_bucket_that_is_cut_leaves_nothing_there(bucket, prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(presigned, "PUT_PAUSE_S", 0.0)
    payload = payload_at(tmp_path / "payload")
    data = (tmp_path / "payload").read_bytes()
    relay = Relay(f"127.0.0.1:{bucket.port}", one_way_s=0.0)
    async with relay.open():
        payloads = bucket.config(tmp_path, prefix=prefix, endpoint=f"http://127.0.0.1:{relay.port}")
        async with run_at(tmp_path / "run", payloads) as run, learner(run) as client:
            how = {"epoch": run.run.epoch, "digest": payload.digest, "num_bytes": SIZE}

            async def cut(_offset, _stop):
                async for frame in frames(data[: SIZE // 2]):
                    yield frame
                relay.cut()
                async for frame in frames(data[SIZE // 2 :]):
                    yield frame

            with pytest.raises(Unreachable, match="the bucket of the payloads does not answer"):
                await client.put_payload(**how, frames=cut)
            relay.mend()
            before = received()
            with pytest.raises((PayloadMissing, DigestMismatch)):
                await client.take_payload(**how)
            assert incoming_of(bucket.names(prefix)) == []
            await upload(client, payload, tmp_path / "payload", epoch=run.run.epoch, backoff=backoff())
            assert received() == before
    assert name_of(payload) in bucket.names(prefix)


class Ahead(SystemClock):
    """A clock that may be moved."""

    ahead_s = 0.0

    def wall(self):
        return super().wall() + self.ahead_s

    def monotonic(self):
        return super().monotonic() + self.ahead_s


async def test_addresses_are_bounded_and_what_nobody_took_is_deleted(bucket, prefix, tmp_path):
    payload = payload_at(tmp_path / "payload")
    payloads = bucket.config(tmp_path, prefix=prefix, url_lifetime_s=600.0)
    async with run_at(tmp_path / "run", payloads) as run:
        place, clock = run.core.context.direct_uploads, Ahead()
        place._clock = clock
        async with learner(run) as client:
            assert await put(client, run, payload, tmp_path / "payload")
        others = [f"{number:064x}" for number in range(bucket_storage.MAX_OPEN)]
        urls = [(await place.place(digest, 100)).url for digest in others]
        assert [bool(url) for url in urls] == [True] * (bucket_storage.MAX_OPEN - 1) + [False]
        assert (await place.place(payload.digest, SIZE)).offset == SIZE, "the same payload again is none more"
        assert await place.place(others[0], payloads.put_bytes + 1) == NO_PLACE

        clock.ahead_s = 590.0
        await place.sweep()
        assert len(incoming_of(bucket.names(prefix))) == 1
        assert await place.place(others[-1], 100) == NO_PLACE
        config = run.core.config
    # A start keeps what its learner may still have taken, and deletes what is over.
    for ahead_s, left in ((590.0, 1), (620.0, 0)):
        clock.ahead_s = ahead_s
        core = await Coordinator.open(config, clock)
        try:
            assert len(incoming_of(bucket.names(prefix))) == left
            assert len(core.context.direct_uploads._open) == left
            assert payloads_of(bucket.names(prefix)) != []
        finally:
            await core.close()


async def test_only_the_lease_holder_is_given_an_address_or_has_something_taken(run, tmp_path, caplog):
    payload = payload_at(tmp_path / "payload")
    async with learner(run) as client:
        assert await put(client, run, payload, tmp_path / "payload")
        how = {"epoch": run.run.epoch + 1, "digest": payload.digest, "num_bytes": SIZE}
        with pytest.raises(StaleEpoch):
            await client.take_payload(**how)
        with pytest.raises(StaleEpoch):
            await client.put_payload(**how, frames=pieces_of(b""))
        # `upload` does not take that for a bucket that fails.
        with pytest.raises(StaleEpoch):
            await upload(client, payload, tmp_path / "payload", epoch=run.run.epoch + 1, backoff=backoff())

        assert "could not be put" not in caplog.text

        async def requests():
            header = policy_pb2.UploadHeader(epoch=run.run.epoch, digest=payload.digest, num_bytes=SIZE, is_put=True)
            yield policy_pb2.UploadPayloadRequest(header=header)
            yield policy_pb2.UploadPayloadRequest(frame=b"x")

        with pytest.raises(InvalidRequest, match="has no frames"):
            await client._upload(requests())


def received_by(child):
    """Payload bytes that a coordinator's process received."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port(child.log)}/metrics", timeout=WAIT_S) as answer:
        text = answer.read().decode()
    found = re.findall(r"^heterorl_bytes_total\{([^}]*)\} (\S+)", text, re.MULTILINE)
    return sum(float(value) for labels, value in found if 'direction="in"' in labels and 'kind="weights"' in labels)


async def test_coordinator_killed_between_the_put_and_its_end_takes_it_when_it_is_back(bucket, prefix, tmp_path):
    payload = payload_at(tmp_path / "payload")
    address = f"127.0.0.1:{free_port()}"
    tables = {
        "run_id": "run", "data_dir": str(tmp_path / "data"), "listen": address, "metrics_port": 0,
        "tls": {"insecure": True}, "learner_lease_s": 3600.0,
        "payloads": bucket.config(tmp_path, prefix=prefix).model_dump(mode="json"),
    }  # fmt: skip
    children = [start("coordinator", name="coordinator", tables=tables, directory=tmp_path)]
    try:
        async with CoordinatorClient(
            address, tls=TlsConfig(insecure=True), policy=PATIENT, payload_urls="any"
        ) as client:
            await serves(children[0].process, address)
            run = Run(client, tmp_path)
            await run.begin()

            class Killing:
                num_puts = 0

                def __getattr__(self, name):
                    return getattr(client, name)

                async def put_payload(self, **how):
                    self.num_puts += 1
                    assert await client.put_payload(**how)
                    children[0].process.kill()
                    children[0].process.wait()
                    children[0].file.close()
                    children[0] = start("coordinator", name="again", tables=tables, directory=tmp_path)
                    return True

            api = Killing()
            await upload(api, payload, tmp_path / "payload", epoch=run.epoch, backoff=backoff())
            assert api.num_puts == 1
            assert await asyncio.to_thread(received_by, children[0]) == 0
            # What is streamed is counted.
            data = b"x" * 1000
            other = bytes_digest(data)
            await client.upload_payload(
                epoch=run.epoch, digest=other, num_bytes=len(data), offset=0, frames=frames(data)
            )
            assert await asyncio.to_thread(received_by, children[0]) == len(data)
    finally:
        stop(children)
    assert name_of(payload) in bucket.names(prefix)
    assert incoming_of(bucket.names(prefix)) == []


@pytest.mark.slow
async def test_learners_process_publishes_and_the_coordinators_receives_no_payload_byte(bucket, prefix, tmp_path):
    payloads = bucket.config(tmp_path, prefix=prefix).model_dump(mode="json")
    cluster = Cluster(tmp_path, coordinator={"payloads": payloads}, learner={"payload_urls": "any"})
    try:
        for name in ("coordinator", "learner"):
            cluster.start(name)
        async with CoordinatorClient(cluster.address, tls=TlsConfig(insecure=True)) as client:
            status = await cluster.until(client, lambda status: (status.head_version or 0) >= 0)
            head = await anext(aiter(client.watch_head(after_version=-1)))
        assert head.version == 0
        assert await asyncio.to_thread(received_by, cluster.children["coordinator"]) == 0
    finally:
        cluster.stop()

    names = bucket.names(prefix)
    assert payloads_of(names) != []
    assert incoming_of(names) == []
    told = repr(status) + "".join(child.log.read_text() for child in cluster.children.values())
    assert "listens on port" in told
    for secret in ("X-Amz", KEY, SECRET):
        assert secret not in told
