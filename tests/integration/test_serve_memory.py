"""The memory of a coordinator does not depend on the size of what it serves."""

import pytest

from benchmarks import serve

MODEL_BYTES = 256_000_000
CLIENTS = 8
GROWTH_BYTES = 128_000_000
"""Half of one payload; eight callers take some 10 MB each in the reader, in messages and in gRPC."""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_coordinator_serves_eight_at_once_in_less_memory_than_the_payload(tmp_path):
    served = await serve.serve(tmp_path, num_bytes=MODEL_BYTES, clients=CLIENTS, read=serve.read_here)

    assert served.payload_bytes >= MODEL_BYTES
    assert served.rss_peak - served.rss_before < GROWTH_BYTES
    assert served.rss_peak < serve.LIMIT_MB * 1_000_000
