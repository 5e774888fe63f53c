"""Two sites, a long lossy link between them, and an outage, observed by a real Prometheus.

    python -m campaigns.wan --outage 200 --out runs/wan [--json benchmarks/results/wan.json] [--images docs/wan]

Site A (coordinator, learner, Prometheus, a witness that pushes its own groups) and site B (two samplers) are network
namespaces; all traffic between them crosses a TUN device. Links have certificates. It needs `unshare -rn` and
/dev/net/tun.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from campaigns import wan_evidence
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.identity.spiffe import Role
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.certificates import DAY, Certificates, now
from tests.support.cluster import Cluster, account
from tests.support.prometheus import PROMETHEUS, Prometheus, metrics_port, start_prometheus
from tests.support.wan_link import ADDRESS_A, ADDRESS_B, WanLink, inside, unavailable
from tests.support.witness import Witness, contract_of

SAMPLERS = ["site-b1", "site-b2"]
DELAY_S, JITTER_S, LOSS = 0.074, 0.002, 0.01
"""One way: 150 ms there and back."""
PROCESSES = ("coordinator", "learner", *SAMPLERS)
RUN = {"task": {"name": "arithmetic", "digits": 2}, "sampling": {"max_new_tokens": 8}, "group_size": 4}
PATIENT = RetryPolicy(budget_s=60.0, cap_s=0.5)
MAX_OUTSTANDING, MAX_STALENESS = 16384, 2048
"""Groups and versions: room for what two sites generate in an outage besides the learner's queue, and for its age."""
ROWS = 4
"""One group at a time: faster sites would fill the run's outstanding work and be throttled."""
MAX_RECOVERY_S, MAX_DELIVERY_S = 60.0, 15.0
MIN_GENERATED = 0.9
"""Share of what was generated in the same time before."""
OTHER_ALERTS = {"HeterorlNoRewardSignal"}
"""It concerns random weights, which learn little, and not the link."""


def make_cluster(directory: Path) -> Cluster:
    """Configurations of the run; the samplers listen for Prometheus on their end of the link."""
    certificates = Certificates(directory / "certs", run="kills", lifetime=9 * DAY)
    certificates.authority.issue(
        role=Role.COORDINATOR, site="main", hosts=(ADDRESS_A,), out=None, now=now(), lifetime=9 * DAY
    )
    address = f"{ADDRESS_A}:50051"
    cluster = Cluster(
        directory,
        certificates=certificates,
        coordinator={"groups_per_version": 16, "learner_lease_s": 10.0, "listen": address,
                     "max_outstanding_groups": MAX_OUTSTANDING, "max_staleness_versions": MAX_STALENESS},
        # Each process is scraped directly: with pushes its numbers would be there twice.
        learner={**RUN, "coordinator": address, "groups_per_step": 16, "metrics_push_s": 0.0,
                 "evaluation": {"every_versions": 20, "num_prompts": 16, "batch_rows": 16}},
        sampler={**RUN, "coordinator": address, "engine": {"kind": "hf", "threads": 1, "batch_rows": ROWS}, "metrics_host": ADDRESS_B, "metrics_push_s": 0.0,
                 "heartbeat_s": 2.0},
    )  # fmt: skip
    cluster.address = address
    cluster.model_dir = write_tiny_model(directory / "demo-model", seed=0)
    return cluster


