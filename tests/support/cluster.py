"""A whole run as operating system processes on loopback, to be killed, stopped and looked into."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.types.rollout import GroupId
from heterorl.common.types.run import RunStatus
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.demo.processes import Child, start, stop
from tests.support.certificates import Certificates
from tests.support.ports import free_port

CAMPAIGN_S = 3600.0
"""Longest wait of a campaign, which has no other limit."""
RUN = {"task": {"name": "arithmetic", "digits": 1}, "sampling": {"max_new_tokens": 3}, "group_size": 2}


@dataclass
class Cluster:
    """Configurations and processes of one run; `children` are those alive or just killed, by name.

    Links are plaintext over loopback unless there are `certificates`, of the run `kills`.
    """

    directory: Path
    seed: int = 0
    coordinator: dict[str, Any] = field(default_factory=dict)
    learner: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    relay: dict[str, Any] = field(default_factory=dict)
    """Of the node `relay`, which serves site `eu`; samplers take its address as their `coordinator`."""
    certificates: Certificates | None = None
    children: dict[str, Child] = field(default_factory=dict)
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of the command line, by service."""

    def __post_init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.model_dir = write_tiny_model(self.directory / "model", seed=self.seed, hidden_size=32, num_layers=1)

    def tables(self, name: str) -> tuple[str, dict[str, Any]]:
        if name == "coordinator":
            own = {
                "run_id": "kills", "data_dir": str(self.directory / "coordinator"), "listen": self.address,
                "tls": self._tls("coordinator", "main"),
                "metrics_port": 0, "groups_per_version": 4, "learner_lease_s": 3.0, "work_lease_s": 10.0,
                "max_staleness_versions": 1000, "stop_grace_s": 1.0,
            }  # fmt: skip
            return "coordinator", {**own, **self.coordinator}
        if name == "relay":
            own = {
                "coordinator": self.address, "listen": "127.0.0.1:0", "cache_dir": str(self.directory / name),
                "tls": self._tls(name, "eu"), "metrics_port": 0,
            }  # fmt: skip
            return "relay", {**own, **self.relay}
        base = {
            **RUN,
            "coordinator": self.address,
            "tls": self._tls("learner" if name.startswith("learner") else "sampler", name),
            "model_dir": str(self.model_dir),
            "metrics_port": 0,
        }
        if name.startswith("learner"):
            own = {
                "run_id": "kills", "holder": name, "state_dir": str(self.directory / name), "groups_per_step": 4,
                "adopt_without_optimizer": True,
                "max_steps": 1_000_000, "snapshot_every_versions": 20, "retry_cap_s": 1.0,
                "backend": {"lr": 1e-3, "threads": 1},
                # The witness pushes groups of no task: their rewards would fail, and the witness would be quarantined.
                "verification": {"recompute_rewards": False},
            }  # fmt: skip
            return "learner", {**base, **own, **self.learner}
        own = {
            "site": name, "state_dir": str(self.directory / name), "heartbeat_s": 0.5,
            "engine": {"kind": "hf", "threads": 1, "batch_rows": 16},
        }  # fmt: skip
        return "sampler", {**base, **own, **self.sampler}

    def _tls(self, role: str, site: str) -> dict[str, Any]:
        if self.certificates is None:
            return {"insecure": True}
        tls = self.certificates.server_tls() if role == "coordinator" else self.certificates.tls(role, site)
        return tls.model_dump()

    def start(self, name: str, *, module: str = "") -> Child:
        """Start a node; `module` stands in for `heterorl SERVICE`."""
        service, tables = self.tables(name)
        options = self.options.get(service, ())
        self.children[name] = start(
            service, name=name, tables=tables, directory=self.directory, options=options,
            command=("-m", module) if module else (),
        )  # fmt: skip
        return self.children[name]

    def kill(self, name: str) -> None:
        child = self.children[name]
        child.process.send_signal(signal.SIGKILL)
        child.process.wait()
        child.file.close()

    @asynccontextmanager
    async def guarded(self) -> AsyncIterator[None]:
        """Fail as soon as a node ends by itself: the body may wait for it forever."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch())
            yield
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            for name, child in self.children.items():
                code = child.process.poll()
                assert code is None, f"{name} ended with {code}: {child.log.read_text()[-2000:]}"
            await asyncio.sleep(0.5)

    async def end(self, name: str) -> int:
        """End a node by SIGTERM, however long that takes; its exit code."""
        process = self.children[name].process
        process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(process.wait)

    def stop(self) -> None:
        """End samplers, then learners, then the coordinator, by SIGTERM."""
        last = ("learner", "relay", "coordinator")
        order = sorted(
            self.children, key=lambda name: next((n for n, one in enumerate(last) if name.startswith(one)), -1)
        )
        stop([self.children[name] for name in order])

    async def until(self, client: Any, condition: Any) -> RunStatus:
        """Wait until the run's status satisfies `condition`; a test has a shorter limit of its own."""
        async with asyncio.timeout(CAMPAIGN_S):
            while True:
                try:
                    status = await client.get_status()
                    if condition(status):
                        return status
                except Exception as error:  # noqa: BLE001 - the coordinator may just be dead
                    last = error
                    assert last
                await asyncio.sleep(0.1)

    def database(self) -> sqlite3.Connection:
        """The store of a coordinator that has ended."""
        return sqlite3.connect(self.directory / "coordinator" / "coordinator.sqlite")

    def outbox_sequences(self, site: str) -> tuple[str, set[int], int]:
        """(incarnation, sequences still in the outbox, next sequence) of a sampler that has ended."""
        with sqlite3.connect(self.directory / site / "outbox.sqlite") as connection:
            meta = dict(connection.execute("SELECT key, value FROM meta"))
            rows = {row[0] for row in connection.execute("SELECT sequence FROM groups")}
        connection.close()
        return meta["incarnation"], rows, int(meta["next_sequence"])

    def published(self, learner: str = "learner") -> list[dict[str, Any]]:
        """The learner's own record of acknowledged versions."""
        path = self.directory / learner / "versions.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]


