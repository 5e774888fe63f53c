"""One arm: coordinator, learner and samplers as processes, each far sampler behind its line, counted over a span."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from benchmarks.regions.arms import (
    CUT,
    GROUP_SIZE,
    GROUPS_PER_VERSION,
    MAX_TOKENS,
    REGIONS,
    ROWS,
    SITES,
    STEP_SHARE,
    Arm,
    keys_of,
    version_s,
)
from benchmarks.regions.rest_server import serve_rest, sizes_in
from benchmarks.regions.summary import SCHEMES, percentile
from heterorl.common.identity.spiffe import Role
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.run import RunStatus
from heterorl.demo.processes import stop_together
from tests.support.certificates import DAY, Certificates, now
from tests.support.cluster import Cluster
from tests.support.ports import free_port
from tests.support.prometheus import metrics_port
from tests.support.wan_link import WanLink, inside

START_S = 600.0
SETTLE_VERSIONS = 2
"""Versions before the span begins: until then the first groups all end at once."""
STEP_SCALE = 1.05e-6
"""Standard deviation of a step's change of a master: 1.4 % of the bf16 elements change, as at 1e-6 in weights.json."""
RUN = {
    "task": {"name": "arithmetic", "digits": 2},
    "sampling": {"max_new_tokens": MAX_TOKENS},
    "group_size": GROUP_SIZE,
}


class Regions(Cluster):
    """The run's configurations; `addresses` has the coordinator's address as each sampler dials it."""

    addresses: dict[str, str]

    def tables(self, name: str) -> tuple[str, dict[str, Any]]:
        service, tables = super().tables(name)
        if service == "sampler":
            tables["coordinator"] = self.addresses[name]
        return service, tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Counters at an instant; `sites` and `learner` are metrics by name and labels."""

    at: float
    machine_s: float
    own_s: float
    status: RunStatus
    sites: dict[str, dict[str, float]]
    learner: dict[str, float]
    lines: dict[str, dict[str, int]]


def make_cluster(directory: Path, arm: Arm, hosts: list[str], *, model_dir: Path, keys: dict[str, int]) -> Regions:
    """Configurations and certificates of one run; `hosts` are the coordinator's."""
    certificates = Certificates(directory / "certs", run="kills")
    certificates.authority.issue(
        role=Role.COORDINATOR, site="main", hosts=("127.0.0.1", *hosts), out=None, now=now(), lifetime=DAY
    )
    port = free_port()
    cluster = Regions(
        directory,
        certificates=certificates,
        coordinator={"groups_per_version": GROUPS_PER_VERSION, "listen": f"0.0.0.0:{port}", "learner_lease_s": 10.0,
                     "work_lease_s": 120.0, **keys},
        # A checkpoint has 12 bytes a parameter, which would keep this machine's disk busy.
        learner={**RUN, "groups_per_step": GROUPS_PER_VERSION, "metrics_push_s": 0.0,
                 "checkpoint_every_versions": 1_000_000, "snapshot_every_versions": 50},
        sampler={**RUN, "metrics_push_s": 0.0, "heartbeat_s": 2.0,
                 "engine": {"kind": "hf", "threads": 1, "batch_rows": ROWS}},
    )  # fmt: skip
    cluster.address, cluster.model_dir = f"127.0.0.1:{port}", model_dir
    hosts = hosts if arm.is_far else ["127.0.0.1"] * len(SITES)
    cluster.addresses = {site: f"{host}:{port}" for site, host in zip(SITES, hosts, strict=True)}
    return cluster


def make_links() -> dict[str, WanLink]:
    """A line to each region."""
    return {
        site: WanLink(delay_s=one.rtt_s / 2, jitter_s=0.0, loss=one.loss, bytes_per_s=one.bits_per_s / 8, number=number)
        for number, (site, one) in enumerate(REGIONS.items(), 1)
    }


