"""End the machines of a learner under torchrun at random times in every way, then account for everything.

    python -m campaigns.nodes --kills 20 --out runs/nodes [--json benchmarks/results/nodes.json]

Two network namespaces stand for machines, each with a torchrun agent and a rank (FSDP2, gloo). The coordinator, two
samplers and a witness are processes of the host, with certificates. A supervisor stands for the scheduler: it waits
until all processes ended, then restarts what is left. After the loss of a machine the other one runs alone on the same
state directory, then both run again. It needs root and iproute2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from campaigns.nodes_evidence import agreement, curve, held_out, repeated
from campaigns.nodes_faults import ENDED_S, RANK_TIMEOUT_S, RANKS_ENDED_S, TRAINS_S, Fault, Row, plan
from heterorl.common.generation.tiny_model import WarmStart, warm_start
from heterorl.common.identity.spiffe import Role
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.run import RunStatus
from tests.support.certificates import DAY, Certificates, now
from tests.support.cluster import Cluster, account
from tests.support.nodes import Job, Network, joined_namespaces
from tests.support.ports import free_port
from tests.support.witness import Witness, contract_of

SAMPLERS = ["site-a", "site-b"]
GROUPS_PER_STEP = 32
"""With 8, the first steps of a new optimizer follow noise: 20 of them reduce accuracy from 0.28 to 0.21 to 0.25."""
LEARNING_RATE = 5e-4
START_S = 240.0
"""Seconds without a new version after which the campaign gives up."""
PATIENT = RetryPolicy(budget_s=60.0, cap_s=0.5)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The training while machines are damaged."""

    digits: int
    max_new_tokens: int
    group_size: int
    groups_per_step: int
    learner: dict[str, Any] = field(default_factory=dict)
    batch_rows: int = 32
    cache: Path | None = None
    """Directory of the warm-started model; None for an untrained model without a final evaluation."""


def large(cache: Path) -> Setting:
    """The campaign's setting, in which accuracy must rise."""
    # As samplers draw: what is trained is not the most likely answer.
    evaluation = {"every_versions": 10, "num_prompts": 256, "batch_rows": 256, "temperature": 1.0}
    return Setting(
        digits=2, max_new_tokens=4, group_size=8, groups_per_step=GROUPS_PER_STEP, learner={"evaluation": evaluation},
        cache=cache,
    )  # fmt: skip


SMALL = Setting(digits=1, max_new_tokens=3, group_size=2, groups_per_step=4, batch_rows=4)
"""A setting that only exercises the machines."""


def make_cluster(directory: Path, network: Network, setting: Setting) -> Cluster:
    host = network.host.address
    certificates = Certificates(directory / "certs", run="kills")
    certificates.authority.issue(role=Role.COORDINATOR, site="main", hosts=(host,), out=None, now=now(), lifetime=DAY)
    address = f"{host}:{free_port()}"
    own = {
        "task": {"name": "arithmetic", "digits": setting.digits},
        "sampling": {"max_new_tokens": setting.max_new_tokens}, "group_size": setting.group_size,
        "coordinator": address,
    }  # fmt: skip
    backend = {"kind": "fsdp2", "lr": LEARNING_RATE, "threads": 1, "rank_timeout_s": RANK_TIMEOUT_S}
    groups = setting.groups_per_step
    cluster = Cluster(
        directory,
        certificates=certificates,
        coordinator={"listen": address, "groups_per_version": groups, "learner_lease_s": 15.0},
        learner={**own, "groups_per_step": groups, "backend": backend, "adopt_without_optimizer": False,
                 **setting.learner},
        sampler={**own, "engine": {"kind": "hf", "threads": 1, "batch_rows": setting.batch_rows}},
    )  # fmt: skip
    cluster.address = address
    if setting.cache is not None:
        options = WarmStart(digits=setting.digits, seed=0, hidden_size=128, num_layers=1, batch_size=128)
        cluster.model_dir, _ = warm_start(options, cache=setting.cache)
    return cluster


