"""SIGKILL processes of a multi-turn run, also environment workers, then account for assignments and turns.

python -m campaigns.kills --turns --kills 100 --out runs/turn-kills
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.rollout import DropReason, Group, Rollout
from heterorl.common.wire.sealed_groups import open_group, read_sealed
from heterorl.coordinator.groups.work_assignments import REOPENED
from tests.support.cluster import Cluster, account
from tests.support.conversations import save_chat_model
from tests.support.links import PLAINTEXT

SAMPLERS = ["site-a", "site-b"]
WEIGHTS = {"site-a": 3, "worker": 3, "coordinator": 2, "learner": 1}
"""`worker` is a process that holds episodes of site-a."""
ENVIRONMENT = '''
"""Talk for six turns; each answer takes a while, and a text with an e in it is worth more."""

import time


class Talk:
    def reset(self, row, *, seed):
        self.said, self.seed = [], seed
        return f"say {seed % 7}"

    def step(self, action):
        time.sleep(0.1)
        self.said.append(action.text)
        return None if len(self.said) == 6 else f"more {len(action.text) + self.seed % 5}"

    def score(self):
        return {"e": sum(text.count("e") for text in self.said) / 10, "letters": len("".join(self.said)) / 100}
'''
KILLED = "killed by the campaign"
"""Line in a log between two processes of a node."""
Kept = dict[tuple[str, int, int], list[Rollout]]
"""Turns on a sampler's disk when it was killed, by site, assignment and member."""


def playing(directory: Path, *, seed: int) -> Cluster:
    """A run whose rollouts have six turns."""
    cluster = Cluster(directory, seed=seed)
    (directory / "talk.py").write_text(ENVIRONMENT)
    cluster.model_dir = save_chat_model(directory / "chat")
    shared: dict[str, Any] = {
        "task": {
            "name": "seeds", "size": 100_000, "environment": "talk:Talk", "environment_path": str(directory.resolve()),
            "max_turns": 8, "environment_workers": 8,
        },
        "sampling": {"max_new_tokens": 6, "max_trajectory_tokens": 300}, "group_size": 4, "use_chat_template": True,
    }  # fmt: skip
    # The draws of all turns are repeated, also of those that a killed sampler left.
    cluster.learner = {**shared, "verification": {"logprob_floor": 1.0, "require_seeded": True}}
    cluster.sampler = {**shared, "seeded_sampling": True}
    cluster.coordinator = {"samples_every": 1}
    return cluster


async def turn_campaign(cluster: Cluster, *, kills: int, seed: int) -> dict[str, Any]:
    """Run, kill, finish, account; a group is acknowledged before each kill, and samplers are killed between two turns."""
    chooser = random.Random(seed)
    killed = dict.fromkeys(WEIGHTS, 0)
    kept: Kept = {}
    for name in ("coordinator", "learner", *SAMPLERS):
        cluster.start(name)
    policy = RetryPolicy(budget_s=2.0, cap_s=0.2)
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT, policy=policy) as client, cluster.guarded():
        try:
            for number in range(kills):
                names = list(WEIGHTS)
                chosen = chooser.choices(names, list(WEIGHTS.values()))[0]
                name = names[number] if number < len(names) else chosen
                acked = (await cluster.until(client, lambda status: True)).ledger.acked
                await cluster.until(client, lambda status, acked=acked: status.ledger.acked > acked)
                if name == "worker":
                    await _kill_worker(cluster, chooser, kept)
                else:
                    if name in SAMPLERS:
                        kept |= await _frozen_between_turns(cluster, name)
                    cluster.kill(name)
                    with cluster.children[name].log.open("a", encoding="utf-8") as log:
                        log.write(f"{KILLED}\n")
                    cluster.start(name)
                killed[name] += 1
            head = (await cluster.until(client, lambda status: True)).head_version
            last = await cluster.until(client, lambda status: status.head_version >= head + 3)
        finally:
            cluster.stop()
    # No witness counts here: the coordinator does.
    result = {**account(cluster, set(), SAMPLERS), "acknowledged": last.ledger.acked}
    return {"kills": kills, "seed": seed, "killed": killed, **result, **_assignments(cluster), **_turns(cluster, kept)}


def kept_turns(cluster: Cluster, site: str) -> Kept:
    """Turns in the journal of a site."""
    with closing(sqlite3.connect(cluster.directory / site / "outbox.sqlite")) as file:
        rows = file.execute("SELECT assignment, member, payload FROM turns ORDER BY 1, 2, number").fetchall()
    found: Kept = {}
    for assignment, member, payload in rows:
        found.setdefault((site, assignment, member), []).extend(open_group(read_sealed(payload)).rollouts)
    return found


