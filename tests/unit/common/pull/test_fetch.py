"""Payloads over several streams: cut, resumed, joined, and never returned with other bytes."""

import asyncio
import threading

import numpy as np
import pytest

from heterorl.common.errors import LimitExceeded, MalformedPayload, UnknownPayload, Unreachable
from heterorl.common.pull import fetcher
from heterorl.common.pull.fetcher import SPLIT_BYTES, Fetcher
from heterorl.common.types.policy import PayloadKind, PayloadRef
from tests.support.clock import ManualClock
from tests.support.cut_source import DATA, FRAME, PAYLOAD, Source


@pytest.fixture
def source():
    return Source()


def _fetcher(source, tmp_path, num_streams):
    return Fetcher(api=source, spool=tmp_path, clock=ManualClock(), num_streams=num_streams, max_bytes=1 << 40)


@pytest.mark.parametrize("num_streams", [1, 2, 4])
async def test_payload_arrives_whole_over_any_number_of_streams(source, tmp_path, num_streams):
    path = await _fetcher(source, tmp_path, num_streams).fetch(PAYLOAD)

    assert path.read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [path]
    assert source.most_streams == num_streams
    assert source.sent == len(DATA)


async def test_no_byte_is_fetched_twice_however_the_streams_break(source, tmp_path):
    rng = np.random.default_rng(1)
    for number in range(30):
        source.cut_after[number] = int(rng.integers(0, 3 * FRAME))
    num_calls = 0
    while True:
        num_calls += 1
        # Another process each time, with another number of streams.
        try:
            path = await _fetcher(source, tmp_path, int(rng.integers(1, 6))).fetch(PAYLOAD)
            break
        except Unreachable:
            continue

    assert path.read_bytes() == DATA
    assert source.sent == len(DATA)
    assert num_calls > 5
    assert list(tmp_path.iterdir()) == [path]


async def test_broken_stream_leaves_the_others_to_their_end(source, tmp_path):
    source.cut_after[1] = 2 * FRAME

    with pytest.raises(Unreachable):
        await _fetcher(source, tmp_path, 4).fetch(PAYLOAD)

    kept = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert kept == source.sent
    # Only the rest of the second quarter is missing.
    assert len(DATA) - kept == (len(DATA) // 2 - len(DATA) // 4) - 2 * FRAME


async def test_wrong_bytes_of_one_stream_end_the_others_at_once(source, tmp_path):
    source.hold = 0
    plain = source.read_payload

    async def read_payload(*, digest, offset, stop=None):
        if stop is None:
            yield DATA[-1:] * (len(DATA) - offset + 1)
        async for frame in plain(digest=digest, offset=offset, stop=stop):
            yield frame

    source.read_payload = read_payload

    with pytest.raises(LimitExceeded):
        await _fetcher(source, tmp_path, 2).fetch(PAYLOAD)
    assert source.open_streams == 0


async def test_cancelled_fetch_leaves_no_stream_and_keeps_what_was_written(source, tmp_path):
    source.hold = 1
    fetching = asyncio.create_task(_fetcher(source, tmp_path, 2).fetch(PAYLOAD))
    for _ in range(50):
        await asyncio.sleep(0)
    assert FRAME <= source.sent < len(DATA)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert source.open_streams == 0

    source.hold = None
    assert (await _fetcher(source, tmp_path, 2).fetch(PAYLOAD)).read_bytes() == DATA


async def test_joining_goes_on_after_a_crash_at_any_point(source, tmp_path):
    middle, third = 5 * SPLIT_BYTES, 7 * SPLIT_BYTES
    base, parts = tmp_path / PAYLOAD.digest, {middle: DATA[middle:third], third: DATA[third:]}
    # As a crash leaves it: half of the first part is appended already, and it is still there.
    base.write_bytes(DATA[: middle + 1000])
    for start, data in parts.items():
        (tmp_path / f"{PAYLOAD.digest}.{start}").write_bytes(data)

    path = await _fetcher(source, tmp_path, 2).fetch(PAYLOAD)

    assert path.read_bytes() == DATA
    assert source.asked == []
    assert list(tmp_path.iterdir()) == [path]


async def test_cancelled_fetch_leaves_no_thread_that_joins_its_pieces(source, tmp_path, monkeypatch):
    half, begun, may_go_on, join = len(DATA) // 2, threading.Event(), threading.Event(), fetcher.join
    (tmp_path / PAYLOAD.digest).write_bytes(DATA[:half])
    (tmp_path / f"{PAYLOAD.digest}.{half}").write_bytes(DATA[half:])

    def slow(*pieces):
        begun.set()
        may_go_on.wait(30.0)
        return join(*pieces)

    monkeypatch.setattr(fetcher, "join", slow)
    fetching = asyncio.create_task(_fetcher(source, tmp_path, 2).fetch(PAYLOAD))
    await asyncio.to_thread(begun.wait, 30.0)
    fetching.cancel()
    for _ in range(50):
        await asyncio.sleep(0)

    # The next fetch would join the same pieces meanwhile.
    was_over = fetching.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert not was_over
    assert (tmp_path / PAYLOAD.digest).read_bytes() == DATA


async def test_damaged_part_is_not_returned(source, tmp_path):
    half = len(DATA) // 2
    (tmp_path / PAYLOAD.digest).write_bytes(DATA[:half])
    (tmp_path / f"{PAYLOAD.digest}.{half}").write_bytes(b"x" + DATA[half + 1 :])

    with pytest.raises(MalformedPayload, match="another digest"):
        await _fetcher(source, tmp_path, 2).fetch(PAYLOAD)


async def test_part_that_is_too_long_is_refused(source, tmp_path):
    (tmp_path / f"{PAYLOAD.digest}.{len(DATA) - 5}").write_bytes(b"123456")

    with pytest.raises(LimitExceeded, match="longer"):
        await _fetcher(source, tmp_path, 2).fetch(PAYLOAD)


async def test_stream_that_sends_beyond_its_range_is_refused(source, tmp_path):
    async def generous(*, digest, offset, stop=None):
        yield DATA[offset : offset + FRAME] if stop is None else DATA[offset : stop + 1]

    source.read_payload = generous

    with pytest.raises(LimitExceeded, match="longer"):
        await _fetcher(source, tmp_path, 2).fetch(PAYLOAD)


@pytest.mark.parametrize("kind", [PayloadKind.MERGED, PayloadKind.DELTA, PayloadKind.SNAPSHOT])
async def test_payload_that_is_gone_is_told_for_another_plan(source, tmp_path, kind):
    async def gone(**_):
        raise UnknownPayload("gone")
        yield b""

    source.read_payload = gone
    payload = PayloadRef(kind=kind, digest=PAYLOAD.digest, num_bytes=len(DATA), from_version=0, to_version=1)

    with pytest.raises(UnknownPayload):
        await _fetcher(source, tmp_path, 2).fetch(payload)


async def test_parts_of_other_payloads_are_removed(source, tmp_path):
    for name in (PAYLOAD.digest, f"{PAYLOAD.digest}.77", "0" * 64, f"{'0' * 64}.99"):
        (tmp_path / name).write_bytes(b"1")

    _fetcher(source, tmp_path, 2).keep_only((PAYLOAD,))

    assert sorted(path.name for path in tmp_path.iterdir()) == [PAYLOAD.digest, f"{PAYLOAD.digest}.77"]
