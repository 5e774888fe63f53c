"""A whole run as processes that learns: two DeepSpeed ranks, a sampler with transformers and one with vLLM, in flight."""

import json
import re
import urllib.request
from collections import Counter
from pathlib import Path

import psutil
import pytest

from heterorl.common.generation.tiny_model import WarmStart, warm_start
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.coordinator.groups import ledger
from tests.support.cluster import Cluster
from tests.support.links import PLAINTEXT

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
TASK = {"task": {"name": "arithmetic", "digits": 2}, "sampling": {"max_new_tokens": 4}, "group_size": 8}
NUM_SWAPS = 20
LR = 5e-4
NUM_VERSIONS = 64
RISE = 0.06
"""Of held-out accuracy, last two evaluations beside the first. A version that stays as it is draws the same answers to
the same seeds: 0. Luck moves 512 answers by 0.02; 64 versions of learning raise a quarter to above a third."""
ENGINES = {
    "hf": {"kind": "hf", "threads": 1},
    "vllm": {"kind": "vllm", "compute_dtype": "fp32", "kv_cache_bytes": 32 << 20, "batch_rows": 32, "threads": 1},
}


class TwoEngines(Cluster):
    """Sites are named for their engines."""

    def __post_init__(self):
        super().__post_init__()
        # Heads of 32, the least that vLLM's attention takes on a CPU; right in a quarter of its answers, in seconds.
        options = WarmStart(digits=2, seed=0, hidden_size=128, num_layers=1, batch_size=128)
        self.model_dir, _ = warm_start(options, cache=self.directory / "warm-start")

    def tables(self, name):
        service, tables = super().tables(name)
        own = {"engine": ENGINES[name]} if service == "sampler" else {}
        return service, {**tables, **own, **(TASK if service != "coordinator" else {})}


def scraped(log: Path) -> dict[str, float]:
    """Metrics of a process by name and labels, from the port that its log names."""
    port = re.findall(r"metrics on port (\d+)", log.read_text())[-1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def swaps(log: Path) -> int:
    """Swaps of a sampler so far; 0 before its metrics are there."""
    if "metrics on port" not in log.read_text():
        return 0
    return int(scraped(log)["heterorl_sampler_swap_seconds_count"])


async def test_hf_and_vllm_samplers_train_together_over_twenty_swaps(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cluster = TwoEngines(
        tmp_path,
        coordinator={"groups_per_version": 24},
        learner={
            "backend": {"kind": "deepspeed", "stage": 2, "lr": LR, "threads": 1},
            "groups_per_step": 24,
            "evaluation": {"every_versions": 8, "num_prompts": 64, "samples_per_prompt": 8, "temperature": 1.0},
        },
        options={"learner": ("--nproc", "2")},
    )
    log = tmp_path / "logs" / "vllm.log"
    for name in ("coordinator", "learner", "vllm"):
        cluster.start(name)
    family = []
    async with CoordinatorClient(cluster.address, tls=PLAINTEXT) as client:
        try:
            # vLLM starts slowly: the others would only move on without it.
            await cluster.until(client, lambda status: status.sites)
            cluster.start("hf")
            status = await cluster.until(
                client,
                lambda status: (
                    len([at for at in status.sites if at.groups_accepted >= 8]) == len(ENGINES)
                    and swaps(log) > NUM_SWAPS
                    and status.head_version >= NUM_VERSIONS
                    and all(site.canary_difference is not None for site in status.sites)
                ),
            )
            metrics = scraped(log)
            for child in cluster.children.values():
                child.check()
            family = psutil.Process(cluster.children["vllm"].process.pid).children(recursive=True)
            # Without a word: vLLM's processes must notice by themselves.
            cluster.kill("vllm")
            del cluster.children["vllm"]
        finally:
            cluster.stop()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert family
    assert alive == []

    # Every swap was green: its check agreed, and no engine was started twice.
    assert {value for name, value in metrics.items() if "engine_failures_total{" in name} == {0.0}
    evaluations = [json.loads(line) for line in (tmp_path / "learner" / "evaluations.jsonl").read_text().splitlines()]
    accuracies = [entry["accuracy"] for entry in evaluations]
    assert sum(accuracies[-2:]) / 2 >= accuracies[0] + RISE, accuracies
    # Both engines compute what the learner's ranks compute.
    assert max(site.canary_difference for site in status.sites) < 0.02
    assert [site.quarantine for site in status.sites] == ["", ""]
    assert {site.site for site in status.sites} == {"hf", "vllm"}
    connection = cluster.database()
    roots = dict(connection.execute("SELECT version, state_root FROM versions"))
    groups = connection.execute("SELECT site, oldest_version, state FROM groups").fetchall()
    engines = dict(connection.execute("SELECT site, engine FROM sites"))
    num_steps = connection.execute("SELECT COUNT(*) FROM steps").fetchone()[0]
    assert ledger.counts(connection).is_balanced
    connection.close()
    assert engines["hf"].startswith("hf-")
    assert engines["vllm"].startswith("vllm-")
    # Both sites' groups were taken and vLLM's trained, under many versions, each with the digest that the coordinator has.
    states = Counter((site, state) for site, _, state in groups)
    assert states["vllm", "consumed"] > 0
    assert len({version for site, version, _ in groups if site == "vllm"}) > 2
    for site in ENGINES:
        seen = [json.loads(line) for line in (tmp_path / site / "versions.jsonl").read_text().splitlines()]
        assert all(roots[entry["version"]] == entry["state_root"] for entry in seen if "version" in entry)
    assert num_steps >= NUM_SWAPS
