"""SIGKILL PostgreSQL, a bucket's server and coordinators at random times, then account for what was acknowledged.

    python -m campaigns.store_kills --kills 20 --out runs/kills-stores

    postgres   the server and its sessions; it restarts at once
    active     the active coordinator
    standby    the standby coordinator
    bucket     the bucket's server; it is away for up to a second and keeps its objects
    outage     the bucket's server, then the active coordinator: the standby finds no bucket for up to 8 s
    race       both coordinators, the second while it may be taking over; both ask for the lock again

Processes restart as the shipped units restart them: not after an own exit with code 2. Each coordinator has its own
data_dir, so they share only database and bucket. Two sites push, and a learner consumes and publishes; each records its
acknowledgements. The order of commits and their epochs come from the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from heterorl.common.errors import HeterorlError
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import GroupId, QueuedGroup
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.coordinator_config import BucketConfig
from heterorl.coordinator.groups import ledger
from heterorl.coordinator.store.postgres.postgres_engine import PostgresConnection, open_store
from heterorl.demo.processes import Child, start, stop_together
from tests.support import commit_order
from tests.support.bucket import BucketServer
from tests.support.links import PLAINTEXT
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tests.support.run import Run
from tests.support.witness import Witness

KINDS = ("postgres", "bucket", "active", "standby", "outage", "race")
SITES = ("eu-1", "us-1")
PREFIX = "run"
PER_VERSION = 4
OUTAGE_S = 8.0
"""Longer than a unit's RestartSec: a coordinator that ended without the bucket would find it missing again."""
NEVER_AGAIN = 2
"""RestartPreventExitStatus of the shipped units."""
ANSWER_S = 60.0
"""Upper limit until a coordinator answers again."""
_PATIENT = RetryPolicy(base_s=0.05, cap_s=0.2, budget_s=2.0)


