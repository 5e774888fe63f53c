"""End the machines of a learner under torchrun at random moments, in every way, then account for everything.

    python -m tests.faults.nodes --kills 20 --out runs/nodes [--json benchmarks/results/nodes.json]

Two machines are network namespaces with an agent of torchrun and a rank each (FSDP2, gloo). The coordinator, two
samplers and a witness are processes of the host, behind certificates. A supervisor stands for the scheduler: it waits
until all that ran has ended, and starts again what is there. After the loss of a machine that is the other one alone,
on the same state directory; then both again. Needs root and iproute2.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from heterorl.common.identity.identity import Role
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.retry import RetryPolicy
from heterorl.common.types.run import RunStatus
from heterorl.demo.warm_start import WarmStart, warm_start
from tests.faults.nodes_evidence import accuracies, agreement, repeated
from tests.support.certificates import DAY, Certificates, now
from tests.support.cluster import Cluster, account, free_port
from tests.support.nodes import Job, Network, joined_namespaces
from tests.support.witness import Witness, contract_of

SAMPLERS = ["site-a", "site-b"]
RUN = {"task": {"name": "arithmetic", "digits": 2}, "sampling": {"max_new_tokens": 4}, "group_size": 8}
GROUPS_PER_STEP = 8
RANK_TIMEOUT_S = 10.0
LIMIT_S = 1.25 * RANK_TIMEOUT_S + 5.0
"""Until no process of the learner runs on any machine: what its documentation states, and what an agent takes to end."""
START_S = 240.0
"""Until a new version, from a start: torch is loaded twice by each machine, on cores that are not these processes' alone."""
RISE = 0.06
"""Of held-out accuracy, from the first evaluation to the mean of the last two: luck moves 256 answers by 0.03."""
PATIENT = RetryPolicy(budget_s=60.0, cap_s=0.5)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which machine of those that run the learner; machine 0 has rank 0."""

    kind: str
    machine: int = 0


ON_TWO = (
    Fault("machine", 1), Fault("rank", 0), Fault("parted"), Fault("stopped", 1), Fault("machine", 0),
    Fault("cut off", 1), Fault("rank", 1), Fault("stopped", 0), Fault("agent", 0), Fault("cut off", 0),
)  # fmt: skip
"""machine: SIGKILL of agent and rank together; rank, agent: of one of them; stopped: SIGSTOP of the rank; cut off: the
cable is pulled; parted: the machines do not reach each other, and both reach the coordinator."""
ON_ONE = (Fault("machine"), Fault("rank"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault; `ended_s` until nothing of the learner ran, `next_version_s` from there until a new version."""

    fault: str
    machine: int
    machines: int
    head: int
    ended_s: float
    next_version_s: float


def make_cluster(directory: Path, network: Network, *, cache: Path) -> Cluster:
    """Configurations of the run."""
    host = network.host.address
    certificates = Certificates(directory / "certs", run="kills")
    certificates.authority.issue(role=Role.COORDINATOR, site="main", hosts=(host,), out=None, now=now(), lifetime=DAY)
    address = f"{host}:{free_port()}"
    own = {**RUN, "coordinator": address}
    backend = {"kind": "fsdp2", "lr": 5e-4, "threads": 1, "rank_timeout_s": RANK_TIMEOUT_S}
    evaluation = {"every_versions": 5, "num_prompts": 256, "batch_rows": 256}
    cluster = Cluster(
        directory,
        certificates=certificates,
        coordinator={"listen": address, "groups_per_version": GROUPS_PER_STEP, "learner_lease_s": 15.0},
        learner={**own, "groups_per_step": GROUPS_PER_STEP, "backend": backend, "evaluation": evaluation,
                 "adopt_without_optimizer": False},
        sampler={**own, "engine": {"kind": "hf", "threads": 1, "batch_rows": 32}},
    )  # fmt: skip
    cluster.address = address
    options = WarmStart(digits=2, seed=0, hidden_size=128, num_layers=1, batch_size=128)
    cluster.model_dir, _ = warm_start(options, cache=cache)
    return cluster


def plan(kills: int, *, seed: int) -> list[Fault]:
    """Each fault once, then at random; after the loss of a machine, one of the machine that is left."""
    chooser = random.Random(seed)
    on_two = [*ON_TWO, *chooser.choices(ON_TWO, k=kills)]
    faults: list[Fault] = []
    for fault in on_two:
        faults.append(fault)
        if fault.kind == "machine":
            faults.append(chooser.choice(ON_ONE))
    return faults[:kills]