async def _frozen_between_turns(cluster: Cluster, site: str) -> Kept:
    """Turns in the journal of a sampler, which is up and stands still from then on."""
    pid = cluster.children[site].process.pid
    while True:
        await _until(lambda: _is_up(cluster, site) and kept_turns(cluster, site))
        # The group may end, and take its turns out of the journal, until then.
        os.kill(pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WSTOPPED)
        if kept := kept_turns(cluster, site):
            return kept
        os.kill(pid, signal.SIGCONT)


async def _kill_worker(cluster: Cluster, chooser: random.Random, kept: Kept) -> None:
    # Without its first worker a sampler does not start.
    await _until(lambda: _is_up(cluster, "site-a"))
    # A member whose worker is killed does not count, so that one group that was kept ends first.
    await _until(lambda: {key[:2] for key in kept} - {key[:2] for key in kept_turns(cluster, "site-a")})
    pid = cluster.children["site-a"].process.pid
    workers = await _until(lambda: _workers_of(pid))
    os.kill(chooser.choice(workers), signal.SIGKILL)


def _is_up(cluster: Cluster, site: str) -> bool:
    """Whether the newest process of a site has registered."""
    log = (cluster.directory / "logs" / f"{site}.log").read_text()
    return "registered with run" in log.rpartition(KILLED)[2]


async def _until(look: Callable[[], Any]) -> Any:
    async with asyncio.timeout(600):
        while True:
            if found := look():
                return found
            await asyncio.sleep(0.1)


def _workers_of(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text(encoding="ascii").split()
    ]
    return [child for child in children if b"rewards/worker_main.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _groups(cluster: Cluster) -> Iterable[Group]:
    """Groups whose bytes the coordinator still has: pending ones and samples."""
    with closing(cluster.database()) as file:
        waiting = file.execute("SELECT payload FROM groups WHERE payload IS NOT NULL").fetchall()
        sampled = file.execute("SELECT content FROM sample_payloads").fetchall()
    return [open_group(read_sealed(bytes(data))) for (data,) in [*waiting, *sampled]]


def _turns(cluster: Cluster, kept: Kept) -> dict[str, int]:
    """Members killed between two turns, by whether they continued with the same tokens.

    Not of assignments that were returned or whose group was dropped: a site may draw these again.
    """
    logs = "".join((cluster.directory / "logs" / f"{site}.log").read_text() for site in SAMPLERS)
    given_up = {int(number) for number in re.findall(r"assignment (\d+) (?:gives no group and )?is returned", logs)}
    with closing(cluster.database()) as file:
        given_up |= {number for (number,) in file.execute("SELECT assignment FROM groups WHERE reason <> ''")}
    came = {(group.id.site, group.assignment): group for group in _groups(cluster)}
    counts = Counter(continued=0, altered=0)
    for (site, assignment, member), turns in kept.items():
        group = came.get((site, assignment))
        if group is None or assignment in given_up or not group.rollouts[member].is_trainable:
            continue
        whole = group.rollouts[member]
        ids = np.concatenate([turn.token_ids for turn in turns])
        logprobs = np.concatenate([turn.sampler_logprobs for turn in turns])
        same = np.array_equal(whole.token_ids[: ids.size], ids)
        same = same and np.array_equal(whole.sampler_logprobs[: logprobs.size], logprobs)
        counts["continued" if same else "altered"] += 1
    return dict(counts)


def _assignments(cluster: Cluster) -> dict[str, int]:
    """Assignments without an end, and those that ended twice."""
    with closing(cluster.database()) as file:
        ((following,),) = file.execute("SELECT value FROM meta WHERE key = 'next_assignment'").fetchall()
        out = {number for (number,) in file.execute("SELECT assignment FROM work")}
        rows = file.execute("SELECT assignment, state, reason FROM groups").fetchall()
        closed = sum(n for (n,) in file.execute("SELECT count FROM ledger WHERE account LIKE 'closed/%'"))
    taken = Counter(assignment for assignment, state, _ in rows if state not in ("dropped", "refused"))
    ended = {number for number, _, reason in rows if reason and DropReason(reason) not in REOPENED}
    missing = set(range(int(following))) - out - set(taken) - ended
    doubled = [number for number, count in taken.items() if count > 1 or number in out]
    mismatched = sum(reason.endswith("_mismatch") for _, _, reason in rows)
    return {
        "assignments": int(following), "unanswered": len(missing) - closed, "answered_twice": len(doubled),
        "mismatched": mismatched,
    }  # fmt: skip
