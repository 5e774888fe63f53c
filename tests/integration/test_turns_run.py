"""Rollouts of three turns through real services: played at two sites, stepped again by the learner, trained, evaluated."""

import asyncio
import sqlite3

import pytest

from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.evaluation import EvaluationState
from heterorl.common.types.rollout import GIVEN, turns_of
from heterorl.common.types.sample import SampleFilter, SampleKind, SamplePage
from heterorl.common.wire.sealed_groups import open_group, read_sealed
from tests.support.cluster import Cluster
from tests.support.conversations import save_chat_model

STEPS = 4
ENVIRONMENT = '''
"""Talk for three turns; a text with an e in it is worth more."""


class Talk:
    def reset(self, row, *, seed):
        self.said, self.seed = [], seed
        return f"say {seed % 7}"

    def step(self, action):
        if "z" in action.text:
            raise RuntimeError("nobody says z")
        self.said.append(action.text)
        return None if len(self.said) == 3 else f"more {len(action.text) + self.seed % 5}"

    def score(self):
        return {"e": sum(text.count("e") for text in self.said) / 10, "turns": len(self.said) / 10}
'''


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    made = Cluster(tmp_path)
    made.model_dir = save_chat_model(tmp_path / "chat")
    shared = {
        "task": {
            "name": "seeds", "size": 500, "environment": "talk:Talk", "environment_path": str(tmp_path), "max_turns": 4,
            "environment_workers": 8,
        },
        "sampling": {"max_new_tokens": 6, "max_trajectory_tokens": 200}, "group_size": 4, "use_chat_template": True,
    }  # fmt: skip
    made.learner = {**shared, "max_steps": STEPS, "verification": {"logprob_floor": 1.0, "require_seeded": True}}
    held = {"name": "talk", "num_prompts": 4, "samples_per_prompt": 4, "temperature": 1.0, "max_new_tokens": 6}
    made.sampler = {**shared, "seeded_sampling": True, "evaluation": [{**held, "task": shared["task"]}]}
    made.coordinator = {"samples_every": 1, "evaluation": [{**held, "every_versions": STEPS}]}
    yield made
    made.stop()


async def evaluated(cluster, version):
    """What came of a version's evaluation, and the completions of one of its samples."""
    async with CoordinatorClient(cluster.address, tls=TlsConfig(insecure=True)) as client:
        while True:
            of = [each for each in await client.list_evaluations() if each.version == version]
            if of and of[0].state is EvaluationState.DONE:
                break
            await asyncio.sleep(0.1)
        found = await client.list_samples(wanted=SampleFilter(kind=SampleKind.EVALUATION), page=SamplePage())
        sample = await client.get_sample(sample_id=found.samples[0].id)
    return of[0].summary, sample.rollouts


@pytest.mark.timeout(300)
def test_trajectories_are_played_checked_trained_and_evaluated(cluster):
    cluster.start("coordinator")
    learner = cluster.start("learner")
    for name in ("eu-1", "us-1"):
        cluster.start(name)

    assert learner.process.wait() == 0, (cluster.directory / "logs" / "learner.log").read_text()[-3000:]

    summary, completions = asyncio.run(evaluated(cluster, STEPS))
    cluster.stop()
    with sqlite3.connect(cluster.directory / "coordinator" / "coordinator.sqlite") as store:
        counts = dict(store.execute("SELECT account, count FROM ledger").fetchall())
        contents = [
            data
            for (data,) in store.execute(
                "SELECT content FROM sample_payloads JOIN samples USING (id) WHERE kind != 'evaluation'"
            )
        ]
    assert counts.get("consumed", 0) >= STEPS * 4, counts
    assert not [name for name, count in counts.items() if name.startswith("dropped") and count], counts
    groups = [open_group(read_sealed(bytes(data))) for data in contents]
    members = [rollout for group in groups for rollout in group.trainable]
    assert members
    assert {len(turns_of(rollout)) for rollout in members} == {3}
    assert all(group.is_seeded for group in groups)
    assert all(rollout.spans[1].version == GIVEN for rollout in members)
    assert (summary.num_prompts, summary.num_samples + summary.num_errors) == (4, 16)
    # Three turns each, as the environment's score says.
    assert summary.average.mean >= 0.3
    assert all(one.completion.count("more ") >= 2 for one in completions if one.reward >= 0.3)