class TwoSites:
    """The run, its link and its Prometheus."""

    def __init__(self, directory: Path, *, outage_s: float, steady_s: float) -> None:
        self.directory = directory
        self.outage_s, self.steady_s = outage_s, steady_s
        self.cluster = make_cluster(directory)
        self.times: dict[str, float] = {}
        self.marks: dict[str, dict[str, int]] = {}

    async def run(self, *, images: Path | None) -> dict[str, Any]:
        """Run steadily, cut, heal, recover, run steadily, account; returns the summary."""
        certificates = self.cluster.certificates
        assert certificates is not None
        link = WanLink(delay_s=DELAY_S, jitter_s=JITTER_S, loss=LOSS)
        server: Prometheus | None = None
        try:
            ports = await self._start(link)
            server = self._watch(ports)
            contract = contract_of(self.cluster.model_dir, digits=2, max_new_tokens=8, group_size=4)
            address = self.cluster.address
            async with (
                CoordinatorClient(address, tls=certificates.tls("operator", "desk"), policy=PATIENT) as operator,
                CoordinatorClient(address, tls=certificates.tls("sampler", "witness"), policy=PATIENT) as client,
            ):
                # Slow enough that the learner makes a version every few seconds while site B is away.
                witness = Witness(client, contract, seed=1, operator=operator, pause_s=1.0)
                await self.cluster.until(operator, self._both_delivered)
                pushing = asyncio.create_task(witness.run())
                try:
                    summary = await self._phases(link, operator, ports)
                finally:
                    pushing.cancel()
                    await asyncio.wait([pushing])
            summary |= await asyncio.to_thread(wan_evidence.collect, server, self.times, SAMPLERS)
            if images is not None:
                await asyncio.to_thread(wan_evidence.draw, server, self.times, images)
            summary["ended"] = {
                name: self.cluster.children[name].exit_code
                for name in PROCESSES
                if self.cluster.children[name].exit_code is not None
            }
        finally:
            link.say("up")
            if server is not None:
                server.close()
            self.cluster.stop()
            link.close()
        return {
            **summary,
            **account(self.cluster, witness.acknowledged, SAMPLERS),
            "witness_refused": [repr(error) for error in witness.refused],
        }

    async def _start(self, link: WanLink) -> dict[str, int]:
        ports = {}
        for name in PROCESSES:
            if name in SAMPLERS:
                with inside(link.site_b):
                    self.cluster.start(name)
            else:
                self.cluster.start(name)
        async with asyncio.timeout(240):
            for name in PROCESSES:
                child = self.cluster.children[name]
                while (port := metrics_port(child.log)) is None:
                    child.check()
                    await asyncio.sleep(0.1)
                ports[name] = port
        return ports

    def _watch(self, ports: dict[str, int]) -> Prometheus:
        targets = []
        for name, port in ports.items():
            is_sampler = name in SAMPLERS
            labels = {"run": "kills", "service": "sampler", "site": name} if is_sampler else {
                "run": "kills", "service": name}  # fmt: skip
            targets.append({"targets": [f"{ADDRESS_B if is_sampler else '127.0.0.1'}:{port}"], "labels": labels})
        # Two seconds: an answer over this line takes half of one, and more when a packet is lost.
        return start_prometheus(self.directory / "prometheus", targets, interval="2s")

    async def _phases(self, link: WanLink, operator: CoordinatorClient, ports: dict[str, int]) -> dict[str, Any]:
        self.times["begin"] = time.time()
        await self._mark("begin", operator)
        rtt_s = [self._connect_s(ports[SAMPLERS[0]]) for _ in range(9)]
        await asyncio.sleep(self.steady_s)
        await self.cluster.until(operator, lambda status: all(site.work_leased for site in self._sites(status)))
        link.say("down")
        self.times["cut"] = time.time()
        # What had come through is still being committed.
        await asyncio.sleep(2.0)
        await self._mark("cut", operator)
        spooled: list[int] = []
        while time.time() < self.times["cut"] + self.outage_s:
            await asyncio.sleep(1.0)
            spooled.append(sum(map(self._spooled, SAMPLERS)))
        await self._mark("heal", operator)
        head = self.marks["heal"]["head"]
        stats = link.stats()
        link.say("up")
        self.times["heal"] = time.time()
        had = {name: self.marks["heal"][name] for name in SAMPLERS}
        left = {name: self._spooled(name) for name in SAMPLERS}
        recovery = {}
        for name, condition in {
            "first_group_s": lambda status: any(site.groups_accepted > had[site.site] for site in self._sites(status)),
            "all_sites_deliver_s": lambda status: all(
                site.groups_accepted > had[site.site] for site in self._sites(status)
            ),
            "outage_delivered_s": lambda status: all(
                site.groups_accepted >= had[site.site] + left[site.site] for site in self._sites(status)
            ),
            "all_sites_at_heal_version_s": lambda status: all(
                site.policy_version >= head for site in self._sites(status)
            ),
        }.items():
            await self.cluster.until(operator, condition)
            recovery[name] = round(time.time() - self.times["heal"], 1)
        self.times["recovered"] = time.time()
        await asyncio.sleep(self.steady_s)
        await self._mark("end", operator)
        self.times["end"] = time.time()
        marks = self.marks
        before_s = self.times["cut"] - self.times["begin"]
        before = sum(marks["cut"][name] - marks["begin"][name] for name in SAMPLERS) / before_s
        generated = (sum(left.values()) - spooled[0]) / self.outage_s
        return {
            "rtt_ms": round(1000 * statistics.median(rtt_s)),
            "loss": LOSS,
            "loss_seen": round(stats["lost"] / max(1, stats["seen"]), 4),
            "outage_s": round(self.times["heal"] - self.times["cut"], 1),
            "groups_of_site_b": {
                phase: sum(marks[last][name] - marks[first][name] for name in SAMPLERS)
                for phase, first, last in (
                    ("before", "begin", "cut"),
                    ("during", "cut", "heal"),
                    ("after", "heal", "end"),
                )
            },
            "heads": {name: mark["head"] for name, mark in marks.items()},
            "spooled_in_outage_max": max(spooled),
            "groups_per_s": {"before": round(before, 2), "in_outage": round(generated, 2)},
            "dropped": {"groups": self.marks["end"]["dropped"]},
            "recovery": recovery,
        }

    def _both_delivered(self, status: Any) -> bool:
        sites = self._sites(status)
        return len(sites) == len(SAMPLERS) and all(site.groups_accepted for site in sites)

    @staticmethod
    def _sites(status: Any) -> list[Any]:
        return [site for site in status.sites if site.site in SAMPLERS]

    async def _mark(self, name: str, operator: CoordinatorClient) -> None:
        status = await operator.get_status()
        accepted = {str(site.site): site.groups_accepted for site in status.sites}
        dropped = sum(status.ledger.dropped.values())
        self.marks[name] = {**accepted, "head": status.head_version, "dropped": dropped}

    def _spooled(self, site: str) -> int:
        """Groups in a sampler's outbox, read while its process runs."""
        path = f"file:{self.directory / site / 'outbox.sqlite'}?mode=ro"
        connection = sqlite3.connect(path, uri=True)
        try:
            return int(connection.execute("SELECT count(*) FROM groups").fetchone()[0])
        finally:
            connection.close()

    @staticmethod
    def _connect_s(port: int) -> float:
        """One round trip: the time of a TCP connect."""
        started = time.perf_counter()
        with socket.create_connection((ADDRESS_B, port), 30):
            return time.perf_counter() - started


