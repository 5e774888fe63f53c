"""Idle time of a trainer while versions are published, against a learner that waits for each commit.

A real learner (torch backend, canary, checkpoints) over gRPC to a coordinator in a process of its own, whose queue has
all groups from the beginning. The link takes as many bytes a second as make a publication cost a given share of a step:
from the end of a step to its version's commit. Idle is all time between the first step and the last in which no step
computes: waiting, rounding, the canary and the copy for a checkpoint alike. On two cores the codec and a step may share
one, so a step may take longer beside a publication than alone; that is not idle, and stands beside it.

    python -m benchmarks.overlap --out benchmarks/results/overlap.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.process.files import journal_rows
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.transport_options import BURST_S, BandwidthConfig
from heterorl.common.types.common import Contract, SiteId, StepReport
from heterorl.common.types.rollout import (
    FinishReason,
    Group,
    GroupId,
    PushStatus,
    QueuedGroup,
    RewardPart,
    Rollout,
    Span,
)
from heterorl.common.types.run import Registration
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.demo.processes import start, stop
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_app import join
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import assemble
from tests.support.ports import free_port

SITE, INCARNATION = SiteId("bench-1"), "b1946ac9"
GROUPS, GROUP_SIZE, TOKENS = 4, 8, 64
SHARES = (0.2, 0.5, 0.8)


class TimedBackend(TorchBackend):
    """Notes when steps began and ended."""

    steps: list[tuple[float, float]]

    def train_step(self, groups: Sequence[QueuedGroup], *, head_version: int, step: int) -> StepReport:
        """Take a step."""
        started = time.perf_counter()
        report = super().train_step(groups, head_version=head_version, step=step)
        self.steps.append((started, time.perf_counter()))
        return report


@dataclass(slots=True, kw_only=True)
class TimedClient:
    """The coordinator over gRPC; notes when versions were committed."""

    inner: Any
    commits: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)
        if name != "publish_version":
            return call

        async def publish_version(request: Any) -> int:
            version: int = await call(request)
            self.commits.append(time.perf_counter())
            return version

        return publish_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of one learner: medians over its versions, idle over all of them."""

    compute_s: float
    publish_s: float
    period_s: float
    idle_share: float
    payload_bytes: float


async def run_learner(model_dir: Path, directory: Path, *, steps: int, bytes_per_s: float, overlap: bool) -> Measured:
    """Train so many steps on a queue that never is empty."""
    address = f"127.0.0.1:{free_port()}"
    tables = {
        "run_id": "bench", "data_dir": str(directory / "coordinator"), "listen": address, "metrics_port": 0,
        "groups_per_version": GROUPS, "max_outstanding_groups": 4096, "max_staleness_versions": 4096,
        "max_superseded_s": 1e6, "tls": {"insecure": True},
    }  # fmt: skip
    config = LearnerConfig.model_validate(
        {
            "run_id": "bench", "coordinator": address, "tls": {"insecure": True}, "model_dir": str(model_dir),
            "state_dir": directory / "learner", "group_size": GROUP_SIZE, "groups_per_step": GROUPS,
            "max_steps": steps, "sampling": {"max_new_tokens": TOKENS}, "overlap_publication": overlap,
            "backend": {"lr": 1e-4, "threads": 1}, "bandwidth": {"up_bytes_per_s": bytes_per_s},
            "verification": {"recompute_rewards": False},
        }
    )  # fmt: skip
    parts = assemble(config)
    backend = parts.backend
    assert isinstance(backend, TorchBackend)
    backend.__class__ = TimedBackend
    assert isinstance(backend, TimedBackend)
    backend.steps = []
    child = start("coordinator", name="coordinator", tables=tables, directory=directory)
    tls = TlsConfig(insecure=True)
    try:
        async with (
            CoordinatorClient(address, tls=tls, bandwidth=BandwidthConfig(up_bytes_per_s=bytes_per_s)) as own,
            # Another size of message: gRPC joins connections of equal options, and the site's must be free.
            CoordinatorClient(address, tls=tls, max_message_bytes=17 << 20) as sites,
        ):
            client = TimedClient(inner=own)
            learner = join(config, parts, api=client, clock=SystemClock(), rng=random.Random(0))  # type: ignore[arg-type]
            await asyncio.gather(learner.run(asyncio.Event()), fill(sites, parts.contract, steps * GROUPS))
    finally:
        stop([child])
    versions = journal_rows(config.state_dir / "versions.jsonl")[1:]
    return measured(backend.steps, client.commits[1:], [row["bytes"] for row in versions])


