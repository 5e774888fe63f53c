"""Cost of many sites and a long history at one coordinator: CPU for each group, latencies, memory, start.

The coordinator is the service's own process, the sites are simulated ones in another (benchmarks/site_load.py), each
with a connection of its own, and a learner here consumes by stream and publishes. All sites together push at one rate,
so that a row differs from the next in the number of sites alone. Beside each row's latencies stands an empty unary call
to a bare gRPC server, timed by the same process at the same time. CPU for a group is that of the coordinator beyond
what it takes while the same sites only watch and beat, which stands beside it.

Then a store gets a history of versions and consumed groups by SQL, and the same sites: a start and each latency beside
those of an empty store.

Then most sites once more, three times with the store in a file of SQLite's and once in PostgreSQL: `stores`. The server
is on this machine and its disk, reached by a socket of the machine; its CPU stands in a column of its own. Last, 1,000
and 10,000 sites on virtual time (`simulated`, benchmarks/sites_simulated.py).

`--only stores` measures these rows alone, and leaves the others in the file as they are.

    python -m benchmarks.sites --out benchmarks/results/sites.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import sites_simulated
from benchmarks.costs import cpu_s, family_cpu_s, resident_bytes
from benchmarks.pull import contract_of, free_port
from benchmarks.serve import connect
from benchmarks.site_load import GROUP_SIZE, TOKENS
from heterorl.common.errors import Unreachable
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import Contract, StepReport
from heterorl.common.types.policy import PayloadKind, PayloadRef, PublishRequest
from heterorl.common.types.rollout import GroupId
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.manifest import build_manifest
from heterorl.common.weights.payload import write_snapshot
from heterorl.common.wire.common_messages import contract_to_bytes
from heterorl.common.wire.policy_messages import manifest_digest, manifest_to_bytes
from heterorl.coordinator.status_report import encode
from heterorl.demo.processes import Child, start, stop
from tests.support.debian import postgres_binaries
from tests.support.postgres import PostgresServer

PER_VERSION = 500
HEARTBEAT_S = 2.0
"""As a sampler's default."""
CREDITS = 2 * PER_VERSION
RUNS_OF_SQLITE = 3
SIMULATED = (1_000, 10_000)
PARTS = ("rows", "history", "stores", "simulated")


class Learner:
    """Publishes a version for every PER_VERSION groups that the stream brings. The state never changes, so that every
    version has one state root and one payload."""

    def __init__(self, client: CoordinatorClient, directory: Path) -> None:
        self._client = client
        self._directory = directory
        self.arena = Arena(Layout.build([TensorSpec(name="w", dtype="bf16", shape=(64,))]))
        self.contract: Contract = dataclasses.replace(
            contract_of(self.arena.layout.layout_id), vocab_size=1000, num_prompts=10_000, group_size=GROUP_SIZE,
            sampling=dataclasses.replace(contract_of(self.arena.layout.layout_id).sampling, max_new_tokens=TOKENS),
        )  # fmt: skip
        self.head = -1
        self.consumed = 0
        self._epoch = 0

    async def begin(self) -> None:
        """Take the lease; publish version 0 where there is none."""
        lease = await self._client.acquire_lease(
            holder="bench", contract=self.contract, request_id=f"r{time.time_ns()}", groups_per_version=PER_VERSION
        )
        self._epoch, self.head = lease.epoch, lease.head_version
        if self.head < 0:
            await self.publish(())

    async def publish(self, consumed: tuple[GroupId, ...]) -> None:
        """Publish the same state again."""
        path, version = self._directory / "payload", self.head + 1
        info = write_snapshot(path, self.arena)
        payload = PayloadRef(
            kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=version, digest=info.digest, num_bytes=info.num_bytes
        )

        async def frames() -> AsyncIterator[bytes]:
            yield path.read_bytes()

        if await self._client.query_upload(digest=payload.digest) < payload.num_bytes:
            await self._client.upload_payload(
                epoch=self._epoch, digest=payload.digest, num_bytes=payload.num_bytes, offset=0, frames=frames()
            )
        parent = b"" if self.head < 0 else (await self._client.get_signed_manifest(version=self.head)).data
        manifest = build_manifest(
            run_id="bench", epoch=self._epoch, version=version, parent_version=self.head,
            parent_digest=manifest_digest(parent) if parent else "", layout=self.arena.layout, step=version, info=info,
            payloads=(payload,),
        )  # fmt: skip
        self.head = await self._client.publish_version(
            PublishRequest(
                epoch=self._epoch,
                step_id=f"step-{self._epoch}-{version}",
                parent_version=self.head,
                lineage_version=self.head,
                manifest=manifest_to_bytes(manifest),
                consumed=consumed,
                reports=(),
            )
        )

    async def train(self) -> None:
        """Consume groups for ever."""
        returned: asyncio.Queue[int] = asyncio.Queue()
        returned.put_nowait(CREDITS)

        async def credits() -> AsyncIterator[int]:
            while True:
                yield await returned.get()

        batch: list[GroupId] = []
        async for queued in self._client.stream_groups(epoch=self._epoch, held=(), credits=credits()):
            batch.append(queued.group.id)
            self.consumed += 1
            if len(batch) == PER_VERSION:
                await self.publish(tuple(batch))
                returned.put_nowait(len(batch))
                batch.clear()


