"""A version from a coordinator's process to a sampler's memory, against the best of link and machine.

One bf16 model of random weights; the coordinator is the service's own process with its files, the way is loopback. In
one run, on the same files:

    pull          plan, fetch (frames, checksums, files, digest), apply, digest of the whole state
    fetch         the same without applying, in a process that keeps freed frames as services do; so does bare gRPC
    bare gRPC     a server that does nothing but stream the same frames to a client that does nothing
    to a file     the same, and the client writes each frame to a new file: what memory for a file's pages costs here
    raw TCP       sendfile to recv_into
    new pages     the same bytes from memory into a new file, frame by frame: no link, no digest
    old pages     the same bytes over a file that has its pages
    digest        blake3 of the same bytes in memory, frame by frame
    memcpy        one copy of the model in memory
    s3, relay     the same payloads from a bucket's addresses and through a relay (benchmarks/pull_ways.py)

Before each run a file of MEMORY times its bytes is written and removed: a virtual machine gets memory from its host at
the first touch, and a file in memory that is new to the machine costs 2 s of CPU a GB more.

    python -m benchmarks.pull --out benchmarks/results/pull.json
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import math
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import blake3
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.bare_streams import read_bare, read_bare_to_file, read_tcp, serve_bare, serve_tcp, serving
from benchmarks.pull_ways import Ways
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.fetcher import Fetcher
from heterorl.common.pull.puller import PulledVersion, Puller
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.transport_options import keep_freed_frames
from heterorl.common.types.common import Contract, Digest, LogprobMode, SamplingSemantics
from heterorl.common.types.policy import PayloadKind, PayloadRef, PublishRequest
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import FRAME_BYTES, PayloadInfo, max_file_bytes, write_delta, write_snapshot
from heterorl.common.wire.policy_messages import manifest_digest, manifest_to_bytes
from heterorl.demo.processes import start, stop
from heterorl.learner.publish.version_payloads import upload
from tests.support.ports import free_port

CHANGED = 0.0135
"""Share of elements that one step at learning rate 1e-6 changes."""
GOAL = 0.6
REPEATS = 5
MEMORY = 2
"""Copies that a run may hold: a relay's file and its caller's, or a state and its staging copy."""


def build_arenas(num_bytes: int) -> tuple[Arena, Arena]:
    """A bf16 model with weights of ordinary size, and its successor."""
    layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(num_bytes // 2,))])
    rng = np.random.default_rng(0)
    old = Arena(layout)
    for number in range(old.num_chunks):
        chunk = old.chunk(number)
        bits = (0.02 * rng.standard_normal(chunk.size, np.float32)).view(np.uint32)
        chunk[:] = (bits >> 16).astype(np.uint16).view(np.int16)
    new = old.copy()
    for number in range(new.num_chunks):
        chunk = new.chunk(number)
        where = rng.integers(0, chunk.size, int(CHANGED * chunk.size))
        chunk[where] += rng.choice(np.array([-1, 1], np.int16), where.size)
    return old, new


def contract_of(layout_id: Digest) -> Contract:
    """What a learner of this layout would state."""
    return Contract(
        tokenizer_digest=Digest("1" * 64),
        chat_template_digest=Digest("2" * 64),
        task_digest=Digest("3" * 64),
        layout_id=layout_id,
        vocab_size=2,
        num_prompts=1,
        group_size=2,
        sampling=SamplingSemantics(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1, logprob_mode=LogprobMode.PROCESSED
        ),
    )


async def publish(client: CoordinatorClient, arenas: tuple[Arena, Arena], directory: Path) -> list[PayloadRef]:
    """Upload and publish versions 0 and 1 as a learner does."""
    contract = contract_of(arenas[0].layout.layout_id)
    epoch = (await client.acquire_lease(holder="bench", contract=contract, request_id="bench")).epoch
    backoff = Backoff(clock=SystemClock(), rng=random.Random(0), base_s=0.1, cap_s=1.0)
    parent_digest, refs = "", []
    for version, arena in enumerate(arenas):
        path = directory / f"v{version}"
        info: PayloadInfo = write_delta(path, arenas[0], arena) if version else write_snapshot(path, arena)
        ref = PayloadRef(
            kind=PayloadKind.DELTA if version else PayloadKind.SNAPSHOT,
            from_version=version - 1,
            to_version=version,
            digest=info.digest,
            num_bytes=info.num_bytes,
        )
        await upload(client, ref, path, epoch=epoch, backoff=backoff)
        manifest = build_manifest(
            run_id="bench",
            epoch=epoch,
            version=version,
            parent_version=version - 1,
            parent_digest=parent_digest,
            layout=arena.layout,
            step=version,
            info=info,
            payloads=(ref,),
        )
        data = manifest_to_bytes(manifest)
        await client.publish_version(
            PublishRequest(
                epoch=epoch,
                step_id=f"step-{version}",
                parent_version=version - 1,
                lineage_version=version - 1,
                manifest=data,
                consumed=(),
                reports=(),
            )
        )
        parent_digest = manifest_digest(data)
        refs.append(ref)
    return refs


def _frames(path: Path) -> Iterator[bytes]:
    """A file's bytes by a few frames of memory, so that reading them costs nothing beside what is measured."""
    with path.open("rb") as file:
        frames = [file.read(FRAME_BYTES) for _ in range(4)]
    left = path.stat().st_size
    for number in itertools.count():
        frame = frames[number % 4][:left]
        if not frame:
            return
        left -= len(frame)
        yield frame


