"""Samplers of one host share payloads: the policy halves of two, over real links to a real coordinator."""

import asyncio
import contextlib
import dataclasses
import os
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.process.clock import SystemClock
from heterorl.common.process.files import try_lock
from heterorl.common.pull.fetch import STALL_S
from heterorl.common.pull.pull import Puller
from heterorl.common.pull.shared import ASK_EVERY_S, SharedFetcher, SharedPayloads
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.clock import ManualClock
from tests.support.cut_source import DATA, PAYLOAD, Source
from tests.support.links import PLAINTEXT
from tests.support.policy_site import Counting, serving
from tests.support.run import LAYOUT, Run


class Site:
    """A puller with a link and a spool of its own."""

    def __init__(self, client, directory, shared):
        self.api = Counting(client)
        self.puller = Puller(
            api=self.api,
            spool=directory,
            layout=LAYOUT,
            clock=SystemClock(),
            shared=SharedPayloads(shared, max_bytes=1 << 30),
        )

    async def pull(self, version=-1, held=None):
        self.api.read.clear()
        return await self.puller.pull(held=held, want_version=version)


@pytest.fixture
async def sites(tmp_path):
    async with serving(tmp_path / "data") as operator, contextlib.AsyncExitStack() as links:
        run = Run(operator, tmp_path)
        await run.begin()
        for _ in range(3):
            await run.publish()
        clients = [
            await links.enter_async_context(CoordinatorClient(operator.served_at, tls=PLAINTEXT)) for _ in range(2)
        ]
        yield (
            run,
            *(Site(client, tmp_path / name, tmp_path / "shared") for client, name in zip(clients, "ab", strict=True)),
        )


def payloads(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


async def test_second_sampler_reads_no_payload_over_the_line(sites, tmp_path):
    run, first, second = sites
    for version in (0, 2):
        found = await first.pull(version)
        assert first.api.read
        again = await second.pull(version)
        assert second.api.read == []
        assert again.arena.state_root() == found.manifest.state_root == run.roots[version]
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o700
    # Nothing is left of turns, copies or what was applied.
    assert all(len(name) == 64 for name in payloads(tmp_path / "shared"))
    assert payloads(tmp_path / "a") == payloads(tmp_path / "b") == {}


async def test_samplers_that_begin_together_read_each_payload_once(sites):
    run, first, second = sites
    found = await asyncio.gather(first.pull(), second.pull())

    assert {each.manifest.state_root for each in found} == {run.roots[2]}
    read = first.api.read + second.api.read
    assert len(read) == len(set(read)) > 0


def changed(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorter(path):
    path.write_bytes(path.read_bytes()[:-1])


def elsewhere(path):
    other = path.parent.parent / "other"
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("damage", [changed, shorter, elsewhere])
async def test_file_that_is_not_what_its_name_says_costs_a_fetch(sites, tmp_path, damage):
    run, first, second = sites
    await first.pull()
    good = payloads(tmp_path / "shared")
    for name in good:
        damage(tmp_path / "shared" / name)

    assert (await second.pull()).arena.state_root() == run.roots[2]
    assert sorted(second.api.read) == sorted(good)
    # And what it fetched is there for the next one.
    assert payloads(tmp_path / "shared") == good
    assert not any((tmp_path / "shared" / name).is_symlink() for name in good)
    await first.pull(held=None)
    assert first.api.read == []


def test_directory_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"share_dir: .*chmod 700"):
        SharedPayloads(tmp_path / "open", max_bytes=1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="share_dir"):
        SharedPayloads(tmp_path / "file" / "in", max_bytes=1)


def fetcher(source, tmp_path, name, clock, max_bytes=1 << 40):
    shared = SharedPayloads(tmp_path / "shared", max_bytes=max_bytes)
    return SharedFetcher(shared=shared, api=source, spool=tmp_path / name, clock=clock, max_bytes=1 << 40)


async def test_what_is_shared_stays_within_its_bound_and_the_longest_unused_goes(tmp_path):
    shared = SharedPayloads(tmp_path / "shared", max_bytes=250)
    names = [f"{number:064x}" for number in range(4)]
    for age, name in enumerate(names[:2]):
        (tmp_path / name).write_bytes(bytes(100))
        shared.give(name, tmp_path / name)
        os.utime(tmp_path / "shared" / name, (age, age))
    # The older one was used since.
    assert shared.take(dataclasses.replace(PAYLOAD, digest=names[0], num_bytes=100), tmp_path / "taken")
    for name, size in ((names[2], 100), (names[3], 251)):
        (tmp_path / name).write_bytes(bytes(size))
        shared.give(name, tmp_path / name)

    assert sorted(payloads(tmp_path / "shared")) == [names[0], names[2]]
    assert (tmp_path / "taken").read_bytes() == bytes(100)


async def test_process_that_stands_still_is_not_waited_for(tmp_path):
    clock, source = ManualClock(), Source()
    waiting = fetcher(source, tmp_path, "a", clock)
    with (tmp_path / "shared" / f"{PAYLOAD.digest}.turn").open("ab") as held:
        assert try_lock(held)
        fetching = asyncio.create_task(waiting.fetch(PAYLOAD))
        for number in range(int(2 * STALL_S / ASK_EVERY_S)):
            if number * ASK_EVERY_S == STALL_S / 2:
                os.utime(held.fileno())
            await asyncio.sleep(0)
            clock.advance(ASK_EVERY_S)
            if number * ASK_EVERY_S < STALL_S:
                assert source.sent == 0, "the other one showed signs of life"
        path = await fetching

    assert path.read_bytes() == DATA
    assert source.sent == len(DATA)


async def test_what_arrived_before_goes_where_the_rest_is_shared(tmp_path):
    clock, source = SystemClock(), Source()
    begun = fetcher(source, tmp_path, "a", clock)
    (tmp_path / "a" / PAYLOAD.digest).write_bytes(DATA[:1000])
    (tmp_path / "a" / f"{PAYLOAD.digest}.5000").write_bytes(DATA[5000:6000])
    await fetcher(source, tmp_path, "b", clock).fetch(PAYLOAD)
    sent = source.sent

    path = await begun.fetch(PAYLOAD)
    assert path.read_bytes() == DATA
    assert source.sent == sent == len(DATA)
    assert list((tmp_path / "a").iterdir()) == [path]


async def test_directory_on_another_file_system_has_copies(sites, tmp_path, monkeypatch):
    run, first, second = sites
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(18, "another file system")))

    await first.pull()
    assert (await second.pull()).manifest.state_root == run.roots[2]
    assert second.api.read == []