def account(cluster: Cluster, acknowledged: set[GroupId], samplers: list[str]) -> dict[str, Any]:
    """Compare independent records with the store: what was acknowledged and is not whole, what had two effects."""
    from heterorl.coordinator.groups import ledger

    connection = cluster.database()
    rows = connection.execute("SELECT site, incarnation, sequence, state, assignment FROM groups").fetchall()
    kept = connection.execute("SELECT digest, payload FROM groups WHERE state IN ('pending', 'leased')").fetchall()
    torn = [digest for digest, payload in kept if payload is None or bytes_digest(payload) != digest]
    known = {GroupId(site=site, incarnation=incarnation, sequence=sequence) for site, incarnation, sequence, *_ in rows}
    lost = [group_id for group_id in acknowledged if group_id not in known]
    for site in samplers:
        incarnation, spooled, following = cluster.outbox_sequences(site)
        mine = {group_id.sequence for group_id in known if (group_id.site, group_id.incarnation) == (site, incarnation)}
        lost += [
            GroupId(site=site, incarnation=incarnation, sequence=sequence)
            for sequence in range(1, following)
            if sequence not in mine | spooled
        ]
    consumed = Counter(assignment for *_, state, assignment in rows if state == "consumed")
    versions = dict(connection.execute("SELECT version, state_root FROM versions"))
    lost_versions = [entry for entry in cluster.published() if versions.get(entry["version"]) != entry["state_root"]]
    counted, recounted = ledger.counts(connection), ledger.recount(connection)
    connection.close()
    return {
        "acknowledged": len(acknowledged),
        "groups": len(rows),
        "versions": len(versions),
        "lost": len(lost) + len(lost_versions) + len(torn),
        "duplicated": sum(count - 1 for count in consumed.values()),
        "ledger_balanced": counted.is_balanced and counted == recounted,
        "dense": sorted(versions) == list(range(len(versions))),
    }
