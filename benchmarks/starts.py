"""Seconds of a start: imports by service, and from a SIGKILL to the next trained group.

Imports are CPU seconds, the least of several processes. *Libraries* are the modules of other packages alone. Then a
coordinator, a learner and a sampler train a tiny model (settings of tests/support/cluster.py). One of them is killed
and started again at once, and the clock runs until a version consumes a group. After the sampler's end this is a group
that it made after its start: those in the queue and in its outbox do not count.

    python -m benchmarks.starts --out benchmarks/results/starts.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.run import RunStatus
from tests.support.cluster import Cluster
from tests.support.links import PLAINTEXT

MODULES = {
    "command line": "heterorl.cli.main",
    "coordinator": "heterorl.coordinator.coordinator_app",
    "sampler": "heterorl.sampler.sampler_app",
    "learner": "heterorl.learner.learner_app",
    "torch alone": "torch",
}
SERVICES = {"coordinator": "coordinator", "sampler": "site-a", "learner": "learner"}
OWN = {*sys.stdlib_module_names, "heterorl", "__main__"}
OUTSTANDING = 16
_REPORT = "import os, json, sys; t = os.times(); print(json.dumps([t.user + t.system, list(sys.modules)]))"


def imported(program: str, repeats: int) -> tuple[float, list[str]]:
    """The least CPU seconds of a program in a fresh interpreter, and its modules."""
    runs = [
        subprocess.run([sys.executable, "-c", f"{program}\n{_REPORT}"], capture_output=True, check=True).stdout
        for _ in range(repeats)
    ]
    found = [json.loads(each) for each in runs]
    return min(seconds for seconds, _ in found), found[0][1]


def import_rows(repeats: int) -> list[dict[str, Any]]:
    """CPU seconds of imports by service."""
    empty, _ = imported("", repeats)
    rows = []
    for service, module in MODULES.items():
        whole, names = imported(f"import {module}", repeats)
        parts = [name.split(".") for name in names]
        others = [
            ".".join(words) for words in parts if words[0] not in OWN and all(word.isidentifier() for word in words)
        ]
        lines = [f"try: import {name}\nexcept Exception: pass" for name in others]
        libraries, _ = imported("\n".join(lines), repeats)
        rows.append(
            {
                "service": service,
                "cpu_s": round(whole - empty, 3),
                "libraries_cpu_s": round(libraries - empty, 3),
                "modules": len(names),
            }
        )
        print(rows[-1], flush=True)
    return rows


async def restart_rows(directory: Path, repeats: int) -> list[dict[str, Any]]:
    """Seconds from SIGKILL to the next trained group, by service."""
    cluster = Cluster(directory, coordinator={"max_outstanding_groups": OUTSTANDING})
    for name in SERVICES.values():
        cluster.start(name)
    policy = RetryPolicy(budget_s=1.0, cap_s=0.05)
    rows = []
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT, policy=policy) as client, cluster.guarded():
        try:
            await cluster.until(client, lambda status: status.head_version >= 3)
            for service, name in SERVICES.items():
                taken = [await restart(cluster, client, name) for _ in range(repeats)]
                rows.append(
                    {"service": service, "median_s": round(statistics.median(taken), 2), "max_s": round(max(taken), 2)}
                )
                print(rows[-1], flush=True)
        finally:
            cluster.stop()
    return rows


async def restart(cluster: Cluster, client: CoordinatorClient, name: str) -> float:
    """Kill one process, start it again; seconds until a version consumes a group that was not trained before."""
    head = (await cluster.until(client, lambda _: True)).head_version
    await cluster.until(client, lambda status: status.head_version >= head + 2)
    started = time.perf_counter()
    cluster.kill(name)
    is_sampler = name == SERVICES["sampler"]
    spooled = len(cluster.outbox_sequences(name)[1]) if is_sampler else 0
    cluster.start(name)
    ledger = (await cluster.until(client, lambda _: True)).ledger
    settled = ledger.acked + spooled if is_sampler else ledger.consumed

    def is_trained(status: RunStatus) -> bool:
        ended = sum(status.ledger.dropped.values()) if is_sampler else 0
        return status.ledger.consumed + ended > settled

    await cluster.until(client, is_trained)
    return time.perf_counter() - started


def main() -> None:
    """Measure and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    imports = import_rows(options.repeats)
    with tempfile.TemporaryDirectory(prefix="heterorl-starts-") as directory:
        restarts = asyncio.run(restart_rows(Path(directory), options.repeats))
    found = {
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_before": round(load, 2),
        "repeats": options.repeats,
        "imports": imports,
        "restarts": restarts,
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
