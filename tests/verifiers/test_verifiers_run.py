"""A game of verifiers through real services: a sampler plays groups of a small model, the learner steps them again."""

import sqlite3

import pytest

from heterorl.common.types.rollout import GIVEN, turns_of
from heterorl.common.wire.sealed_groups import open_group, read_sealed
from tests.support.cluster import Cluster
from tests.support.conversations import save_chat_model
from tests.verifiers.environments import GUESS

STEPS = 1
PLAYED_TURNS = 2


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "guess_number.py").write_text(GUESS)
    made = Cluster(tmp_path)
    made.model_dir = save_chat_model(tmp_path / "chat")
    shared = {
        "task": {
            "name": "seeds", "evaluation_size": 4, "environment": "verifiers:guess-number", "step_timeout_s": 60.0,
            "environment_path": str(tmp_path), "max_turns": PLAYED_TURNS, "environment_workers": 1,
        },
        "sampling": {"max_new_tokens": 4, "max_trajectory_tokens": 200}, "group_size": 2, "use_chat_template": True,
    }  # fmt: skip
    made.learner = {
        **shared, "max_steps": STEPS, "groups_per_step": 2, "verification": {"recompute_rewards": True}
    }  # fmt: skip
    made.sampler = shared
    made.coordinator = {"samples_every": 1, "groups_per_version": 2}
    yield made
    made.stop()


@pytest.mark.timeout(1500)
def test_a_game_is_played_and_stepped_again_with_equal_tokens_and_rewards(cluster):
    cluster.start("coordinator")
    learner = cluster.start("learner")
    cluster.start("eu-1")

    assert learner.process.wait() == 0, (cluster.directory / "logs" / "learner.log").read_text()[-3000:]

    cluster.stop()
    with sqlite3.connect(cluster.directory / "coordinator" / "coordinator.sqlite") as store:
        counts = dict(store.execute("SELECT account, count FROM ledger").fetchall())
        contents = [data for (data,) in store.execute("SELECT content FROM sample_payloads JOIN samples USING (id)")]
    # The learner compared given ids bit for bit, ends and rewards.
    assert counts.get("consumed", 0) >= STEPS * 2, counts
    assert not [name for name, count in counts.items() if name.startswith("dropped") and count], counts
    members = [rollout for data in contents for rollout in open_group(read_sealed(bytes(data))).trainable]
    assert members
    for rollout in members:
        assert rollout.reward == pytest.approx(0.5 / len(turns_of(rollout)))
        assert len(turns_of(rollout)) == PLAYED_TURNS
        assert rollout.spans[1].version == GIVEN
