"""A run of real processes whose rewards are code in a sandbox, a service over HTTP and a judge, one sum of the three."""

import asyncio
import json
import warnings

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.links import PLAINTEXT
from tests.support.reward_service import serving

WEIGHTS = {"runs": 1.0, "digits": 0.5, "judge": 0.25}
RUBRIC = "Rate 1 to 5: <{completion}>"


def runs(completion):
    """Whether it is Python that ends; what the tiny model writes is digits, signs and brackets."""
    if not completion.strip():
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(completion, {})  # noqa: S102 - what a reward of code does
    except Exception:  # noqa: BLE001 - any failure is a failed test
        return 0.0
    return 1.0


def digits(completion):
    return sum(character.isdigit() for character in completion) / 8


def length(completion):
    return min(4, len(completion)) / 4


def service(document):
    return {"rewards": [digits(completion) for completion in document["completions"]]}


def judge(document):
    completion = document["messages"][0]["content"].removeprefix("Rate 1 to 5: <")[:-1]
    words = f'It is short. {{"score": {1 + 4 * length(completion)}}}'
    return {"choices": [{"message": {"role": "assistant", "content": words}}]}


@pytest.mark.slow
async def test_code_a_service_and_a_judge_reward_a_run_and_the_learner_checks_what_it_can(tmp_path):
    questions = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"{number}+1=", "answer": {"tests": ["assert True"]}} for number in range(10, 60)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(service) as scores, serving(judge) as judges:
        rewards = [
            {"name": "runs", "kind": "code", "needs_block": False, "test_timeout_s": 10.0},
            {"name": "digits", "kind": "http", "url": f"{scores.url}/score", "weight": WEIGHTS["digits"]},
            {
                "name": "judge", "kind": "judge", "url": f"{judges.url}/v1", "model": "judge-1", "rubric": RUBRIC,
                "low": 1.0, "high": 5.0, "weight": WEIGHTS["judge"], "cache_file": str(tmp_path / "judge.sqlite"),
            },
        ]  # fmt: skip
        task = {"name": f"jsonl:{questions}", "evaluation_size": 2, "reward_timeout_s": 30.0, "rewards": rewards}
        cluster = Cluster(
            tmp_path,
            coordinator={"samples_every": 1, "groups_per_version": 2},
            learner={
                "task": task, "max_steps": 2, "groups_per_step": 2,
                "verification": {"recompute_rewards": True, "trust_rewards_of": ["site-a"]},
            },
            sampler={"task": task},
        )  # fmt: skip
        for name in ("coordinator", "learner", "site-a"):
            cluster.start(name)
        async with CoordinatorClient(cluster.address, tls=PLAINTEXT) as client:
            try:
                status = await cluster.until(client, lambda status: status.ledger.consumed >= 4)
                assert await asyncio.to_thread(cluster.children["learner"].process.wait) == 0
                exported = tmp_path / "samples.jsonl"
                command = ["samples", "export", str(exported), cluster.address, "--insecure"]
                result = await asyncio.to_thread(CliRunner().invoke, app, command)
            finally:
                cluster.stop()

    assert result.exit_code == 0, result.output
    assert status.ledger.is_balanced
    assert status.ledger.dropped == {}, "the learner ran the code again and came to the same"
    rollouts = [json.loads(line) for line in exported.read_text().splitlines()]
    texts = [rollout for rollout in rollouts if rollout["completion"] is not None]
    assert len(texts) >= 4
    for rollout in texts:
        said = rollout["completion"]
        assert rollout["reward_parts"] == {"runs": runs(said), "digits": digits(said), "judge": length(said)}
        assert rollout["reward"] == pytest.approx(
            sum(weight * rollout["reward_parts"][name] for name, weight in WEIGHTS.items())
        )
    assert len({rollout["reward"] for rollout in texts}) > 1
    # Both services were asked for what is in the samples.
    assert {rollout["completion"] for rollout in texts} <= {
        said for asked in scores.asked for said in asked["completions"]
    }
    assert judges.paths[0] == "/v1/chat/completions"
    judged = {asked["messages"][0]["content"] for asked in judges.asked}
    assert {RUBRIC.format(completion=rollout["completion"]) for rollout in texts} <= judged
    logs = b"".join(path.read_bytes() for path in (tmp_path / "logs").iterdir())
    assert b"Traceback" not in logs