class OneRun:
    """The processes of one arm; `directory` is new."""

    def __init__(self, directory: Path, arm: Arm, *, model_dir: Path, staleness: int, outage_s: float) -> None:
        directory.mkdir(parents=True)
        self.directory, self.arm, self.outage_s = directory, arm, outage_s
        self.keys = keys_of(arm, staleness=staleness, outage_s=outage_s)
        self._model_dir = model_dir
        self._links: dict[str, WanLink] = {}
        self._ports: dict[str, int] = {}

    async def run(self, span_s: float) -> dict[str, Any]:
        """Measure one span; ends all that it starts, also when it fails."""
        async with contextlib.AsyncExitStack() as ends:
            if self.arm.is_far:
                self._links = make_links()
                for link in self._links.values():
                    ends.callback(link.close)
            hosts = [link.address_a for link in self._links.values()]
            cluster = make_cluster(self.directory, self.arm, hosts, model_dir=self._model_dir, keys=self.keys)
            ends.callback(stop_all, cluster)
            ends.callback(self._heal)
            rest = await self._serve_rest(cluster, hosts)
            if rest is not None:
                ends.push_async_callback(rest.stop, 0)
            marks = await self._measure(cluster, span_s)
        return row_of(self, cluster, *marks)

    async def _serve_rest(self, cluster: Regions, hosts: list[str]) -> grpc.aio.Server | None:
        assert cluster.certificates is not None
        server, port = None, 0
        if self.arm.scheme:
            tls = cluster.certificates.server_tls()
            server, port = await serve_rest(self.directory, self.arm.scheme, tls)
        bench = {
            "scheme": self.arm.scheme,
            "rest": {site: f"{host}:{port}" for site, host in zip(SITES, hosts, strict=bool(hosts))},
            "seconds_per_token": {site: self.arm.seconds_per_token(site) for site in SITES},
            "step_s": STEP_SHARE * version_s(),
            "step_scale": STEP_SCALE,
        }
        (self.directory / "bench.json").write_text(json.dumps(bench), encoding="utf-8")
        return server

    async def _measure(self, cluster: Regions, span_s: float) -> tuple[Mark, Mark]:
        await self._start(cluster)
        assert cluster.certificates is not None
        tls = cluster.certificates.tls("operator", "desk")
        async with CoordinatorClient(cluster.address, tls=tls) as operator:
            async with asyncio.timeout(START_S):
                await cluster.until(operator, self._is_settled)
            begin = await self._mark(operator)
            if self.arm.is_cut:
                await asyncio.sleep((span_s - self.outage_s) / 4)
                self._links[CUT].say("down")
                await asyncio.sleep(self.outage_s)
                self._heal()
            await asyncio.sleep(max(0.0, begin.at + span_s - time.monotonic()))
            end = await self._mark(operator)
        for child in cluster.children.values():
            child.check()
        return begin, end

    async def _start(self, cluster: Regions) -> None:
        cluster.start("coordinator")
        cluster.start("learner", module="benchmarks.regions.learner")
        for site in SITES:
            with self._at(site):
                cluster.start(site, module="benchmarks.regions.sampler")
        async with asyncio.timeout(START_S):
            for name in ("learner", *SITES):
                child = cluster.children[name]
                while (port := metrics_port(child.log)) is None:
                    child.check()
                    await asyncio.sleep(0.1)
                self._ports[name] = port

    def _at(self, site: str) -> contextlib.AbstractContextManager[None]:
        return inside(self._links[site].site_b) if site in self._links else contextlib.nullcontext()

    def _heal(self) -> None:
        if CUT in self._links:
            self._links[CUT].say("up")

    @staticmethod
    def _is_settled(status: RunStatus) -> bool:
        delivered = [site for site in status.sites if site.groups_accepted]
        return len(delivered) == len(SITES) and status.head_version >= SETTLE_VERSIONS

    async def _mark(self, operator: CoordinatorClient) -> Mark:
        status = await operator.get_status()
        return Mark(
            at=time.monotonic(),
            machine_s=machine_s(),
            own_s=own_s(),
            status=status,
            sites={site: await asyncio.to_thread(self._metrics, site) for site in SITES},
            learner=await asyncio.to_thread(self._metrics, "learner"),
            lines={site: link.stats() for site, link in self._links.items()},
        )

    def _metrics(self, name: str) -> dict[str, float]:
        """Metrics of a process, read in its own namespace: they do not cross the line."""
        with self._at(name):
            page = urllib.request.urlopen(f"http://127.0.0.1:{self._ports[name]}/metrics", timeout=20).read().decode()
        rows = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
        return {key.removeprefix("heterorl_"): float(value) for key, _, value in rows}


def stop_all(cluster: Regions) -> None:
    """End the samplers at once, then the learner, then the coordinator."""
    children = cluster.children
    for names in (SITES, ("learner",), ("coordinator",)):
        stop_together([children[name] for name in names if name in children])