class Campaign:
    """The supervisor and the faults."""

    def __init__(self, cluster: Cluster, network: Network, *, seed: int) -> None:
        self._cluster = cluster
        self._network = network
        self._random = random.Random(seed)
        self._num_starts = 0
        self.rows: list[Row] = []
        self.unasked = 0
        """Ends of the learner without a fault."""
        self.late: list[str] = []
        """Faults after which a process still ran at the time limit."""
        _, tables = cluster.tables("learner")
        self._config = cluster.directory / "config" / "learner.toml"
        self._config.parent.mkdir(exist_ok=True)
        self._config.write_text(tomli_w.dumps(tables))

    async def run(self, operator: CoordinatorClient, faults: Sequence[Fault], *, versions: int, limit_s: float) -> None:
        """Inject the faults within `limit_s`, train until `versions` are published, then end in order."""
        machines = [0, 1]
        began = started = time.monotonic()
        for fault in faults:
            if time.monotonic() > began + limit_s:
                break
            job = await self._train(operator, machines, beyond=1)
            self._note_version(time.monotonic() - started)
            await asyncio.sleep(self._random.uniform(0.0, 3.0))
            head = (await operator.get_status()).head_version
            ranks_ended_s, ended_s = await self._damage(job, fault, machines)
            row = Row(fault=fault.kind, machine=fault.machine, machines=len(machines), head=head,
                      ranks_ended_s=round(ranks_ended_s, 1),
                ended_s=round(ended_s, 1), next_version_s=0.0)  # fmt: skip
            self.rows.append(row)
            is_lost = len(machines) == 2 and fault.kind == "machine"
            machines = [1 - fault.machine] if is_lost else [0, 1]
            started = time.monotonic()
        job = await self._train(operator, [0, 1], beyond=1)
        self._note_version(time.monotonic() - started)
        if not await self._reach(operator, job, versions):
            self.unasked += 1
        job.end_in_order()
        if not await job.ended(timeout_s=60.0):
            self.late.append("SIGTERM")
        job.close()

    def _note_version(self, took_s: float) -> None:
        if self.rows:
            self.rows[-1] = Row(**asdict(self.rows[-1]) | {"next_version_s": round(took_s, 1)})
            self.late += [text for text in [self.rows[-1].late()] if text]
            Console().print(len(self.rows), self.rows[-1])
            (self._cluster.directory / "rows.json").write_text(json.dumps([asdict(row) for row in self.rows]))

    async def _train(self, operator: CoordinatorClient, machines: list[int], *, beyond: int) -> Job:
        """A job that has published `beyond` more versions."""
        wanted = (await operator.get_status()).head_version + beyond
        while True:
            self._num_starts += 1
            job = Job(
                [self._network.machines[number] for number in machines],
                self._config,
                log=self._cluster.directory / "logs" / f"learner-{self._num_starts:03}.log",
            )
            try:
                if await self._reach(operator, job, wanted):
                    return job
            except BaseException:
                job.close()
                raise
            self.unasked += 1
            job.close()
            if self.unasked > 5:
                raise AssertionError(f"the learner does not stay; see {job.log}")

    async def _reach(self, operator: CoordinatorClient, job: Job, version: int) -> bool:
        """Whether the job publishes `version` before it ends."""
        deadline, newest = time.monotonic() + START_S, -1
        while job.is_whole():
            head = (await operator.get_status()).head_version
            if head >= version:
                return True
            if head > newest:
                deadline, newest = time.monotonic() + START_S, head
            if time.monotonic() > deadline:
                raise TimeoutError(f"no new version; see {job.log}")
            await asyncio.sleep(0.1)
        return False

    async def _damage(self, job: Job, fault: Fault, machines: list[int]) -> tuple[float, float]:
        """Seconds until no rank ran, and until no agent did."""
        began = time.monotonic()
        job.note_ranks()
        if fault.kind == "parted":
            self._network.part()
        elif fault.kind == "cut off":
            self._network.cut(machines[fault.machine])
        else:
            job.hit(fault.machine, fault.kind)
        # One that is over the bound is waited for a little, so that the row says by how much.
        await job.ended(timeout_s=2 * ENDED_S, but_agents=True)
        ranks_ended_s = time.monotonic() - began
        await job.ended(timeout_s=2 * ENDED_S)
        ended_s = time.monotonic() - began
        job.close()
        self._network.heal()
        return ranks_ended_s, ended_s