def write_frames(like: Path, path: Path, *, is_new: bool) -> int:
    """Write as many bytes as a file has, into a new file or over what the last call left."""
    if is_new:
        path.unlink(missing_ok=True)
    num_bytes = 0
    with path.open("wb" if is_new else "r+b", buffering=0) as file:
        for frame in _frames(like):
            num_bytes += file.write(frame)
    return num_bytes


def hash_frames(like: Path) -> int:
    """Compute blake3 of as many bytes as a file has."""
    hasher, num_bytes = blake3.blake3(), 0
    for frame in _frames(like):
        hasher.update(frame)
        num_bytes += len(frame)
    hasher.digest()
    return num_bytes


def empty(spool: Path, num_bytes: int) -> None:
    """Remove a run's files, and fill and free so much memory."""
    shutil.rmtree(spool, ignore_errors=True)
    filled = spool.parent / "memory"
    with filled.open("wb", buffering=0) as file:
        for _ in range(0, num_bytes, FRAME_BYTES):
            file.write(bytes(FRAME_BYTES))
    filled.unlink()


async def best_of(
    runs: dict[str, Callable[[], Awaitable[Any]]],
    *,
    prepare: Callable[[], None] = lambda: None,
    before: Mapping[str, Callable[[], Awaitable[None]]] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, float]]:
    """The results of the last of some runs of each, in turns, and the seconds of the fastest.

    Not counted: `prepare` before each run, and what stands in `before` under its name.

    In turns: what else the machine does then slows all of them down alike.
    """
    results: dict[str, Any] = {}
    fastest = dict.fromkeys(runs, math.inf)
    for _ in range(REPEATS):
        for name, run in runs.items():
            if name in before:
                await before[name]()
            # Last: freed memory goes back to the host within seconds.
            prepare()
            started = time.perf_counter()
            results[name] = await run()
            fastest[name] = min(fastest[name], time.perf_counter() - started)
    return results, fastest