class Load:
    """The process of the simulated sites."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, options: dict[str, Any]) -> AsyncIterator[Load]:
        """Start it; all sites are registered at the beginning."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.site_load", json.dumps(options), stdin=-1, stdout=-1, limit=1 << 26
        )
        load = cls(process)
        try:
            await load._answer()
            yield load
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def run(self, *, seconds: float, rate: float = 0.0, count: int = 2) -> dict[str, Any]:
        """Let the sites work (or, at no rate, only live) for a while; returns what they sampled."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"seconds": seconds, "rate": rate, "count": count}).encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("the sites' process failed; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def percentile(values: list[float], share: float) -> float:
    """Milliseconds that so large a share stays below."""
    return round(1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 2) if values else -1.0


def open_coordinator(directory: Path, url: str = "") -> tuple[Child, str, float]:
    """Start a coordinator over a directory; returns it, its address and the seconds until it serves."""
    address = f"127.0.0.1:{free_port()}"
    tables = {
        "run_id": "bench", "data_dir": str(directory / "coordinator"), "listen": address, "metrics_port": 0,
        "tls": {"insecure": True}, "groups_per_version": PER_VERSION, "max_outstanding_groups": 8 * PER_VERSION,
        "store": {"url": url},
    }  # fmt: skip
    announced = directory / "coordinator" / "address"
    announced.unlink(missing_ok=True)
    started = time.perf_counter()
    child = start("coordinator", name="coordinator", tables=tables, directory=directory)
    while not announced.exists():
        child.check()
        time.sleep(0.005)
    return child, address, time.perf_counter() - started


async def measure(
    directory: Path, *, sites: int, rate: float, idle_s: float, load_s: float, reference: str, url: str = ""
) -> dict[str, Any]:
    """One row: a coordinator over the directory, so many sites."""
    load_before = os.getloadavg()[0]
    child, address, start_s = open_coordinator(directory, url)
    pid = child.process.pid
    try:
        async with connect(address) as client:
            learner = Learner(client, directory)
            while True:
                try:
                    await learner.begin()
                    break
                except Unreachable:
                    await asyncio.sleep(0.05)
            options = {
                "address": address, "reference": reference, "sites": sites, "heartbeat_s": HEARTBEAT_S,
                "head": learner.head, "root": learner.arena.state_root(),
                "contract": contract_to_bytes(learner.contract).hex(),
            }  # fmt: skip
            training = asyncio.create_task(learner.train())
            async with Load.running(options) as load:
                await load.run(seconds=2.0, rate=rate)
                before, began = cpu_s(pid), time.perf_counter()
                await load.run(seconds=idle_s)
                idle_share = (cpu_s(pid) - before) / (time.perf_counter() - began)
                before, began = cpu_s(pid), time.perf_counter()
                sampled = await load.run(seconds=load_s, rate=rate)
                wall = time.perf_counter() - began
                spent = cpu_s(pid) - before
                resident = resident_bytes(pid, "VmRSS") / 1e6
            training.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await training
    finally:
        stop([child])
    accepted = sampled["groups"].get("PUSH_STATUS_ACCEPTED", 0)
    seconds = sampled["seconds"]
    return {
        "sites": sites,
        "groups_per_s": round(accepted / wall, 1),
        "cpu_ms_per_group": round(1e3 * (spent - idle_share * wall) / max(1, accepted), 3),
        "idle_cpu_share": round(idle_share, 3),
        "lease_p50_ms": percentile(seconds.get("lease", []), 0.5),
        "lease_p99_ms": percentile(seconds.get("lease", []), 0.99),
        "heartbeat_p99_ms": percentile(seconds.get("heartbeat", []), 0.99),
        "push_p99_ms": percentile(seconds.get("push", []), 0.99),
        "reference_p50_ms": percentile(seconds["reference"], 0.5),
        "reference_p99_ms": percentile(seconds["reference"], 0.99),
        "rss_mb": round(resident, 1),
        "start_s": round(start_s, 2),
        "load_average_before": round(load_before, 2),
        "other_outcomes": {k: v for k, v in sampled["groups"].items() if k not in ("PUSH_STATUS_ACCEPTED", "heads")},
        "heads_seen": sampled["groups"].get("heads", 0),
    }


def write_history(store: Path, *, versions: int, groups: int) -> None:
    """Put versions and consumed groups behind the head of a store that no process has open."""
    connection = sqlite3.connect(store)
    # Nothing depends on these rows: written once, by one process.
    connection.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; PRAGMA cache_size = -500000;")
    (head,) = connection.execute("SELECT max(version) FROM versions").fetchone()
    columns = "content, epoch, manifest, manifest_digest, state_root, published, bytes_full, bytes_last"
    connection.execute(
        f"WITH RECURSIVE n (version) AS (SELECT {head + 1} UNION ALL SELECT version + 1 FROM n"
        f" WHERE version < {head + versions}) INSERT INTO versions (version, step_id, {columns}, changed_fraction)"
        f" SELECT n.version, 'h' || n.version, {columns}, 0 FROM n, versions v WHERE v.version = {head}"
    )
    connection.execute(
        "WITH RECURSIVE n (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM n WHERE number < ?)"
        " INSERT INTO groups (site, incarnation, sequence, digest, state, assignment, oldest_version, num_bytes,"
        " arrived, version) SELECT printf('past-%04d', number % 1000), 'i', number / 1000,"
        " hex(randomblob(32)), 'consumed', number, ? + number * ? / ?, 2000, 0, ? + number * ? / ? FROM n",
        (groups, head, versions, groups, head, versions, groups),
    )
    needed = (each.name for each in dataclasses.fields(StepReport) if each.default is dataclasses.MISSING)
    report = StepReport(**dict.fromkeys(needed, 0))
    connection.execute(
        "INSERT INTO steps SELECT version, version, ? FROM versions WHERE version > ?", (encode(report), head)
    )
    for account in ("acked", "consumed"):
        connection.execute(
            "INSERT INTO ledger VALUES (?, ?) ON CONFLICT (account) DO UPDATE SET count = count + excluded.count",
            (account, groups),
        )
    connection.execute(
        "INSERT INTO sites (site, incarnation, engine, dtype, watermark, accepted) SELECT site, 'i', 'bench', 'fp32',"
        " max(sequence), count(*) FROM groups WHERE site LIKE 'past-%' GROUP BY site"
    )
    connection.commit()
    connection.close()


@contextlib.asynccontextmanager
async def bare_server() -> AsyncIterator[str]:
    """A gRPC server with one empty call, in a process of its own; yields its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.site_load", "reference", stdin=-1, stdout=-1
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield f"127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()
        await process.wait()