async def campaign(
    directory: Path, faults: Sequence[Fault], setting: Setting, *, versions: int, seed: int, limit_s: float = math.inf
) -> dict[str, Any]:
    """The whole run; returns its summary."""
    measured: dict[str, Any] = {}
    with joined_namespaces(2) as network:
        cluster = make_cluster(directory, network, setting)
        certificates = cluster.certificates
        assert certificates is not None
        for name in ("coordinator", *SAMPLERS):
            cluster.start(name)
        contract = contract_of(
            cluster.model_dir, digits=setting.digits, max_new_tokens=setting.max_new_tokens,
            group_size=setting.group_size,
        )  # fmt: skip
        doer = Campaign(cluster, network, seed=seed)
        began = time.monotonic()
        try:
            async with (
                CoordinatorClient(
                    cluster.address, tls=certificates.tls("operator", "desk"), policy=PATIENT
                ) as operator,
                CoordinatorClient(
                    cluster.address, tls=certificates.tls("sampler", "witness"), policy=PATIENT
                ) as client,
            ):
                # Its answers are all wrong: groups with equal rewards move no weight.
                witness = Witness(client, contract, seed=seed, operator=operator, pause_s=3.0, right=0.0)
                await cluster.until(operator, lambda status: True)
                pushing = asyncio.create_task(witness.run())
                try:
                    await doer.run(operator, faults, versions=versions, limit_s=limit_s)
                finally:
                    pushing.cancel()
                    await asyncio.wait([pushing])
                # The learner has ended: the head stands.
                head = (await cluster.until(operator, _all_at_head)).head_version
                if setting.cache is not None:
                    held = await asyncio.to_thread(held_out, cluster, head=head)
                    measured = {"held_out": held, "evaluations": curve(cluster)}
        finally:
            cluster.stop()
    counts = account(cluster, witness.acknowledged, SAMPLERS)
    counts["duplicated"] += repeated(cluster)
    return {
        "kills": len(doer.rows),
        "seed": seed,
        **counts,
        **agreement(cluster, SAMPLERS),
        **measured,
        "unasked_ends": doer.unasked,
        "late": doer.late,
        "rank_timeout_s": RANK_TIMEOUT_S,
        "bounds": {"ranks_ended_s": RANKS_ENDED_S, "ended_s": ENDED_S, "next_version_s": TRAINS_S},
        "ranks_ended_s_max": max((row.ranks_ended_s for row in doer.rows), default=0.0),
        "ended_s_max": max((row.ended_s for row in doer.rows), default=0.0),
        "next_version_s_max": max((row.next_version_s for row in doer.rows), default=0.0),
        "wall_s": round(time.monotonic() - began),
        "faults": [asdict(row) for row in doer.rows],
    }


def _all_at_head(status: RunStatus) -> bool:
    at = {site.site: site.policy_version for site in status.sites}
    return all(at.get(name) == status.head_version for name in SAMPLERS)


def is_kept(summary: dict[str, Any]) -> bool:
    """Whether every promise was kept."""
    return (
        not (summary["lost"] or summary["duplicated"] or summary["late"] or summary["unasked_ends"])
        and summary["ledger_balanced"]
        and summary["dense"]
        and summary["digests_equal"]
        and summary["held_out"]["rise_low"] > 0.0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--versions", type=int, default=250, help="at least so many in the end")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no further fault after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/nodes"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/heterorl"), help="of the warm-started model")
    parser.add_argument("--json", type=Path, help="where the summary goes too")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    summary = asyncio.run(
        campaign(
            options.out.resolve(), plan(options.kills, seed=options.seed), large(options.cache.resolve()),
            versions=options.versions, seed=options.seed, limit_s=60 * options.minutes,
        )
    )  # fmt: skip
    for path in (options.out / "summary.json", options.json):
        if path is not None:
            path.write_text(json.dumps(summary, indent=2) + "\n")
    Console().print(summary)
    return 0 if is_kept(summary) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())