async def measure(directory: Path, *, num_bytes: int, streams: int) -> dict[str, Any]:
    """All figures of one run."""
    load = os.getloadavg()[0]
    keep_freed_frames()
    arenas = build_arenas(num_bytes)
    address = f"127.0.0.1:{free_port()}"
    tables = {
        "run_id": "bench",
        "data_dir": str(directory / "coordinator"),
        "listen": address,
        "metrics_port": 0,
        "tls": {"insecure": True},
    }
    child = start("coordinator", name="coordinator", tables=tables, directory=directory)
    try:
        async with CoordinatorClient(address, tls=TlsConfig(insecure=True)) as client:
            refs = await publish(client, arenas, directory)
            rows = {}
            held: PulledVersion | None = None
            for ref in refs:
                rows[ref.kind.value], held = await _pull_row(
                    client, ref, held, directory, layout=arenas[0].layout, streams=streams
                )
            assert held is not None
            assert held.arena.digests() == arenas[1].digests()
            peak = psutil.Process(child.process.pid).memory_info().rss

            async def publish_again(client: CoordinatorClient, there: Path) -> list[PayloadRef]:
                return await publish(client, arenas, there)

            spool = directory / "spool"
            ways = Ways(directory, address=address, layout=arenas[0].layout, prepare=functools.partial(empty, spool))
            for ref, row in zip(refs, await ways.measure(refs, publish=publish_again, best_of=best_of), strict=True):
                rows[ref.kind.value] |= row
    finally:
        stop([child])
    target = np.empty(num_bytes // 2, np.int16)
    _, fastest = await best_of({"memcpy": lambda: asyncio.to_thread(np.copyto, target, arenas[0].view("w"))})
    return {
        "model_bytes": num_bytes,
        "streams": streams,
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
        "repeats": REPEATS,
        "memcpy_gb_s": round(num_bytes / fastest["memcpy"] / 1e9, 3),
        "coordinator_rss_mb": round(peak / 1e6, 1),
        "goal_ratio": GOAL,
        "rows": rows,
    }


async def _pull_row(
    client: CoordinatorClient,
    ref: PayloadRef,
    held: PulledVersion | None,
    directory: Path,
    *,
    layout: Layout,
    streams: int,
) -> tuple[dict[str, Any], PulledVersion]:
    spool = directory / "spool"

    async def pull() -> PulledVersion:
        puller = Puller(api=client, spool=spool, layout=layout, clock=SystemClock(), num_streams=streams)
        return await puller.pull(held=held, want_version=ref.to_version)

    async def fetch() -> Path:
        fetcher = Fetcher(
            api=client, spool=spool, clock=SystemClock(), num_streams=streams, max_bytes=max_file_bytes(layout.chunks)
        )
        return await fetcher.fetch(ref)

    published = directory / f"v{ref.to_version}"
    with serving(serve_bare, published) as bare, serving(serve_tcp, published) as tcp:
        found, seconds = await best_of(
            {
                "fetch": fetch,
                "bare_grpc": lambda: read_bare(bare),
                "bare_grpc_to_file": lambda: read_bare_to_file(bare, directory),
                "raw_tcp": lambda: read_tcp(tcp),
                "new_pages": lambda: asyncio.to_thread(write_frames, published, directory / "pages", is_new=True),
                "old_pages": lambda: asyncio.to_thread(write_frames, published, directory / "pages", is_new=False),
                "digest": lambda: asyncio.to_thread(hash_frames, published),
            },
            prepare=lambda: empty(spool, MEMORY * ref.num_bytes),
        )
    assert all(got == ref.num_bytes for name, got in found.items() if name != "fetch")
    pulled, fastest = await best_of({"pull": pull}, prepare=lambda: empty(spool, MEMORY * layout.full_bytes))
    rates = {f"{name}_gb_s": round(ref.num_bytes / some / 1e9, 4) for name, some in seconds.items()}
    row = {
        "bytes": ref.num_bytes,
        "ratio": round(layout.full_bytes / ref.num_bytes, 2),
        "pull_s": round(fastest["pull"], 4),
        "pull_model_gb_s": round(layout.full_bytes / fastest["pull"] / 1e9, 3),
        **rates,
        "fetch_to_bare_grpc": round(rates["fetch_gb_s"] / rates["bare_grpc_gb_s"], 3),
        "fetch_to_bare_grpc_to_file": round(rates["fetch_gb_s"] / rates["bare_grpc_to_file_gb_s"], 3),
    }
    return row, pulled["pull"]


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pull.json"))
    parser.add_argument("--model-mb", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the files lie; a temporary one if not given"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="heterorl-pull-", dir=arguments.directory) as directory:
        results = asyncio.run(
            measure(Path(directory), num_bytes=arguments.model_mb * 1_000_000, streams=arguments.streams)
        )
    table = Table(
        title=f"{arguments.model_mb} MB of bf16 over loopback, GB/s of payload; memcpy {results['memcpy_gb_s']}"
    )
    columns = (
        "payload", "MB", "pull s", "fetch", "bare gRPC", "to a file", "raw TCP", "of bare", "of file",
        "new pages", "old pages", "digest", "s3", "relay cold", "relay",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for kind, row in results["rows"].items():
        table.add_row(
            kind,
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['pull_s']:.2f}",
            f"{row['fetch_gb_s']:.3f}",
            f"{row['bare_grpc_gb_s']:.3f}",
            f"{row['bare_grpc_to_file_gb_s']:.3f}",
            f"{row['raw_tcp_gb_s']:.3f}",
            f"{row['fetch_to_bare_grpc']:.2f}",
            f"{row['fetch_to_bare_grpc_to_file']:.2f}",
            f"{row['new_pages_gb_s']:.2f}",
            f"{row['old_pages_gb_s']:.2f}",
            f"{row['digest_gb_s']:.2f}",
            f"{row['s3_gb_s']:.3f}",
            f"{row['relay_cold_gb_s']:.3f}",
            f"{row['relay_gb_s']:.3f}",
        )
    Console(width=160).print(table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