def measured(steps: list[tuple[float, float]], commits: list[float], sizes: list[int]) -> Measured:
    """Leave out the first two steps, which warm up, and what is behind the last one."""
    kept = steps[2:]
    window = kept[-1][0] - kept[0][0]
    computed = sum(ended - started for started, ended in kept[:-1])
    return Measured(
        compute_s=statistics.median(ended - started for started, ended in kept),
        publish_s=statistics.median(
            commit - ended for commit, (_, ended) in zip(commits[2:-1], kept[:-1], strict=True)
        ),
        period_s=window / (len(kept) - 1),
        idle_share=1.0 - computed / window,
        payload_bytes=statistics.median(sizes[2:]),
    )


async def fill(client: CoordinatorClient, contract: Contract, count: int) -> None:
    """Put all groups of a run into the queue when there is a version."""
    backoff = Backoff(clock=SystemClock(), rng=random.Random(0), base_s=0.1, cap_s=0.5)
    await backoff.retry(client.get_status)
    async for _ in client.watch_head(after_version=-1):
        break
    manifest = manifest_from_bytes((await client.get_signed_manifest(version=0)).data)
    await client.register(
        Registration(
            site=SITE, incarnation=INCARNATION, contract=contract, engine="bench", dtype="fp32", max_delay_versions=0
        )
    )
    grant = await client.lease_work(site=SITE, incarnation=INCARNATION, max_groups=count, policy_version=0)
    assert len(grant.assignments) == count, f"{len(grant.assignments)} of {count} are granted: {grant.reason}"
    rng = np.random.default_rng(0)
    groups = [
        Group(
            id=GroupId(site=SITE, incarnation=INCARNATION, sequence=number),
            assignment=work.id,
            prompt_index=work.prompt_index,
            prompt_token_ids=np.array([2, 3, 4, 5], np.int32),
            rollouts=tuple(_rollout(rng, contract, member) for member in range(GROUP_SIZE)),
            oldest_version=0,
            state_root=manifest.state_root,
            generation_s=0.0,
        )
        for number, work in enumerate(grant.assignments, start=1)
    ]
    outcomes = await client.push_groups(groups)
    assert all(outcome.status is PushStatus.ACCEPTED for outcome in outcomes), outcomes[0]


def _rollout(rng: np.random.Generator, contract: Contract, member: int) -> Rollout:
    reward = float(member % 2)
    return Rollout(
        token_ids=rng.integers(2, contract.vocab_size, TOKENS).astype(np.int32),
        sampler_logprobs=np.full(TOKENS, -np.log(contract.vocab_size), np.float32),
        spans=(Span(version=0, start=0, end=TOKENS),),
        reward=reward,
        reward_parts=(RewardPart(name="correct", value=reward),),
        finish_reason=FinishReason.LENGTH,
    )


def main() -> None:
    """Calibrate, measure each share in both modes, print a table and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overlap.json"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=192)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    table = Table(title="A learner's trainer beside its publications, seconds a version")
    for name in ("share", "step", "publication", "period, waiting", "idle", "period", "of which computes", "idle"):
        table.add_column(name, justify="right")
    rows = []
    with tempfile.TemporaryDirectory(prefix="heterorl-overlap-") as scratch:
        model_dir = write_tiny_model(Path(scratch) / "model", seed=0, hidden_size=arguments.hidden, num_layers=4)

        def run(name: str, *, steps: int = arguments.steps, bytes_per_s: float = 0.0, overlap: bool) -> Measured:
            directory = Path(scratch) / name
            directory.mkdir()
            return asyncio.run(run_learner(model_dir, directory, steps=steps, bytes_per_s=bytes_per_s, overlap=overlap))

        free = run("free", steps=6, overlap=False)
        for share in SHARES:
            # What the link is to add; a burst of it is free.
            added_s = share * free.compute_s - free.publish_s
            rate = free.payload_bytes / (added_s + BURST_S) if added_s > 0 else 0.0
            waiting = run(f"waiting-{share}", bytes_per_s=rate, overlap=False)
            beside = run(f"overlapped-{share}", bytes_per_s=rate, overlap=True)
            rows.append(
                {
                    "publication_share": share,
                    "step_s": waiting.compute_s,
                    "publish_s": waiting.publish_s,
                    "sequential_step_s": waiting.period_s,
                    "sequential_idle_share": waiting.idle_share,
                    "overlapped_step_s": beside.period_s,
                    "overlapped_compute_s": beside.compute_s,
                    "overlapped_publish_s": beside.publish_s,
                    "idle_share": beside.idle_share,
                    "payload_bytes": beside.payload_bytes,
                    "link_bytes_per_s": rate,
                }
            )
            table.add_row(
                f"{share:g}", f"{waiting.compute_s:.3f}", f"{waiting.publish_s:.3f}", f"{waiting.period_s:.3f}",
                f"{waiting.idle_share:.3f}", f"{beside.period_s:.3f}", f"{beside.compute_s:.3f}",
                f"{beside.idle_share:.3f}",
            )  # fmt: skip
    result = {
        "processor": platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "steps": arguments.steps,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    Console().print(table)


if __name__ == "__main__":
    main()
