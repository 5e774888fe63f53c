"""Reads of what a relay keeps: verified once."""

import asyncio

import blake3
import pytest

from heterorl.common.process.clock import SystemClock
from heterorl.common.pull import payload_reader
from heterorl.common.types.common import Digest
from heterorl.relay.cache import CacheDirectory
from heterorl.relay.payloads import Payloads

DATA = bytes(range(256)) * (5 << 12)
DIGEST = Digest(blake3.blake3(DATA).hexdigest())


@pytest.fixture
async def cache(tmp_path):
    made = CacheDirectory(tmp_path, max_bytes=1 << 30)
    assert made.expect(DIGEST, len(DATA), keep=())
    (made.incoming / DIGEST).write_bytes(DATA)
    made.adopt(DIGEST)
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
