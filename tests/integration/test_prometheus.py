"""Every panel and alert asked of a real Prometheus that scrapes the coordinator alone of a real run behind certificates."""

import asyncio
import json
import logging

import pytest
import yaml

from deploy.grafana.panels import BOARDS
from tests.support.certificates import DAY, Certificates
from tests.support.cluster import Cluster
from tests.support.prometheus import DEPLOY, PROMETHEUS, Prometheus, metrics_port, start_prometheus

_LOG = logging.getLogger(__name__)
SITES = ("site-a", "site-b")
PROCESSES = ("coordinator", "learner", *SITES)
EMPTY_WHEN_HEALTHY = {
    "Rejections": "no group of this run is dropped",
    "Refusals": "refusals come only while processes start",
    "Rpcs that did not succeed": "as above, seen by the callers",
    "Held-out prompts per second": "this run evaluates at the learner alone",
    "Evaluation sets": "as above",
    "Evaluated version": "as above",
    "Groups trained by source": "this run has one source of prompts",
    "Reward by source": "as above",
    "Payload bytes of relays": "this run has no relay",
    "Payload reads at relays": "as above",
    "Cache of relays": "as above",
    "Calls at relays": "as above",
    "Lost members": "no group of this run loses one",
    "Metrics of the loss": "a built-in loss has none of its own",
    "Refused prompts": "the template writes every prompt of this run",
    "Share of a trajectory's time in its environment": "this run has no environment",
    "Endings of trajectories": "as above",
    "Turns and tokens of a trajectory": "as above",
    "KL a token without staleness": "samplers of this run may always be a version behind",
}
"""Panels that may show nothing, and why."""
ALERTS = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]


REWARD = """def score(prompt: str, completion: str, answer: str) -> float:
    return len(set(completion)) / 3
"""


def teaching_task(directory) -> dict[str, object]:
    """A task whose rewards differ for a model that can do nothing yet, as they do in a healthy run."""
    (directory / "several.py").write_text(REWARD)
    prompts = directory / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"{number // 8}+{number % 8}=", "answer": "0"}) for number in range(64))
    prompts.write_text("\n".join(lines))
    return {
        "name": f"jsonl:{prompts}", "evaluation_size": 8, "reward": "several:score", "reward_path": str(directory),
    }  # fmt: skip


def asked(expression: str) -> str:
    """A panel's expression as Grafana sends it with all runs and sites chosen."""
    return expression.replace("$window", "30s").replace("$run", ".*").replace("$site", ".*")


async def start_run(directory) -> tuple[Cluster, Prometheus]:
    """A small run, and a Prometheus with the deployed configuration that scrapes it."""
    task = teaching_task(directory)
    learner = {
        "task": task,
        "evaluation": {"every_versions": 5, "num_prompts": 8, "batch_rows": 8},
        "snapshot_every_versions": 5,
        "verification": {"recompute_rewards": True},
    }
    # Longer than what an alert takes for short.
    certificates = Certificates(directory / "certs", run="kills", lifetime=9 * DAY)
    # Nodes push their metrics to the coordinator, and none of their ports is known to Prometheus.
    learner["metrics_push_s"] = 1.0
    sampler = {"task": task, "metrics_push_s": 1.0}
    cluster = Cluster(directory, learner=learner, sampler=sampler, certificates=certificates)
    try:
        for name in PROCESSES:
            cluster.start(name)
        coordinator = cluster.children["coordinator"]
        while (port := metrics_port(coordinator.log)) is None:
            coordinator.check()
            await asyncio.sleep(0.1)
        target = {"targets": [f"127.0.0.1:{port}"], "labels": {"run": "kills", "service": "coordinator"}}
        return cluster, start_prometheus(directory / "prometheus", [target])
    except BaseException:
        cluster.stop()
        raise


async def answered(server: Prometheus, expressions: dict[str, str]) -> None:
    """Wait until each expression has had data; the log of a test that does not end has the names that never had."""
    waiting = dict(expressions)
    while waiting:
        before = set(waiting)
        for name, expression in list(waiting.items()):
            if await asyncio.to_thread(server.query, expression):
                del waiting[name]
        if before != set(waiting):
            _LOG.warning("without data: %s", sorted(waiting))
        await asyncio.sleep(1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: make programs")
async def test_every_panel_has_data_and_alerts_are_silent_until_a_process_dies(tmp_path):
    panels = {
        f"{board.uid}/{panel.title}/{position}": asked(query.expr)
        for board in BOARDS
        for panel in board.panels
        if panel.title not in EMPTY_WHEN_HEALTHY
        for position, query in enumerate(panel.queries)
    }
    quiet = {
        f"{panel.title}/{position}": asked(query.expr)
        for board in BOARDS
        for panel in board.panels
        if panel.title in EMPTY_WHEN_HEALTHY
        for position, query in enumerate(panel.queries)
    }
    cluster, server = await start_run(tmp_path)
    try:
        await answered(server, panels)
        for expression in quiet.values():
            server.query(expression)

        rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == {rule["alert"] for rule in ALERTS}
        assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
        # A healthy run: every condition of an alert is false at this moment. HeterorlProcessDown and SiteSilent below.
        assert {rule["alert"]: server.query(rule["expr"]) for rule in ALERTS if server.query(rule["expr"])} == {}

        cluster.kill("site-b")
        await answered(server, {"down": 'ALERTS{alertname="HeterorlProcessDown",site="site-b",run="kills"}'})
    finally:
        server.close()
        cluster.stop()
