"""Payloads in a bucket, over real sockets to a real server of S3's protocol: who reads from where, and what survives."""

import asyncio
import contextlib
import http.server
import threading
from datetime import timedelta

import pytest

from heterorl.common.errors import Busy, ConfigError, CorruptData, PayloadMissing, UnknownVersion, Unreachable
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull import fetcher
from heterorl.common.pull.puller import Puller
from heterorl.common.rpc import presigned as reads
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.coordinator.coordinator_config import BucketConfig, CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.payloads import storage_setup
from heterorl.coordinator.store import bucket_storage as objects
from heterorl.coordinator.store.bucket_storage import Objects, read_credentials
from tests.support.bucket import SECRET
from tests.support.bucketed import copies, payloads_of, run_at, served
from tests.support.clock import ManualClock
from tests.support.relay import Relay
from tests.support.relayed import LargeRun, Site, counted, since
from tests.support.run import Run
from tests.support.secure_run import PATIENT


@pytest.fixture
async def run(bucket, prefix, tmp_path):
    async with run_at(tmp_path / "run", bucket.config(tmp_path, prefix=prefix)) as run:
        yield run


@contextlib.asynccontextmanager
async def node(run, spool, *, urls="any", streams=1):
    tls = run.certificates.tls("sampler")
    async with CoordinatorClient(run.address, tls=tls, policy=PATIENT, payload_urls=urls) as client:
        yield Puller(api=client, spool=spool, layout=run.run.layout, clock=SystemClock(), num_streams=streams)


@pytest.mark.parametrize("streams", [1, 3])
async def test_nodes_read_from_the_bucket_and_the_coordinator_sends_nothing(run, bucket, prefix, tmp_path, streams):
    before = served()
    async with node(run, tmp_path / "spool", streams=streams) as puller:
        pulled = await puller.pull(held=None, want_version=-1)
        await run.run.publish()
        later = await puller.pull(held=pulled, want_version=-1)

    assert later.manifest.state_root == run.run.roots[1]
    assert served() == before
    assert len(payloads_of(bucket.names(prefix))) == 2


async def test_node_that_asks_no_addresses_is_served_by_the_coordinator(run, tmp_path):
    for path in copies(run):
        # Not even a copy is there.
        path.unlink()
    for urls in ("none", "https"):
        before = served()
        async with node(run, tmp_path / urls, urls=urls) as puller:
            pulled = await puller.pull(held=None, want_version=-1)

        assert pulled.manifest.state_root == run.run.roots[0]
        assert served() - before > 6 << 20
    assert len(copies(run)) == 1


@pytest.mark.parametrize("cache_bytes", [7 << 20, 1 << 20])
async def test_relay_reads_from_the_bucket_once_and_again_what_it_evicted(run, bucket, prefix, tmp_path, cache_bytes):
    # Room for one of two snapshots; or for none, which are passed on.
    held = None
    async with Site(run, tmp_path / "relay", payload_urls="any", cache_bytes=cache_bytes) as site:
        before = counted()
        for version, name in ((0, "a"), (0, "b"), (1, "a"), (0, "c")):
            if version > run.run.head:
                await run.run.publish(snapshot=True)
                before["served"] = counted()["served"]
            pulled = await site.puller(tmp_path / f"{version}{name}").pull(held=held, want_version=version)
            assert pulled.manifest.state_root == run.run.roots[version]
            await site.settled()
        found = since(before)

    one = bucket.sizes(prefix)[0]
    assert (found["served"], found["from_coordinator"]) == (0, 0)
    if cache_bytes > one:
        assert (found["fetched"], found["hit"] + found["joined"]) == (3, 1)
    assert found["from_bucket"] == pytest.approx((3 if cache_bytes > one else 4) * one, rel=0.01)
    assert found["to_nodes"] == pytest.approx(4 * one, rel=0.01)


@pytest.mark.parametrize("cache_bytes", [64 << 20, 1 << 20])
async def test_relay_that_found_wrong_bytes_in_the_bucket_asks_the_coordinator(
    run, bucket, prefix, tmp_path, cache_bytes
):
    (name,) = payloads_of(bucket.names(prefix))
    data = copies(run)[0].read_bytes()
    bucket.replace(prefix, name, data[:-1] + bytes([data[-1] ^ 1]))
    async with Site(run, tmp_path / "relay", payload_urls="any", cache_bytes=cache_bytes) as site:
        before = counted()
        puller = site.puller(tmp_path / "spool")
        with pytest.raises((CorruptData, Unreachable), match="digest"):
            await puller.pull(held=None, want_version=-1)
        pulled = await puller.pull(held=None, want_version=-1)
        found = since(before)

    assert pulled.manifest.state_root == run.run.roots[0]
    assert (found["from_bucket"], found["from_coordinator"]) == (len(data), len(data))


