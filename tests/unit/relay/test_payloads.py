"""Reads of what a relay keeps: verified once, dropped only if it is damaged."""

import asyncio
import errno
import os
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import blake3
import pytest

from heterorl.common.errors import Busy, UnknownPayload
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull import fetcher, payload_reader
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.payloads import Payloads

DATA = bytes(range(256)) * (5 << 12)
DIGEST = Digest(blake3.blake3(DATA).hexdigest())


@pytest.fixture
async def cache(tmp_path):
    made = CacheDirectory(tmp_path, max_bytes=1 << 30)
    assert made.expect(DIGEST, len(DATA), keep=())
    (made.incoming / DIGEST).write_bytes(DATA)
    made.adopt(DIGEST, made.move(DIGEST))
    yield made
    made.close()


@pytest.fixture
async def payloads(cache):
    # The coordinator is never asked.
    made = Payloads(api=object(), cache=cache, clock=SystemClock())
    yield made
    await made.close()


async def read(payloads):
    return b"".join([frame async for frame in payloads.read(digest=DIGEST, offset=0, stop=None)])


async def test_a_kept_payload_is_verified_once_for_all_its_readers(payloads, monkeypatch):
    proofs = []
    prove = payload_reader._prove
    monkeypatch.setattr(payload_reader, "_prove", lambda *given: proofs.append(1) or prove(*given))

    assert await asyncio.gather(*(read(payloads) for _ in range(3))) == [DATA] * 3
    assert await read(payloads) == DATA

    assert len(proofs) == 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
async def test_a_relay_without_descriptors_or_memory_keeps_what_it_has(payloads, cache, monkeypatch, code):
    def refuses(descriptor):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(payload_reader.FileIdentity, "of", refuses)
        with pytest.raises(Busy, match=os.strerror(code)):
            await read(payloads)

    assert cache.num_bytes == len(DATA)
    assert await read(payloads) == DATA


async def test_a_kept_payload_that_the_disk_does_not_give_is_dropped(payloads, cache, monkeypatch):
    def fails(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(payload_reader.FileIdentity, "of", fails)
    # It is not planned here, so it cannot be fetched again.
    with pytest.raises(UnknownPayload):
        await read(payloads)

    assert cache.num_bytes == 0


async def test_the_last_bytes_of_a_payload_that_arrived_damaged_do_not_leave(tmp_path):
    class Upstream:
        async def read_payload(self, *, digest, offset, stop=None):
            yield DATA[offset:stop]

    cache = CacheDirectory(tmp_path, max_bytes=1 << 30)
    half = bytearray(DATA[: len(DATA) // 2])
    half[4096:8192] = bytes(4096)
    (cache.incoming / DIGEST).write_bytes(half)
    payloads = Payloads(api=Upstream(), cache=cache, clock=SystemClock())
    ref = PayloadRef(kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=0, digest=DIGEST, num_bytes=len(DATA))
    payloads.note(SimpleNamespace(payloads=[ref]))

    with pytest.raises(Busy, match="arrived damaged"):
        await read(payloads)

    assert await read(payloads) == DATA
    await payloads.close()
    cache.close()


async def test_a_full_cache_on_a_disk_that_became_read_only_passes_new_payloads_on(tmp_path, monkeypatch):
    class Upstream:
        async def read_payload(self, *, digest, offset, stop=None):
            yield DATA[offset:stop]

    cache = CacheDirectory(tmp_path, max_bytes=len(DATA))
    for name in "ab":
        assert cache.expect(name * 64, len(DATA) // 2, keep=())
        (cache.incoming / (name * 64)).write_bytes(bytes(len(DATA) // 2))
        cache.adopt(name * 64, cache.move(name * 64))

    def refuses(*given, **named):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuses)
    monkeypatch.setattr(fetcher, "PieceWriter", refuses)
    payloads = Payloads(api=Upstream(), cache=cache, clock=SystemClock())
    ref = PayloadRef(kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=0, digest=DIGEST, num_bytes=len(DATA))
    payloads.note(SimpleNamespace(payloads=[ref]))

    assert await read(payloads) == DATA
    await payloads.close()
    cache.close()


@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
async def test_plans_that_name_a_payload_that_is_gone_are_dropped_also_without_room_for_it(tmp_path, max_bytes):
    class Upstream:
        async def read_payload(self, **_asked):
            raise UnknownPayload("is not stored")
            yield b""

    gone = []
    cache = CacheDirectory(tmp_path, max_bytes=max_bytes)
    payloads = Payloads(api=Upstream(), cache=cache, clock=SystemClock(), on_gone=lambda: gone.append(1))
    ref = PayloadRef(kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=0, digest=DIGEST, num_bytes=len(DATA))
    payloads.note(SimpleNamespace(payloads=[ref]))

    with pytest.raises(UnknownPayload):
        await read(payloads)

    assert gone == [1]
    await payloads.close()
    cache.close()


async def test_only_the_event_loop_changes_the_index(tmp_path):
    """A thread that did would end a loop over it with an error."""
    threads = set()

    class Index(OrderedDict):
        def __setitem__(self, key, value):
            threads.add(threading.get_ident())
            super().__setitem__(key, value)

        def pop(self, *given):
            threads.add(threading.get_ident())
            return super().pop(*given)

    class Upstream:
        async def read_payload(self, *, digest, offset, stop=None):
            yield DATA[offset:stop]

    cache = CacheDirectory(tmp_path, max_bytes=1 << 30)
    cache._sizes, cache._arriving = Index(), Index()
    payloads = Payloads(api=Upstream(), cache=cache, clock=SystemClock())
    ref = PayloadRef(kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=0, digest=DIGEST, num_bytes=len(DATA))
    payloads.note(SimpleNamespace(payloads=[ref]))

    assert await read(payloads) == DATA
    # The reader has all bytes before the file is moved.
    await asyncio.gather(*(arrival.fetching for arrival in payloads._arrivals.values()))
    await payloads.close()
    cache.close()

    assert threads == {threading.get_ident()}