class Pair:
    """Two coordinators of one store, each restarted when it ends."""

    def __init__(self, directory: Path, url: str, payloads: BucketConfig) -> None:
        self._directory = directory
        self._url = url
        self._payloads = payloads.model_dump(mode="json")
        self._addresses = {name: f"127.0.0.1:{free_port()}" for name in ("a", "b")}
        self._children: dict[str, Child] = {}
        self._killed: set[int] = set()
        self.num_ended = 0
        """Coordinators that ended by themselves, such as after losing the store."""
        self.stay_down: list[str] = []
        """Coordinators that no unit would restart."""

    @property
    def addresses(self) -> str:
        """Addresses for clients."""
        return ",".join(self._addresses.values())

    @property
    def active(self) -> str:
        """The coordinator that serves, or served last."""
        files = {name: self._directory / f"data-{name}" / "address" for name in self._addresses}
        served = {name: file.stat().st_mtime_ns for name, file in files.items() if file.exists()}
        return max(served, key=served.__getitem__)

    def begin(self, name: str) -> None:
        config = {
            "run_id": "run", "data_dir": str(self._directory / f"data-{name}"), "listen": self._addresses[name],
            "tls": {"insecure": True}, "store": {"url": self._url}, "metrics_port": 0, "learner_lease_s": 3600.0,
            "groups_per_version": PER_VERSION, "work_lease_s": 10.0, "max_staleness_versions": 100_000,
            "stop_grace_s": 1.0, "payloads": self._payloads,
        }  # fmt: skip
        self._children[name] = start(
            "coordinator", name=name, tables=config, directory=self._directory, options=["--standby"]
        )

    def kill(self, name: str) -> None:
        """Kill one; `keep` restarts it."""
        process = self._children[name].process
        if process.poll() is None:
            self._killed.add(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()

    async def keep(self) -> None:
        """Start both, and restart each that ends."""
        for name in self._addresses:
            self.begin(name)
        while True:
            for name, child in self._children.items():
                if child.exit_code is not None and name not in self.stay_down:
                    is_asked = child.process.pid in self._killed
                    self.num_ended += not is_asked
                    child.file.close()
                    if child.exit_code == NEVER_AGAIN and not is_asked:
                        self.stay_down.append(name)
                    else:
                        self.begin(name)
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        stop_together(list(self._children.values()))


class Trainer:
    """A learner of the campaign: consumes groups, publishes, and records acknowledgements."""

    def __init__(self, client: CoordinatorClient, directory: Path) -> None:
        self._client = client
        self._run = Run(client, directory)
        self.published: dict[int, tuple[Digest, tuple[GroupId, ...]]] = {}
        self.refused: list[HeterorlError] = []
        self.num_uploads = 0

    async def begin(self) -> None:
        """Take the lease and publish version 0."""
        await self._until_done(self._run.begin)
        await self._publish([])

    async def run(self) -> None:
        """Consume groups forever."""
        batch: list[GroupId] = []
        while True:
            try:
                await self._follow(batch)
            except HeterorlError as error:
                self.refused.append(error)
            await asyncio.sleep(0.1)

    async def _follow(self, batch: list[GroupId]) -> None:
        asked: asyncio.Queue[int] = asyncio.Queue()
        if len(batch) == PER_VERSION:
            await self._publish(batch)
        asked.put_nowait(2 * PER_VERSION - len(batch))

        async def credits() -> AsyncIterator[int]:
            while True:
                yield await asked.get()

        stream = self._client.stream_groups(epoch=self._run.epoch, held=tuple(batch), credits=credits())
        async with contextlib.aclosing(cast("AsyncGenerator[QueuedGroup]", stream)):
            async for queued in stream:
                batch.append(queued.group.id)
                if len(batch) == PER_VERSION:
                    await self._publish(batch)
                    asked.put_nowait(PER_VERSION)

    async def _publish(self, batch: list[GroupId]) -> None:
        """Publish a version that consumed `batch`, and empty it; a failure changes nothing."""
        # Each upload and each publication is asked for until it is answered, under one name.
        self._run.upload = self._upload  # type: ignore[method-assign]
        before, consumed = self._run.arena, tuple(batch)
        try:
            request = await self._run.prepare(consumed=consumed)
        except HeterorlError:
            self._run.arena = before
            raise
        self._run.head = await self._until_done(lambda: self._client.publish_version(request))
        root = manifest_from_bytes(request.manifest).state_root
        self._run.roots[self._run.head] = root
        self.published[self._run.head] = (root, consumed)
        batch.clear()

    async def _upload(self, data: bytes, digest: Digest, *, offset: int = 0) -> int:
        async def rest() -> int:
            there = max(offset, await self._client.query_upload(digest=digest))
            return there if there == len(data) else await Run.upload(self._run, data, digest, offset=there)

        durable = await self._until_done(rest)
        self.num_uploads += 1
        return int(durable)

    async def _until_done(self, attempt: Any) -> Any:
        while True:
            try:
                return await attempt()
            except HeterorlError as error:
                self.refused.append(error)
                await asyncio.sleep(0.1)


class Campaign:
    """One store, two coordinators, one learner, two sites, and the kills."""

    answer_s: float | None = ANSWER_S
    """Limit of each wait; None where a test has a limit of its own."""

    def __init__(self, directory: Path, server: PostgresServer, bucket: BucketServer, *, seed: int) -> None:
        self._server = server
        self._bucket = bucket
        self._url = server.make_schema(str(directory))
        # Makes the tables, so that the very first transaction of a coordinator is noted.
        open_store(self._url).close()
        commit_order.begin(self._url)
        self._directory = directory
        self._chooser = random.Random(seed)
        self._seed = seed
        self._pair = Pair(directory, self._url, bucket.config(directory, prefix=PREFIX))
        self._killed = dict.fromkeys(KINDS, 0)
        self._seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._stalled = ""

    async def run(
        self,
        *,
        kills: int,
        pause_s: tuple[float, float],
        kinds: Sequence[str] = KINDS,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Run, kill, finish, account."""
        async with contextlib.AsyncExitStack() as clients:
            operator, learner, *sites = [
                await clients.enter_async_context(
                    CoordinatorClient(self._pair.addresses, tls=PLAINTEXT, policy=_PATIENT, payload_urls="any")
                )
                for _ in range(2 + len(SITES))
            ]
            trainer = Trainer(learner, self._directory)
            witnesses = [
                Witness(client, Run.contract, seed=self._seed, site=site)
                for client, site in zip(sites, SITES, strict=True)
            ]
            try:
                # What ends in the background, such as a client by an unknown error, ends the campaign.
                async with asyncio.TaskGroup() as group:
                    background = [group.create_task(self._pair.keep())]
                    try:
                        async with asyncio.timeout(self.answer_s):
                            await trainer.begin()
                        clients_work = (trainer.run(), *(one.run() for one in witnesses))
                        background += [group.create_task(work) for work in clients_work]
                        await self._kill_all(kills, pause_s, kinds, operator, witnesses, trainer, progress)
                    except (TimeoutError, asyncio.CancelledError) as end:
                        # A client whose acknowledged data is lost may be refused forever: the account tells.
                        refused = trainer.refused[-1:] + [error for one in witnesses for error in one.refused[-1:]]
                        words = [*map(str, refused), *(f"{name} stays down" for name in self._pair.stay_down)]
                        self._stalled = f"no progress: {'; '.join(words) or 'without an error'}"
                        if isinstance(end, asyncio.CancelledError):
                            end.add_note(self._stalled)
                            raise
                    finally:
                        for task in background:
                            task.cancel()
            finally:
                await asyncio.to_thread(self._pair.stop)
        return self._account(witnesses, trainer)

    async def _kill_all(
        self,
        kills: int,
        pause_s: tuple[float, float],
        kinds: Sequence[str],
        operator: CoordinatorClient,
        witnesses: list[Witness],
        trainer: Trainer,
        progress: Progress | None,
    ) -> None:
        bar = progress and progress.add_task("kills", total=kills)
        for number in range(kills):
            # Everything once, then at random. Between two kills each site gets something acknowledged.
            kind = kinds[number] if number < len(kinds) else self._chooser.choice(kinds)
            await self._work(witnesses, trainer)
            await asyncio.sleep(self._chooser.uniform(*pause_s))
            began = await self._kill(kind)
            await self._answers(operator)
            if kind == "bucket":
                # A status needs no bucket, a version does.
                await self._work(witnesses, trainer)
            self._seconds[kind].append(time.monotonic() - began)
            if progress is not None and bar is not None:
                words = f"{sum(len(one.acknowledged) for one in witnesses)} groups acknowledged, last: {kind}"
                progress.update(bar, advance=1, description=words)
        await self._work(witnesses, trainer)

    async def _work(self, witnesses: list[Witness], trainer: Trainer) -> None:
        """Wait until each site had a group acknowledged and the learner a version."""
        versions = len(trainer.published)
        for witness in witnesses:
            await witness.reaches(len(witness.acknowledged) + 1, timeout_s=self.answer_s)
        await self._until(lambda: len(trainer.published) > versions)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(self.answer_s):
            while not is_so():  # noqa: ASYNC110 - a trainer counts, and says nothing
                await asyncio.sleep(0.02)

    async def _kill(self, kind: str) -> float:
        """Kill; returns the time from which a coordinator is missing."""
        active = self._pair.active
        other = "b" if active == "a" else "a"
        self._killed[kind] += 1
        began = time.monotonic()
        if kind == "postgres":
            self._server.kill()
            await asyncio.to_thread(self._server.start)
        elif kind == "bucket":
            self._bucket.kill()
            await asyncio.sleep(self._chooser.uniform(0.0, 1.0))
            await asyncio.to_thread(self._bucket.start)
        elif kind == "outage":
            self._bucket.kill()
            self._pair.kill(active)
            await asyncio.sleep(self._chooser.uniform(0.0, OUTAGE_S))
            await asyncio.to_thread(self._bucket.start)
            began = time.monotonic()
        elif kind == "standby":
            self._pair.kill(other)
        else:
            self._pair.kill(active)
            if kind == "race":
                await asyncio.sleep(self._chooser.uniform(0.0, 1.0))
                began = time.monotonic()
                self._pair.kill(other)
        return began

    async def _answers(self, client: CoordinatorClient) -> None:
        """Wait until a coordinator reports the run's status from the store."""
        async with asyncio.timeout(self.answer_s):
            while True:
                with contextlib.suppress(HeterorlError):
                    await client.get_status()
                    return
                await asyncio.sleep(0.05)

    def _account(self, witnesses: list[Witness], trainer: Trainer) -> dict[str, Any]:
        acknowledged = set().union(*(witness.acknowledged for witness in witnesses))
        with psycopg.connect(self._url, autocommit=True) as raw:
            store = PostgresConnection(raw)
            rows = store.execute(
                "SELECT site, incarnation, sequence, state, assignment, version FROM groups"
            ).fetchall()
            roots = dict(store.execute("SELECT version, state_root FROM versions").fetchall())
            payloads = dict(
                store.execute(
                    "SELECT digest, kind || ' ' || from_version || ' ' || to_version FROM payloads"
                ).fetchall()
            )
            counted, recounted = ledger.counts(store), ledger.recount(store)
        known = {GroupId(site=site, incarnation=name, sequence=n): rest for site, name, n, *rest in rows}
        lost = [one for one in acknowledged if one not in known]
        lost += [version for version, (root, _) in trainer.published.items() if roots.get(version) != root]
        trained = [(one, version) for version, (_, ids) in trainer.published.items() for one in ids]
        lost += [one for one, version in trained if one not in known or known[one][::2] != ["consumed", version]]
        there = {name.rpartition("/")[2] for name in self._bucket.names(PREFIX)}
        lost += [name for digest, name in payloads.items() if digest not in there]
        twice = Counter(assignment for *_, state, assignment, _ in rows if state == "consumed")
        twice += Counter(f"{one}" for one, _ in trained)
        order = commit_order.order_of(commit_order.committed(self._url))
        return {
            "kills": self._killed,
            "seed": self._seed,
            "stalled": self._stalled,
            "acknowledged": len(acknowledged),
            "groups": len(rows),
            "versions": len(trainer.published),
            "payloads": len(payloads),
            "uploads": trainer.num_uploads,
            "lost": len(lost),
            "lost_are": [str(one) for one in lost],
            "duplicated": sum(count - 1 for count in twice.values()),
            "ledger_balanced": counted.is_balanced and counted == recounted,
            "transactions": order.transactions,
            "epochs": order.epochs,
            "epochs_committing_at_once": order.at_once,
            "commits_of_an_older_epoch": order.late,
            "ended_by_themselves": self._pair.num_ended,
            "stay_down": self._pair.stay_down,
            "takeover_s": {
                kind: {"median": round(statistics.median(found), 2), "max": round(max(found), 2)}
                for kind, found in self._seconds.items()
                if found
            },
            "takeover_s_max": round(max(max(found, default=0.0) for found in self._seconds.values()), 2),
        }


def is_kept(summary: dict[str, Any]) -> bool:
    """Whether every promise was kept."""
    return (
        not summary["stalled"]
        and not summary["lost"]
        and not summary["duplicated"]
        and bool(summary["ledger_balanced"])
        and summary["epochs_committing_at_once"] == 1
        and not summary["commits_of_an_older_epoch"]
        and not summary["stay_down"]
        and summary["acknowledged"] >= sum(summary["kills"].values())
    )


def tables_of(summary: dict[str, Any]) -> list[Table]:
    """Tables for the end."""
    account = Table("what", "count", title="what was promised")
    for name in (
        "acknowledged", "versions", "payloads", "uploads", "lost", "duplicated", "ledger_balanced", "transactions", "epochs",
        "epochs_committing_at_once", "commits_of_an_older_epoch", "stay_down",
    ):  # fmt: skip
        account.add_row(name.replace("_", " "), str(summary[name]))
    times = Table("killed", "times", "median s", "longest s", title="until a coordinator answers again")
    for kind, count in summary["kills"].items():
        took = summary["takeover_s"].get(kind, {"median": "", "max": ""})
        times.add_row(kind, str(count), str(took["median"]), str(took["max"]))
    return [account, times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is killed")
    parser.add_argument("--out", type=Path, default=Path("runs/kills-stores"))
    parser.add_argument("--json", type=Path, help="where the account goes too")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    server, bucket = PostgresServer("wal_level=logical"), BucketServer(options.out.resolve() / "bucket")
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            campaign = Campaign(options.out.resolve(), server, bucket, seed=options.seed)
            summary = asyncio.run(
                campaign.run(kills=options.kills, pause_s=(0.1, 2.0), kinds=options.kinds, progress=progress)
            )
    finally:
        server.stop()
        bucket.stop()
    for path in (options.out / "summary.json", options.json):
        if path is not None:
            path.write_text(json.dumps(summary, indent=2) + "\n")
    for table in tables_of(summary):
        console.print(table)
    if summary["stalled"]:
        console.print(summary["stalled"], style="red", markup=False)
    console.print("KEPT" if is_kept(summary) else "BROKEN", style="bold green" if is_kept(summary) else "bold red")
    return 0 if is_kept(summary) else 1


if __name__ == "__main__":
    raise SystemExit(main())
