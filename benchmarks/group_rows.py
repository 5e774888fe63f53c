"""Layouts of a group's bytes: in their row, in a second row, or in a file; SQLite and PostgreSQL.

Groups are taken in by the coordinator's own store (its schema, triggers, thread and group commit) and are durable when
the push is answered; then they are leased out in order, as the learner's stream reads them, warm. Four clients push at
once, about 4 MiB a push.

    row      bytes of the row, as the coordinator keeps them
    apart    bytes of a row of another table: a change of the group's state leaves them alone
    file     a file for each group, written and synced by threads, then their directory, then the rows without bytes

All layouts and both stores are measured by turns in one process, on one disk; a row of the results is the median of its
rounds, with the smallest and the largest beside it.

    python -m benchmarks.group_rows --out benchmarks/results/group_rows.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from heterorl.coordinator.groups.queue import LEASE_BYTES, LEASE_STEP
from heterorl.coordinator.store.database import Connection, Database, DatabaseEngine
from heterorl.coordinator.store.postgres.postgres_engine import open_store
from heterorl.coordinator.store.sqlite import SqliteEngine
from tests.support.postgres import PostgresServer

COUNTS = {4_567: 16_384, 226_891: 768, 2_000_000: 128}
"""Groups of one round by their bytes: completions of 64 and of 4,096 tokens (`make bench-ingest`), and long ones."""
CLIENTS = 4
PUSH_BYTES, PUSH_GROUPS = 4 << 20, 256
ROUNDS = 5
LAYOUTS = ("row", "apart", "file")
STORES = ("sqlite", "postgres")
_INSERT = (
    "INSERT INTO groups (site, incarnation, sequence, digest, state, assignment, oldest_version, num_bytes, arrived,"
    " payload) VALUES (?, 'i', ?, ?, 'pending', 0, 0, ?, 0, ?)"
)
_NEXT = (
    "SELECT arrival, digest, num_bytes, payload FROM groups WHERE state = 'pending'"
    " ORDER BY oldest_version, arrival LIMIT ?"
)
_BESIDE = "INSERT INTO sample_payloads (id, content) SELECT arrival, ? FROM groups WHERE site = ? AND sequence = ?"
_APART = "SELECT content FROM sample_payloads WHERE id = ?"
_LEASED = "UPDATE groups SET state = 'leased' WHERE arrival = ?"


@dataclass(slots=True)
class Place:
    """One store with the directory of its files."""

    database: Database
    files: Path
    layout: str

    async def push(self, site: str, first: int, contents: Sequence[bytes]) -> None:
        """Take groups in; returns when they are durable."""
        names = [f"{site}-{first + number}" for number in range(len(contents))]
        if self.layout == "file":
            await asyncio.to_thread(_write, self.files, names, contents)
        rows = [
            (site, first + number, name, len(content), content if self.layout == "row" else None)
            for number, (name, content) in enumerate(zip(names, contents, strict=True))
        ]
        apart = [(content, site, first + number) for number, content in enumerate(contents)]

        def insert(connection: Connection) -> None:
            connection.executemany(_INSERT, rows)
            if self.layout == "apart":
                connection.executemany(_BESIDE, apart)

        await self.database.run(insert)

    async def lease(self) -> tuple[int, int]:
        """Lease the next groups; returns how many, and their bytes."""
        names, num_bytes = await self.database.run(lambda connection: _lease(connection, self.layout == "apart"))
        if self.layout == "file":
            num_bytes = await asyncio.to_thread(_read, self.files, names)
        return len(names), num_bytes


def _write(directory: Path, names: Sequence[str], contents: Sequence[bytes]) -> None:
    for name, content in zip(names, contents, strict=True):
        descriptor = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(directory: Path, names: Sequence[str]) -> int:
    return sum(len((directory / name).read_bytes()) for name in names)


def _lease(connection: Connection, is_apart: bool) -> tuple[list[str], int]:
    names: list[str] = []
    num_bytes = read = 0
    while num_bytes < LEASE_BYTES and (rows := connection.execute(_NEXT, (LEASE_STEP,)).fetchall()):
        for arrival, name, size, payload in rows:
            connection.execute(_LEASED, (arrival,))
            if is_apart:
                (payload,) = connection.execute(_APART, (arrival,)).fetchone()
            names.append(name)
            num_bytes += size
            read += len(payload or b"")
    return names, read


async def measure(engine: DatabaseEngine, files: Path, *, layout: str, size: int, count: int) -> dict[str, float]:
    """Seconds of one round: of taking groups in, and of leasing them out."""
    database = await Database.over(lambda: engine, on_full=lambda: None)
    place = Place(database, files, layout)
    contents = [os.urandom(size) for _ in range(16)]
    at_once = max(1, min(PUSH_GROUPS, PUSH_BYTES // size))
    share = count // CLIENTS

    async def push(site: str) -> None:
        for first in range(0, share, at_once):
            number = min(at_once, share - first)
            await place.push(site, first, [contents[(first + each) % 16] for each in range(number)])

    started = time.perf_counter()
    await asyncio.gather(*(push(f"s{number}") for number in range(CLIENTS)))
    taken = time.perf_counter()
    num_groups = num_bytes = 0
    while num_groups < share * CLIENTS:
        groups, some = await place.lease()
        assert groups, "each group is leased once"
        num_groups, num_bytes = num_groups + groups, num_bytes + some
    leased = time.perf_counter()
    assert num_bytes == num_groups * size, "all bytes were read"
    await database.close()
    return {"in": taken - started, "out": leased - taken}


def _row(store: str, layout: str, size: int, count: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"store": store, "layout": layout, "group_bytes": size, "groups": count}
    for name in ("in", "out"):
        rates = sorted(count / each[name] for each in rounds)
        row[f"{name}_groups_per_s"] = round(statistics.median(rates), 1)
        row[f"{name}_mb_s"] = round(statistics.median(rates) * size / 1e6, 1)
        row[f"{name}_groups_per_s_range"] = [round(rates[0], 1), round(rates[-1], 1)]
    return row


async def run(directory: Path, server: PostgresServer, *, rounds: int) -> list[dict[str, Any]]:
    """All rows; stores and layouts take turns within each round."""
    found: dict[tuple[int, str, str], list[dict[str, float]]] = {}
    for size, count in COUNTS.items():
        for number in range(rounds):
            for store in STORES:
                for layout in LAYOUTS if number % 2 == 0 else LAYOUTS[::-1]:
                    place = directory / f"{store}-{layout}-{size}-{number}"
                    (place / "groups").mkdir(parents=True)
                    if store == "sqlite":
                        engine: DatabaseEngine = SqliteEngine.open(place / "store.sqlite")
                    else:
                        engine = open_store(server.make_schema(place.name))
                    seconds = await measure(engine, place / "groups", layout=layout, size=size, count=count)
                    found.setdefault((size, store, layout), []).append(seconds)
                    shutil.rmtree(place)
                    server.drop_schemas()
    return [_row(store, layout, size, COUNTS[size], each) for (size, store, layout), each in found.items()]


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk that is measured")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    # Half of it for what is written, as an operator gives it; the default of the tests is for a hundred small servers.
    server = PostgresServer("shared_buffers=256MB", "max_wal_size=4GB", in_memory=False)
    try:
        with tempfile.TemporaryDirectory(prefix="heterorl-rows-", dir=arguments.directory) as name:
            rows = asyncio.run(run(Path(name), server, rounds=arguments.rounds))
    finally:
        server.stop()
    results = {
        "rows": rows,
        "rounds": arguments.rounds,
        "clients": CLIENTS,
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
    }
    table = Table(title="Groups in their row, in a row beside it, and in a file")
    columns = [name for name in rows[0] if name != "groups"]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console(width=190).print(table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