async def test_address_that_did_not_serve_is_asked_again_when_a_plan_brings_a_new_one(run, tmp_path):
    before = served()
    async with node(run, tmp_path / "spool") as puller:
        direct = puller.api._direct
        plan = await puller.api.plan_pull(have_version=-1, have_root="", want_version=-1)
        digest = plan.payloads[0].digest
        direct.forget(digest)
        assert direct.find(digest) is None
        pulled = await puller.pull(held=None, want_version=-1)
        assert served() == before
        # What had other bytes is not: no plan makes them right.
        puller.api.distrust_address(digest)
        await puller.api.plan_pull(have_version=-1, have_root="", want_version=-1)
        assert direct.find(digest) is None
    assert pulled.manifest.state_root == run.run.roots[0]


class _Refusing(http.server.BaseHTTPRequestHandler):
    """Half of what is asked for at first, then a refusal, as of an address that is over."""

    asked: list[str]

    def do_GET(self):
        self.asked.append(self.headers["Range"])
        if len(self.asked) > 1:
            self.send_error(403)
            return
        begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end}/{end + 1}")
        self.send_header("Content-Length", str(end + 1 - begin))
        self.end_headers()
        self.wfile.write(self.whole[begin : (begin + end) // 2])
        self.close_connection = True

    def log_message(self, *_):
        pass


async def test_address_that_breaks_off_leaves_the_rest_to_the_coordinator(run, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    (copy,) = copies(run)
    handler = type("Handler", (_Refusing,), {"asked": [], "whole": copy.read_bytes()})
    stand_in = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=stand_in.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{stand_in.server_port}/x?X-Amz-Signature=5ec4e7"

    async def urls(plan):
        return [url] * len(plan.payloads)

    monkeypatch.setattr(run.core.policy, "payload_urls", urls)
    before = served()
    try:
        async with node(run, tmp_path / "spool") as puller:
            pulled = await puller.pull(held=None, want_version=-1)
    finally:
        await asyncio.to_thread(stand_in.shutdown)
        stand_in.server_close()

    assert pulled.manifest.state_root == run.run.roots[0]
    assert len(handler.asked) == 1
    # The half that came from the address is not sent again.
    assert 0 < served() - before < 0.7 * len(handler.whole)
    assert "5ec4e7" not in caplog.text
    assert "comes from the coordinator" in caplog.text


class _Dripping(http.server.BaseHTTPRequestHandler):
    """Some bytes of what is asked for, and then none until the test is over."""

    asked: list[str]
    FIRST = 100_000

    def do_GET(self):
        self.asked.append(self.headers["Range"])
        begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end}/{end + 1}")
        self.send_header("Content-Length", str(end + 1 - begin))
        self.end_headers()
        self.wfile.write(self.whole[begin : begin + self.FIRST])
        self.over.wait()

    def log_message(self, *_):
        pass


@pytest.fixture
async def dripping(run, monkeypatch):
    """A store that all plans lead to, and that brings nearly nothing."""
    (copy,) = copies(run)
    handler = type("Handler", (_Dripping,), {"asked": [], "whole": copy.read_bytes(), "over": threading.Event()})
    stand_in = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    stand_in.daemon_threads = True
    threading.Thread(target=stand_in.serve_forever, daemon=True).start()

    async def urls(plan):
        return [f"http://127.0.0.1:{stand_in.server_port}/x"] * len(plan.payloads)

    monkeypatch.setattr(run.core.policy, "payload_urls", urls)
    yield handler
    handler.over.set()
    await asyncio.to_thread(stand_in.shutdown)
    stand_in.server_close()


@pytest.mark.parametrize("who", ["node", "relay"])
async def test_store_that_drips_leaves_the_rest_to_the_coordinator_and_is_left_alone(
    run, dripping, tmp_path, monkeypatch, who
):
    monkeypatch.setattr(reads, "BRISK_S", 0.2)
    before = served()
    async with contextlib.AsyncExitStack() as stack:
        if who == "node":
            puller = await stack.enter_async_context(node(run, tmp_path / "spool"))
        else:
            # With too little room to keep it: passed on to who asks.
            site = Site(run, tmp_path / "relay", payload_urls="any", cache_bytes=1 << 20)
            puller = (await stack.enter_async_context(site)).puller(tmp_path / "spool")
        pulled = await puller.pull(held=None, want_version=-1)
        sent = served() - before
        await run.run.publish()
        later = await puller.pull(held=pulled, want_version=-1)

    assert later.manifest.state_root == run.run.roots[1]
    assert len(dripping.asked) == 1
    # What came is kept, but for less than a frame.
    assert 0 < len(dripping.whole) - sent <= dripping.FIRST


async def test_reader_that_gives_a_store_up_leaves_it_alone(run, dripping, tmp_path, monkeypatch):
    monkeypatch.setattr(fetcher, "STALL_S", 1.0)
    async with node(run, tmp_path / "spool") as puller:
        with pytest.raises(Unreachable, match="no bytes of the payload"):
            await puller.pull(held=None, want_version=-1)
        pulled = await puller.pull(held=None, want_version=-1)

    assert pulled.manifest.state_root == run.run.roots[0]
    assert len(dripping.asked) <= 1


async def test_wrong_bytes_in_the_bucket_are_refused_by_the_node_and_put_aside(run, bucket, prefix, tmp_path):
    (name,) = payloads_of(bucket.names(prefix))
    (copy,) = copies(run)
    data = copy.read_bytes()
    bucket.replace(prefix, name, data[:-1] + bytes([data[-1] ^ 1]))
    async with node(run, tmp_path / "spool") as puller:
        with pytest.raises(CorruptData, match="arrived with another digest"):
            await puller.pull(held=None, want_version=-1)
        # The second time by the coordinator, whose copy is right.
        pulled = await puller.pull(held=None, want_version=-1)
    assert pulled.manifest.state_root == run.run.roots[0]

    copy.unlink()
    async with node(run, tmp_path / "again", urls="none") as puller:
        with pytest.raises(UnknownVersion):
            await puller.pull(held=None, want_version=-1)
    assert payloads_of(bucket.names(prefix)) == []
    assert f"damaged/{copy.name}" in bucket.names(prefix)


async def test_copy_that_a_disk_changed_is_fetched_again(run, tmp_path):
    (copy,) = copies(run)
    data = copy.read_bytes()
    copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    async with node(run, tmp_path / "spool", urls="none") as puller:
        with pytest.raises(Busy, match="fetched again"):
            await puller.pull(held=None, want_version=-1)
        pulled = await puller.pull(held=None, want_version=-1)

    assert pulled.manifest.state_root == run.run.roots[0]
    assert copy.read_bytes() == data


async def test_upload_is_complete_when_the_bucket_has_it(bucket, prefix, tmp_path):
    relay = Relay(f"127.0.0.1:{bucket.port}", one_way_s=0.0)
    async with relay.open():
        payloads = bucket.config(tmp_path, prefix=prefix, endpoint=f"http://127.0.0.1:{relay.port}")
        async with run_at(tmp_path / "run", payloads) as run:
            relay.cut()
            with pytest.raises(Busy, match="bucket of the payloads cannot take a payload now"):
                await run.run.prepare()
            assert len(payloads_of(bucket.names(prefix))) == 1
            (new,) = {path.name for path in copies(run)} - {n.rpartition("/")[2] for n in bucket.names(prefix)}
            relay.mend()
            # All its bytes are here: nothing is sent again.
            assert await run.run.api.query_upload(digest=new) == (run.directory / f"payload-{1}").stat().st_size
            run.run.arena = run.run.arena.copy()
            assert await run.core.blobs.ensure(digest=new, num_bytes=(run.directory / "payload-1").stat().st_size)
            assert len(payloads_of(bucket.names(prefix))) == 2


async def test_restart_on_another_host_needs_the_store_and_the_bucket_alone(bucket, prefix, tmp_path):
    payloads = bucket.config(tmp_path, prefix=prefix)
    async with run_at(tmp_path / "run", payloads) as run:
        await run.run.publish()
        config = run.core.config
        roots = dict(run.run.roots)
    for path in copies(run):
        path.unlink()
    core = await Coordinator.open(config, SystemClock())
    try:
        puller = Puller(api=core, spool=tmp_path / "spool", layout=run.run.layout, clock=SystemClock())
        assert (await puller.pull(held=None, want_version=-1)).manifest.state_root == roots[1]
        assert core.blobs.used_bytes == sum(path.stat().st_size for path in copies(run))
    finally:
        await core.close()

    with pytest.raises(ConfigError, match="payloads of this run are in a bucket"):
        await Coordinator.open(config.model_copy(update={"payloads": type(payloads)()}), SystemClock())
    other = config.model_copy(update={"data_dir": tmp_path / "other"})
    with pytest.raises(ConfigError, match="has the payloads of another store"):
        await Coordinator.open(other, SystemClock())


async def test_copies_are_bounded_and_what_nobody_needs_leaves_the_bucket(bucket, prefix, tmp_path):
    payloads = bucket.config(tmp_path, prefix=prefix, cache_bytes=16 << 20)
    config = CoordinatorConfig(data_dir=tmp_path / "data", payloads=payloads, max_staleness_versions=1, keep_versions=1)
    clock = ManualClock()
    core = await Coordinator.open(config, clock)
    try:
        run = LargeRun(core, tmp_path)
        await run.begin()
        for _ in range(6):
            await run.publish(snapshot=True)
            await core.collector.work()
        assert len(payloads_of(bucket.names(prefix))) == 6
        files = [path for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 16 << 20
        # Addresses of all plans are over.
        clock.advance(2 * payloads.url_lifetime_s)
        assert await core.collector.collect(missing_bytes=1) > 12 << 20

        names = payloads_of(bucket.names(prefix))
        assert len(names) < 4
        assert core.blobs.stored() == {name.rpartition("/")[2] for name in names}
        puller = Puller(api=core, spool=tmp_path / "spool", layout=run.layout, clock=SystemClock())
        assert (await puller.pull(held=None, want_version=-1)).manifest.state_root == run.roots[5]
    finally:
        await core.close()


async def test_payload_of_a_plan_stays_in_the_bucket_as_long_as_its_address_is_valid(bucket, prefix, tmp_path):
    payloads = bucket.config(tmp_path, prefix=prefix, url_lifetime_s=3600.0)
    config = CoordinatorConfig(
        data_dir=tmp_path / "data", payloads=payloads, max_staleness_versions=1, keep_versions=1, pull_lease_s=1.0
    )
    clock = ManualClock()
    core = await Coordinator.open(config, clock)
    try:
        run = Run(core, tmp_path)
        await run.begin()
        await run.publish(snapshot=True)
        clock.advance(payloads.url_lifetime_s + 1)
        (planned,) = (await core.plan_pull(have_version=-1, have_root="", want_version=-1)).payloads
        for _ in range(4):
            await run.publish(snapshot=True)
            await core.collector.work()

        async def left():
            await core.collector.collect(missing_bytes=1)
            return {name.rpartition("/")[2] for name in payloads_of(bucket.names(prefix))}

        clock.advance(payloads.url_lifetime_s - 1)
        before = await left()
        assert planned.digest in before
        assert len(before) < 5, "what no plan names goes"

        clock.advance(2)
        assert await left() == before - {planned.digest}
    finally:
        await core.close()


async def test_bucket_that_does_not_answer_ends_the_start_without_its_secret(
    bucket, prefix, tmp_path, monkeypatch, caplog
):
    payloads = bucket.config(tmp_path, prefix=prefix, endpoint="http://127.0.0.1:9")
    caplog.set_level("DEBUG")
    monkeypatch.setattr(storage_setup, "WAIT_S", 0.0)
    with pytest.raises(Busy, match="the bucket of the payloads cannot be read now") as caught:
        async with run_at(tmp_path / "run", payloads):
            pass

    told = caplog.text + str(caught.value) + repr(caught.value.__cause__) + repr(payloads)
    assert SECRET not in told
    assert "127.0.0.1:9" not in str(caught.value)
    assert caught.value.exit_code == 1, "no reason to stay down: the units restart it"


@pytest.mark.parametrize("problem", ["mode", "section", "missing"])
def test_credentials_are_refused_without_being_quoted(tmp_path, problem):
    path = tmp_path / "credentials"
    if problem != "missing":
        path.write_text(f"[other]\naws_secret_access_key = {SECRET}\n")
        path.chmod(0o640 if problem == "mode" else 0o600)
    with pytest.raises(ConfigError, match=r"payloads\.credentials_file") as caught:
        read_credentials(path)
    assert SECRET not in str(caught.value)


async def test_credentials_that_were_exchanged_are_used_and_unreadable_ones_leave_the_old(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(objects, "CREDENTIALS_KEPT", timedelta(0))
    path = tmp_path / "credentials"

    def write(key, token):
        path.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={SECRET}\n{token}\n")
        path.chmod(0o600)

    async def signed():
        (url,) = await there.urls(["a" * 64])
        return url

    write("KEY1", "aws_session_token=one")
    there = Objects(BucketConfig(bucket="mine", credentials_file=path), run_id="run", on_lost=lambda _: None)
    assert "Credential=KEY1" in await signed()
    write("KEY2", "aws_session_token=two")
    url = await signed()
    assert "Credential=KEY2" in url
    assert "Security-Token=two" in url
    path.chmod(0o640)
    assert "Credential=KEY2" in await signed()
    assert "readable by others" in caplog.text
    assert SECRET not in caplog.text


async def test_publication_names_only_what_the_bucket_has(bucket, prefix, run):
    request = await run.run.prepare()
    for name in payloads_of(bucket.names(prefix)):
        bucket.remove(prefix, name)
    for path in copies(run):
        path.unlink()
    # Listed at the start, written by this process alone: what a hand deletes meanwhile is found when it is read.
    run.core.context.storage.sizes.clear()
    with pytest.raises(PayloadMissing):
        await run.run.api.publish_version(request)
