"""A run as processes whose samplers evaluate every version: one is killed in the middle, and every number is whole."""

import asyncio
import contextlib
import json
import subprocess
import sys

import pytest

from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.evaluation import EvaluationState
from tests.support.cluster import Cluster

PLAN = [
    {"name": "sums", "num_prompts": 64, "samples_per_prompt": 8, "temperature": 0.8, "max_new_tokens": 3,
     "every_versions": 3},
    {"name": "greedy", "num_prompts": 16, "max_new_tokens": 3, "every_versions": 3},
]  # fmt: skip
OVER = {EvaluationState.DONE, EvaluationState.INCOMPLETE}
SITE_SETS = [{"name": name, "task": {"digits": 2}} for name in ("sums", "greedy")]


async def until(condition):
    while True:
        with contextlib.suppress(Exception):
            if found := await condition():
                return found
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_sampler_killed_in_the_middle_of_an_evaluation_costs_no_prompt_and_counts_none_twice(tmp_path):
    cluster = Cluster(
        tmp_path, coordinator={"evaluation": PLAN, "work_lease_s": 3.0}, sampler={"evaluation": SITE_SETS}
    )
    try:
        for name in ("coordinator", "learner", "site-a", "site-b"):
            cluster.start(name)
        async with CoordinatorClient(cluster.address, tls=TlsConfig(insecure=True)) as client:

            async def half_done():
                found = await client.list_evaluations(task_set="sums")
                return next((each for each in found if each.version and 0 < each.summary.num_prompts < 64), None)

            of_victim = await until(half_done)
            cluster.kill("site-a")

            async def over():
                found = await client.list_evaluations(task_set="sums")
                of_it = [each for each in found if each.version == of_victim.version and each.state in OVER]
                later = [each for each in found if each.version >= of_victim.version
                         and each.state is EvaluationState.DONE]  # fmt: skip
                return of_it and later and (of_it[0], later[0])

            begun, whole = await until(over)
            # Nobody waits for an evaluation: versions went on meanwhile.
            head = (await client.get_status()).head_version
            newest = await client.list_evaluations()
    finally:
        cluster.stop()

    # Another site has its version and draws the rest, or all sites have passed it on and it says so.
    assert begun.summary.num_prompts == 64 if begun.state is EvaluationState.DONE else begun.summary.num_prompts < 64
    assert sum(count for _, count in begun.sites) == begun.summary.num_prompts
    assert whole.summary.num_prompts == 64
    assert whole.summary.num_samples == 64 * 8
    assert sum(count for _, count in whole.sites) == 64
    assert [entry.k for entry in whole.summary.passes] == [1, 2, 4, 8]
    assert head > of_victim.version
    assert {each.task_set for each in newest} == {"sums", "greedy"}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_version_evaluated_offline_gives_the_very_number_of_the_run(tmp_path):
    cluster = Cluster(
        tmp_path,
        coordinator={"evaluation": PLAN[:1], "max_versions": 3},
        sampler={"evaluation": [{**SITE_SETS[0], **{key: PLAN[0][key] for key in (
            "num_prompts", "samples_per_prompt", "temperature", "max_new_tokens")}}]},
    )  # fmt: skip
    try:
        for name in ("coordinator", "learner", "site-a"):
            cluster.start(name)
        async with CoordinatorClient(cluster.address, tls=TlsConfig(insecure=True)) as client:

            async def last_done():
                found = await client.list_evaluations()
                return [each for each in found if each.version == 3 and each.state is EvaluationState.DONE]

            # The last version's too, though the run ends with it.
            (of_run,) = await until(last_done)
        command = (sys.executable, "-P", "-m", "heterorl", "evaluate", cluster.address, "--version", "3", "--json",
                   "-c", str(tmp_path / "config" / "site-a.toml"))  # fmt: skip
        answer = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    finally:
        cluster.stop()

    assert answer.returncode == 0, answer.stderr
    (found,) = json.loads(answer.stdout)["evaluations"]
    assert found["num_samples"] == of_run.summary.num_samples
    assert found["average"]["mean"] == pytest.approx(of_run.summary.average.mean, abs=1e-12)
    assert found["mean_tokens"] == pytest.approx(of_run.summary.mean_tokens, abs=1e-9)
    assert found["task_digest"] == of_run.task_digest