def problems(summary: dict[str, Any]) -> list[str]:
    """Broken promises."""
    groups, versions, evidence = summary["groups_of_site_b"], summary["heads"], summary["prometheus"]
    long = summary["outage_s"] > 185
    checks = {
        "the line is not 150 ms long": 145 <= summary["rtt_ms"] <= 400,
        "no packet was lost": summary["loss_seen"] > 0,
        "acknowledged groups or versions are lost": summary["lost"] == 0,
        "an assignment was trained twice": summary["duplicated"] == 0,
        "the ledger is not balanced": summary["ledger_balanced"] and summary["dense"],
        "groups were dropped": summary["dropped"]["groups"] == 0,
        "a typed refusal": not summary["witness_refused"],
        "a process ended": not summary["ended"],
        "site B did not deliver before": groups["before"] > 0,
        "something came through a line that was cut": groups["during"] == 0,
        "site B did not deliver after": groups["after"] > 0,
        "nothing was generated without the line": summary["spooled_in_outage_max"] > 0,
        "the learner stood still in the outage": versions["heal"] > versions["cut"],
        "the learner stood still after the outage": versions["end"] > versions["heal"],
        "recovery was slow": max(summary["recovery"].values()) <= MAX_RECOVERY_S,
        "up does not show the outage": evidence["up_in_outage"] == 0 and evidence["up_at_end"] == 1,
        "silence does not show the outage": evidence["silence_s_max"] >= 0.8 * summary["outage_s"],
        "silence did not end": evidence["silence_s_end"] < 15,
        "policy age does not show the outage": evidence["policy_age_p95_s_max"] >= 0.4 * summary["outage_s"],
        "staleness does not show the outage": evidence["versions_behind_max"] >= versions["heal"] - versions["cut"],
        "an alert still fires": not set(evidence["alerts_at_end"]) - OTHER_ALERTS,
    }
    if long:
        fired = set(evidence["alerts_fired"])
        rates = summary["groups_per_s"]
        checks["less was generated without the line"] = rates["in_outage"] >= MIN_GENERATED * rates["before"]
        checks["the outage's groups came late"] = summary["recovery"]["outage_delivered_s"] <= MAX_DELIVERY_S
        checks["the alerts of an outage did not fire"] = {"HeterorlProcessDown", "HeterorlSiteSilent"} <= fired
    return [text for text, is_kept in checks.items() if not is_kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--outage", type=float, default=200.0)
    parser.add_argument("--steady", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("runs/wan"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console()
    if not options.inside:
        reason = unavailable() or ("" if PROMETHEUS else "prometheus is not installed")
        if reason:
            console.print(f"skipped: {reason}")
            return 0
        os.execvp("unshare", ["unshare", "-rn", sys.executable, "-m", "campaigns.wan", *sys.argv[1:], "--inside"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    sites = TwoSites(options.out.resolve(), outage_s=options.outage, steady_s=options.steady)
    summary = asyncio.run(sites.run(images=options.images))
    summary["problems"] = problems(summary)
    for path in (options.out / "summary.json", options.json):
        if path is not None:
            path.write_text(json.dumps(summary, indent=2) + "\n")
    console.print(summary)
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