def own_s() -> float:
    """CPU seconds of the run's processes: no others are in this PID namespace."""
    used = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def machine_s() -> float:
    """Seconds in which the machine's cores were busy, since its start."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def row_of(run: OneRun, cluster: Regions, begin: Mark, end: Mark) -> dict[str, Any]:
    """The numbers of a span; the coordinator has ended."""
    seconds = end.at - begin.at
    versions = end.status.head_version - begin.status.head_version

    def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in after.items() if key.partition("{")[0] == name)

    def of_site(site: str, name: str) -> float:
        return grown(begin.sites[site], end.sites[site], name)

    def fetched(site: str) -> float:
        """Bytes for a version that the site went on, also for one that it passed over."""
        received = sum(
            value - begin.sites[site].get(key, 0.0)
            for key, value in end.sites[site].items()
            if key.startswith("bytes_total{") and 'direction="in"' in key
        )
        went = end.sites[site]["sampler_policy_version"] - begin.sites[site]["sampler_policy_version"]
        return received / max(1.0, went)

    def phase(name: str) -> float:
        key = f'learner_phase_seconds_total{{phase="{name}"}}'
        return (end.learner.get(key, 0.0) - begin.learner.get(key, 0.0)) / seconds

    swaps = sum(of_site(site, "sampler_swap_seconds_count") for site in SITES)
    dropped = {
        reason.value: count - begin.status.ledger.dropped.get(reason, 0)
        for reason, count in end.status.ledger.dropped.items()
    }
    window = range(begin.status.head_version + 1, end.status.head_version + 1)
    sizes = [row for row in sizes_in(run.directory) if row["version"] in window]
    stale = staleness_of(cluster, window)
    return {
        "arm": run.arm.name,
        "span_s": round(seconds, 1),
        "outage_s": run.outage_s if run.arm.is_cut else 0.0,
        "keys": run.keys,
        "versions": versions,
        "tokens_per_s": round(sum(of_site(site, "tokens_total") for site in SITES) / seconds, 1),
        "trained_tokens_per_s": round(grown(begin.learner, end.learner, "tokens_total") / seconds, 1),
        "learner_waits": round(phase("waiting"), 4),
        "learner_publishes": round(phase("publishing"), 4),
        "bytes_per_version": {site: round(fetched(site)) for site in SITES},
        "swap_s": round(sum(of_site(site, "sampler_swap_seconds_sum") for site in SITES) / max(1.0, swaps), 4),
        "swaps": {site: round(of_site(site, "sampler_swap_seconds_count")) for site in SITES},
        "tokens_per_s_of": {site: round(of_site(site, "tokens_total") / seconds, 1) for site in SITES},
        "staleness_p50": percentile([age for ages in stale.values() for age in ages], 0.5),
        "staleness_p95": percentile([age for ages in stale.values() for age in ages], 0.95),
        "staleness_p95_of": {site: percentile(stale.get(site, []), 0.95) for site in SITES},
        "groups_trained_of": {site: len(stale.get(site, [])) for site in SITES},
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "schemes": {name: round(sum(row[name] for row in sizes) / max(1, len(sizes))) for name in SCHEMES},
        "changed_share": changed_share(cluster, window),
        "lost_packets": {
            site: round(
                (stats["lost"] - begin.lines[site]["lost"]) / max(1, stats["seen"] - begin.lines[site]["seen"]), 4
            )
            for site, stats in end.lines.items()
        },
        "busy_cores": round((end.machine_s - begin.machine_s) / seconds, 2),
        "own_cores": round((end.own_s - begin.own_s) / seconds, 2),
        "cores": os.cpu_count(),
    }


def staleness_of(cluster: Regions, window: range) -> dict[str, list[int]]:
    """Versions behind of each group that was trained for a version of the window, by site."""
    with contextlib.closing(cluster.database()) as store:
        rows = store.execute(
            "SELECT site, version - 1 - oldest_version FROM groups"
            " WHERE state = 'consumed' AND version BETWEEN ? AND ?",
            (window.start, window.stop - 1),
        ).fetchall()
    found: dict[str, list[int]] = {}
    for site, age in rows:
        found.setdefault(site, []).append(int(age))
    return found


def changed_share(cluster: Regions, window: range) -> float:
    """Mean share of the elements that a version of the window changed."""
    with contextlib.closing(cluster.database()) as store:
        (mean,) = store.execute(
            "SELECT avg(changed_fraction) FROM versions WHERE version BETWEEN ? AND ?", (window.start, window.stop - 1)
        ).fetchone()
    return round(mean or 0.0, 5)