async def measure_stores(directory: Path, *, sites: int, **common: Any) -> list[dict[str, Any]]:
    """The most sites, with the store in SQLite and in PostgreSQL."""
    rows = []
    for number in range(RUNS_OF_SQLITE):
        rows.append({"store": "sqlite", **await measure(directory / f"store-{number}", sites=sites, **common)})
        print(json.dumps(rows[-1]), flush=True)
    if postgres_binaries() is None:
        print("PostgreSQL is not installed: make programs", flush=True)
        return rows
    server = PostgresServer(in_memory=False)
    try:
        began, before = time.perf_counter(), family_cpu_s(server.pid)
        row = await measure(directory / "store-postgres", sites=sites, url=server.make_schema("bench"), **common)
        share = (family_cpu_s(server.pid) - before) / (time.perf_counter() - began)
    finally:
        server.stop()
    rows.append({"store": "postgres", **row, "server_cpu_share": round(share, 3)})
    print(json.dumps(rows[-1]), flush=True)
    return rows


async def measure_all(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows, or those that were asked for."""
    async with bare_server() as reference:
        common = {
            "rate": arguments.rate, "idle_s": arguments.idle_s, "load_s": arguments.load_s, "reference": reference,
        }  # fmt: skip
        most = max(arguments.sites)
        parts: dict[str, Callable[[], Awaitable[Any]]] = {
            "rows": lambda: measure_rows(directory, arguments.sites, **common),
            "history": lambda: measure_history(directory / "history", arguments, sites=min(100, most), **common),
            "stores": lambda: measure_stores(directory, sites=most, **common),
            "simulated": lambda: measure_simulated(directory),
        }
        return {name: await part() for name, part in parts.items() if arguments.only in ("", name)}


async def measure_simulated(directory: Path) -> dict[str, Any]:
    """Many sites on virtual time, beside a coordinator as a process."""
    child, address, _ = open_coordinator(directory / "called")
    try:
        return await sites_simulated.measure(
            directory, sites=SIMULATED, heartbeat_s=HEARTBEAT_S, address=address, pid=child.process.pid
        )
    finally:
        stop([child])


async def measure_rows(directory: Path, sites: Sequence[int], **common: Any) -> list[dict[str, Any]]:
    """Growing numbers of sites."""
    rows = []
    for num_sites in sites:
        rows.append(await measure(directory / f"sites-{num_sites}", sites=num_sites, **common))
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def measure_history(
    directory: Path, arguments: argparse.Namespace, *, sites: int, **common: Any
) -> list[dict[str, Any]]:
    """An empty store, and the same one with a long history."""
    history = []
    store = directory / "coordinator" / "coordinator.sqlite"
    for versions, groups in ((0, 0), (arguments.versions, arguments.groups)):
        if versions:
            began = time.perf_counter()
            write_history(store, versions=versions, groups=groups)
            print(f"a history of {groups} groups took {time.perf_counter() - began:.0f} s", flush=True)
        row = await measure(directory, sites=sites, **common)
        store_mb = round(store.stat().st_size / 1e6, 1)
        history.append({"versions": versions, "groups": groups, "store_mb": store_mb, **row})
        print(json.dumps(history[-1]), flush=True)
    return history


def main() -> None:
    """Measure, print tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sites.json"))
    parser.add_argument("--sites", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rate", type=float, default=60.0, help="groups per second of all sites together")
    parser.add_argument("--idle-s", type=float, default=8.0)
    parser.add_argument("--load-s", type=float, default=20.0)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--only", choices=PARTS, default="", help="measure these rows alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="heterorl-sites-") as directory:
        found = asyncio.run(measure_all(Path(directory), arguments))
    conditions = {
        "rate_groups_per_s": arguments.rate,
        "heartbeat_s": HEARTBEAT_S,
        "cores": os.cpu_count(),
        "processor": platform.processor() or "cpu",
    }
    earlier = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.only else conditions
    results: dict[str, Any] = {**earlier, **found}
    names = ["sites", "groups_per_s", "cpu_ms_per_group", "idle_cpu_share", "lease_p99_ms", "heartbeat_p99_ms",
             "push_p99_ms", "reference_p99_ms", "rss_mb", "start_s"]  # fmt: skip
    for title, key, columns in (
        (f"{arguments.rate:g} groups/s of all sites together", "rows", names),
        ("a long history beside none", "history", ["versions", "groups", "store_mb", *names]),
        ("the store in SQLite and in PostgreSQL", "stores", ["store", *names]),
    ):
        if key not in found:
            continue
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="right")
        for row in found[key]:
            table.add_row(*(str(row[column]) for column in columns))
        Console(width=200).print(table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
