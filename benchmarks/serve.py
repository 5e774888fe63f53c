"""Memory and bytes a second of a coordinator that serves one large model to several samplers at once.

The coordinator is the service's own process over its own files, each client a process with its own connection over
loopback. A client checks every frame and the digest of the whole, and keeps nothing, so that the disk holds one copy
only. The model is one bf16 tensor of bits that cannot be coded shorter: its snapshot has the size of the model, and the
coordinator verifies it meanwhile. The peak is the kernel's, of all memory resident in the process.

    python -m benchmarks.serve --out benchmarks/results/serve.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.costs import forget_peak, resident_bytes
from benchmarks.pull import contract_of, free_port
from heterorl.common.errors import Unreachable
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.transport_options import keep_freed_frames
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind, PayloadRef, PublishRequest
from heterorl.common.weights.arena import Layout, TensorSpec, digest_integers
from heterorl.common.weights.codec import Method
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import NO_ROOT, CodedChunk, write_coded
from heterorl.common.wire.policy_messages import manifest_to_bytes
from heterorl.demo.processes import start, stop

LIMIT_MB = 300
"""Most memory that the coordinator may take, MB."""
MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What serving took."""

    payload_bytes: int
    seconds: float
    rss_before: int
    rss_peak: int


def write_model(directory: Path, num_bytes: int) -> Manifest:
    """Put a snapshot where the coordinator keeps an upload of which only the name is missing; returns its manifest.

    Memory: one chunk, whatever the size of the model.
    """
    layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(num_bytes // 2,))])
    noise = np.random.default_rng(0).integers(-(2**15), 2**15, 4 << 20).astype(np.int16)

    def coded() -> Iterator[CodedChunk]:
        for number, chunk in enumerate(layout.chunks):
            values = noise[: chunk.stop - chunk.start] ^ np.int16(number)
            yield Method.RAW, values.tobytes(), values.size, digest_integers(values)

    partial = directory / "partial"
    partial.mkdir(parents=True)
    info = write_coded(partial / "model", coded(), layout=layout, from_root=NO_ROOT)
    (partial / "model").rename(partial / info.digest)
    payload = PayloadRef(
        kind=PayloadKind.SNAPSHOT, from_version=NO_VERSION, to_version=0, digest=info.digest, num_bytes=info.num_bytes
    )
    return build_manifest(
        run_id="bench",
        epoch=1,
        version=0,
        parent_version=NO_VERSION,
        parent_digest="",
        layout=layout,
        step=0,
        info=info,
        payloads=(payload,),
    )


def connect(address: str, number: int = 0) -> CoordinatorClient:
    """A client whose connection no other shares: gRPC joins those of equal options within a process."""
    return CoordinatorClient(address, tls=TlsConfig(insecure=True), max_message_bytes=MESSAGE_BYTES + number)


async def read_all(address: str, digest: Digest, number: int) -> Digest:
    """Read a payload and keep nothing; returns the digest of what came. A link that breaks is dialled again."""
    hasher, offset = blake3.blake3(), 0
    async with connect(address, number) as client:
        while True:
            try:
                async for frame in client.read_payload(digest=digest, offset=offset):
                    await asyncio.to_thread(hasher.update, frame)
                    offset += len(frame)
                return Digest(hasher.hexdigest())
            except Unreachable as error:
                # A machine with no time for a ping within 10 s breaks links.
                await asyncio.sleep(error.retry_after_s)


async def read_here(address: str, digest: Digest, clients: int) -> list[Digest]:
    """All clients in this process."""
    return list(await asyncio.gather(*(read_all(address, digest, number) for number in range(clients))))


async def read_in_processes(address: str, digest: Digest, clients: int) -> list[Digest]:
    """Each client in a process of its own."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(clients, mp_context=multiprocessing.get_context("spawn")) as pool:
        # They import before the clock starts to matter: a payload of this size takes far longer.
        jobs = [loop.run_in_executor(pool, _read_process, address, digest, number) for number in range(clients)]
        return list(await asyncio.gather(*jobs))


def _read_process(address: str, digest: Digest, number: int) -> Digest:
    keep_freed_frames()
    return asyncio.run(read_all(address, digest, number))


async def serve(
    directory: Path, *, num_bytes: int, clients: int, read: Callable[[str, Digest, int], Awaitable[list[Digest]]]
) -> Served:
    """Start a coordinator, publish a model, let `clients` read it at once."""
    data_dir, address = directory / "coordinator", f"127.0.0.1:{free_port()}"
    manifest = write_model(data_dir, num_bytes)
    payload = manifest.payloads[0]
    tables = {"run_id": "bench", "data_dir": str(data_dir), "listen": address, "metrics_port": 0}
    child = start("coordinator", name="coordinator", tables={**tables, "tls": {"insecure": True}}, directory=directory)
    try:
        async with connect(address) as client:
            contract = contract_of(manifest.layout_id)
            lease = await client.acquire_lease(holder="bench", contract=contract, request_id="bench")
            before = resident_bytes(child.process.pid, "VmRSS")
            forget_peak(child.process.pid)
            assert lease.epoch == manifest.epoch
            await client.publish_version(
                PublishRequest(
                    epoch=lease.epoch,
                    step_id="step-0",
                    parent_version=-1,
                    lineage_version=-1,
                    manifest=manifest_to_bytes(manifest),
                    consumed=(),
                    reports=(),
                )
            )
        started = time.perf_counter()
        digests = await read(address, payload.digest, clients)
        seconds = time.perf_counter() - started
        assert digests == [payload.digest] * clients
        peak = resident_bytes(child.process.pid, "VmHWM")
    finally:
        stop([child])
    return Served(payload_bytes=payload.num_bytes, seconds=seconds, rss_before=before, rss_peak=peak)


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve.json"))
    parser.add_argument("--model-mb", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--directory", type=Path, default=None, help="where the files lie; temporary if not given")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="heterorl-serve-", dir=arguments.directory) as directory:
        num_bytes, clients = arguments.model_mb * 1_000_000, arguments.clients
        served = asyncio.run(serve(Path(directory), num_bytes=num_bytes, clients=clients, read=read_in_processes))
    results: dict[str, Any] = {
        "model_bytes": num_bytes,
        "payload_bytes": served.payload_bytes,
        "clients": clients,
        "seconds": round(served.seconds, 2),
        "gb_s": round(clients * served.payload_bytes / served.seconds / 1e9, 4),
        "rss_before_mb": round(served.rss_before / 1e6, 1),
        "rss_peak_mb": round(served.rss_peak / 1e6, 1),
        "rss_limit_mb": LIMIT_MB,
        "is_within_limit": served.rss_peak <= LIMIT_MB * 1e6,
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
    }
    table = Table(title=f"{arguments.model_mb} MB to {clients} clients at once over loopback")
    for column in ("clients", "s", "GB/s to all", "RSS before, MB", "RSS peak, MB", "limit, MB"):
        table.add_column(column, justify="right")
    keys = ("clients", "seconds", "gb_s", "rss_before_mb", "rss_peak_mb", "rss_limit_mb")
    table.add_row(*(str(results[key]) for key in keys))
    Console().print(table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if results["is_within_limit"] else 1)


if __name__ == "__main__":
    main()
