"""Rollouts of three turns through real services: played at two sites, stepped again by the learner, trained."""

import sqlite3

import pytest

from heterorl.common.types.rollout import GIVEN
from heterorl.common.types.trajectory import turns_of
from heterorl.common.wire.seal import open_group, read_sealed
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
    made.learner = {**shared, "max_steps": STEPS, "verification": {"recompute_rewards": True}}
    made.sampler = shared
    made.coordinator = {"samples_every": 1}
    yield made
    made.stop()


@pytest.mark.timeout(300)
def test_trajectories_are_played_checked_and_trained(cluster):
    cluster.start("coordinator")
    learner = cluster.start("learner")
    for name in ("eu-1", "us-1"):
        cluster.start(name)

    assert learner.process.wait(240) == 0, (cluster.directory / "logs" / "learner.log").read_text()[-3000:]

    cluster.stop()
    with sqlite3.connect(cluster.directory / "coordinator" / "coordinator.sqlite") as store:
        counts = dict(store.execute("SELECT account, count FROM ledger").fetchall())
        contents = [data for (data,) in store.execute("SELECT content FROM sample_payloads")]
    assert counts.get("consumed", 0) >= STEPS * 4, counts
    assert not [name for name, count in counts.items() if name.startswith("dropped") and count], counts
    groups = [open_group(read_sealed(bytes(data))) for data in contents]
    members = [rollout for group in groups for rollout in group.trainable]
    assert members
    assert {len(turns_of(rollout)) for rollout in members} == {3}
    assert all(rollout.spans[1].version == GIVEN for rollout in members)
