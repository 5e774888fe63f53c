"""SIGKILL random processes of a real run at random times, then account for everything that was acknowledged.

    python -m campaigns.kills --kills 1000 --out runs/kills --runs 1

Several runs divide the kills and run in parallel, each with its own processes, seed and account. With --turns rollouts
have several turns, and workers of their environment are killed too (campaigns/turn_kills.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from campaigns.turn_kills import playing, turn_campaign
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster, account
from tests.support.links import PLAINTEXT
from tests.support.witness import Witness, contract_of

SAMPLERS = ["site-a", "site-b"]
WEIGHTS = {"coordinator": 5, "learner": 2, "site-a": 1, "site-b": 1}
"""The coordinator restarts in a second; the others load torch first, and as many kills would never let them work."""


async def campaign(cluster: Cluster, *, kills: int, seed: int, pause_s: tuple[float, float]) -> dict[str, Any]:
    """Run, kill, finish, account; between two kills at least one group is acknowledged."""
    chooser = random.Random(seed)
    contract = contract_of(cluster.model_dir, digits=1, max_new_tokens=3, group_size=2)
    killed = dict.fromkeys(WEIGHTS, 0)
    recoveries: list[float] = []
    for name in ("coordinator", "learner", *SAMPLERS):
        cluster.start(name)
    policy = RetryPolicy(budget_s=2.0, cap_s=0.2)
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT, policy=policy) as client, cluster.guarded():
        witness = Witness(client, contract, seed=seed)
        try:
            await cluster.until(client, lambda status: status.head_version >= 2)
            pushing = asyncio.create_task(witness.run())
            with Progress(transient=True, disable=seed > 0) as progress:
                bar = progress.add_task("kills", total=kills)
                for number in range(kills):
                    # Every process once, then at random.
                    names = list(WEIGHTS)
                    chosen = chooser.choices(names, list(WEIGHTS.values()))[0]
                    name = names[number] if number < len(names) else chosen
                    await witness.reaches(len(witness.acknowledged) + 1)
                    await asyncio.sleep(chooser.uniform(*pause_s))
                    cluster.kill(name)
                    killed[name] += 1
                    started = time.monotonic()
                    cluster.start(name)
                    if name == "coordinator":
                        await cluster.until(client, lambda status: True)
                        recoveries.append(time.monotonic() - started)
                    progress.advance(bar)
            head = (await cluster.until(client, lambda status: True)).head_version
            await cluster.until(client, lambda status: status.head_version >= head + 5)
            pushing.cancel()
            await asyncio.wait([pushing])
        finally:
            cluster.stop()
    result = account(cluster, witness.acknowledged, SAMPLERS)
    return {
        "kills": kills,
        "seed": seed,
        "killed": killed,
        "coordinator_restart_s_max": round(max(recoveries, default=0.0), 2),
        **result,
    }


def is_kept(summary: dict[str, Any]) -> bool:
    """Whether every promise was kept."""
    broken = ("lost", "duplicated", "unanswered", "answered_twice", "altered", "mismatched")
    return not any(summary.get(kind) for kind in broken) and summary["ledger_balanced"] and summary["dense"]


def joined(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The account of all runs together."""
    kinds = [kind for kind, value in summaries[0].items() if type(value) is int and kind != "seed"]
    return {
        "runs": len(summaries),
        **{name: sum(summary[name] for summary in summaries) for name in kinds},
        "killed": {name: sum(summary["killed"][name] for summary in summaries) for name in summaries[0]["killed"]},
        "coordinator_restart_s_max": max(summary.get("coordinator_restart_s_max", 0.0) for summary in summaries),
        **{name: all(summary[name] for summary in summaries) for name in ("ledger_balanced", "dense")},
        "seeds": [summary["seed"] for summary in summaries],
    }


def shared_out(kills: int, runs: int) -> list[int]:
    """Kills of each run; they differ by one at most."""
    return [kills // runs + (number < kills % runs) for number in range(runs)]


def _run_one(out: Path, kills: int, seed: int, turns: bool) -> dict[str, Any]:
    out.mkdir(parents=True)
    if turns:
        summary = asyncio.run(turn_campaign(playing(out, seed=seed), kills=kills, seed=seed))
    else:
        summary = asyncio.run(campaign(Cluster(out, seed=seed), kills=kills, seed=seed, pause_s=(0.3, 2.0)))
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=1, help="runs side by side, which share the kills out")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count on from it")
    parser.add_argument("--turns", action="store_true", help="rollouts of several turns, in an environment")
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    parser.add_argument("--json", type=Path, help="where the account of all runs goes too")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    with ProcessPoolExecutor(options.runs, mp_context=get_context("spawn")) as processes:
        summaries = list(
            processes.map(
                _run_one,
                [options.out / f"run-{number}" for number in range(options.runs)],
                shared_out(options.kills, options.runs),
                range(options.seed, options.seed + options.runs),
                [options.turns] * options.runs,
            )
        )
    summary = joined(summaries)
    for path in (options.out / "summary.json", options.json):
        if path is not None:
            path.write_text(json.dumps(summary, indent=2) + "\n")
    Console().print(summary)
    return 0 if is_kept(summary) else 1


if __name__ == "__main__":
    raise SystemExit(main())