class Campaign:
    """The supervisor, and who does the damage."""

    def __init__(self, cluster: Cluster, network: Network, *, seed: int) -> None:
        self._cluster = cluster
        self._network = network
        self._seed = seed
        self._random = random.Random(seed)
        self._num_starts = 0
        self.rows: list[Row] = []
        self.unasked = 0
        """Ends of the learner that no fault had caused."""
        self.late: list[str] = []
        """Faults after which something still ran when the time was over."""
        _, tables = cluster.tables("learner")
        self._config = cluster.directory / "config" / "learner.toml"
        self._config.parent.mkdir(exist_ok=True)
        self._config.write_text(tomli_w.dumps(tables))

    async def run(self, operator: CoordinatorClient, *, kills: int, versions: int, limit_s: float) -> None:
        """Damage so many times, or so long; then train on until the versions are there, and end in order."""
        machines = [0, 1]
        began = started = time.monotonic()
        for fault in plan(kills, seed=self._seed):
            if time.monotonic() > began + limit_s:
                break
            job = await self._train(operator, machines, beyond=1)
            next_version_s = time.monotonic() - started
            if self.rows:
                self.rows[-1] = Row(**asdict(self.rows[-1]) | {"next_version_s": round(next_version_s, 1)})
            await asyncio.sleep(self._random.uniform(0.0, 3.0))
            head = (await operator.get_status()).head_version
            ended_s = await self._damage(job, fault, machines)
            row = Row(fault=fault.kind, machine=fault.machine, machines=len(machines), head=head,
                      ended_s=round(ended_s, 1), next_version_s=0.0)  # fmt: skip
            self.rows.append(row)
            (self._cluster.directory / "rows.json").write_text(json.dumps([asdict(row) for row in self.rows]))
            Console().print(len(self.rows), row)
            is_lost = len(machines) == 2 and fault.kind == "machine"
            machines = [1 - fault.machine] if is_lost else [0, 1]
            started = time.monotonic()
        job = await self._train(operator, [0, 1], beyond=3, at_least=versions)
        if self.rows:
            took = time.monotonic() - started
            self.rows[-1] = Row(**asdict(self.rows[-1]) | {"next_version_s": round(took, 1)})
        job.end_in_order()
        if not await job.ended(timeout_s=60.0):
            self.late.append("SIGTERM")
        job.close()

    async def _train(self, operator: CoordinatorClient, machines: list[int], *, beyond: int, at_least: int = 0) -> Job:
        """A job that has published so many versions."""
        wanted = max((await operator.get_status()).head_version + beyond, at_least)
        while True:
            self._num_starts += 1
            job = Job(
                [self._network.machines[number] for number in machines],
                self._config,
                log=self._cluster.directory / "logs" / f"learner-{self._num_starts:03}.log",
            )
            try:
                deadline = time.monotonic() + START_S + 10.0 * (wanted if at_least else 0)
                while job.is_whole():
                    if (await operator.get_status()).head_version >= wanted:
                        return job
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"no new version; see {job.log}")
                    await asyncio.sleep(0.1)
            except BaseException:
                job.close()
                raise
            self.unasked += 1
            job.close()
            if self.unasked > 5:
                raise AssertionError(f"the learner does not stay; see {job.log}")

    async def _damage(self, job: Job, fault: Fault, machines: list[int]) -> float:
        """Returns the seconds until nothing ran."""
        began = time.monotonic()
        job.note_ranks()
        if fault.kind == "parted":
            self._network.part()
        elif fault.kind == "cut off":
            self._network.cut(machines[fault.machine])
        else:
            job.hit(fault.machine, fault.kind)
        is_ended = await job.ended(timeout_s=LIMIT_S, but_stopped=fault.kind == "stopped")
        ended_s = time.monotonic() - began
        if fault.kind == "stopped" and is_ended:
            # What wakes up long after the others have ended must not go on.
            job.wake(fault.machine)
            is_ended = await job.ended(timeout_s=LIMIT_S)
        if not is_ended:
            self.late.append(f"{fault.kind} {fault.machine} at fault {len(self.rows) + 1}")
        job.close()
        self._network.heal()
        return ended_s


async def campaign(
    directory: Path, *, kills: int, versions: int, seed: int, cache: Path, limit_s: float = math.inf
) -> dict[str, Any]:
    """The whole run; returns its summary."""
    with joined_namespaces(2) as network:
        cluster = make_cluster(directory, network, cache=cache)
        certificates = cluster.certificates
        assert certificates is not None
        for name in ("coordinator", *SAMPLERS):
            cluster.start(name)
        contract = contract_of(cluster.model_dir, digits=2, max_new_tokens=4, group_size=8)
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
                await cluster.until(operator, lambda status: True, timeout_s=60)
                pushing = asyncio.create_task(witness.run())
                try:
                    await doer.run(operator, kills=kills, versions=versions, limit_s=limit_s)
                finally:
                    pushing.cancel()
                    await asyncio.wait([pushing])
                # The learner has ended: the head stands.
                await cluster.until(operator, _all_at_head, timeout_s=60)
        finally:
            cluster.stop()
    counts = account(cluster, witness.acknowledged, SAMPLERS)
    counts["duplicated"] += repeated(cluster)
    return {
        "kills": len(doer.rows),
        "seed": seed,
        **counts,
        **agreement(cluster, SAMPLERS),
        **accuracies(cluster),
        "unasked_ends": doer.unasked,
        "late": doer.late,
        "rank_timeout_s": RANK_TIMEOUT_S,
        "limit_s": LIMIT_S,
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
        and summary["accuracy_after"] >= summary["accuracy_before"] + RISE
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--versions", type=int, default=80, help="at least so many in the end")
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
            options.out.resolve(), kills=options.kills, versions=options.versions, seed=options.seed,
            cache=options.cache.resolve(), limit_s=60 * options.minutes,
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
