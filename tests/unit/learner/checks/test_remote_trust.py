"""Rewards that a learner cannot compute again: signed, or of a site that it is told to trust, or refused."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.identity.signing import new_key
from heterorl.common.tasks.rewards.remote_reward import sign
from heterorl.common.tasks.task import Message, messages_of
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.rollout import DropReason, RewardPart, total_reward
from heterorl.common.wire.rollout_messages import pushed_from_pb
from heterorl.common.wire.sealed_groups import canonical, open_group, seal
from heterorl.learner.checks.reward_checks import check_trust, judge_rewards
from heterorl.v1 import rollout_pb2
from tests.support.groups import push_of
from tests.support.learner_world import queued
from tests.support.plain_task import plain_task
from tests.support.reward_service import serving

TEXT = "what it says"


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    return new_key(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture
def task(request, signer):
    # Nobody listens there, and nobody is asked.
    style = {"kind": "http", "name": "style", "url": "http://127.0.0.1:1", "weight": 0.5}
    style |= {"signed_by": [signer.public_key]} if getattr(request, "param", "") == "signed" else {}
    task = build_task(TaskConfig(digits=1, rewards=[{"kind": "match", "name": "correct"}, style]))
    yield task
    task.close()


def group_with(*parts, reward=None):
    group = queued(1).group
    total = total_reward(parts) if reward is None else reward
    rollouts = tuple(dataclasses.replace(each, reward=total, reward_parts=parts) for each in group.rollouts)
    return dataclasses.replace(group, prompt_index=0, rollouts=rollouts)


def judged(task, group, trusted=()):
    prompter = SimpleNamespace(encode_prompt=lambda prompt: group.prompt_token_ids, completion=lambda ids, prompt: TEXT)
    return judge_rewards(group, task=task, prompter=prompter, tolerance=1e-6, trusted=trusted)


CORRECT = RewardPart(name="correct", value=0.0)
STYLE = RewardPart(name="style", value=0.8, weight=0.5)


def test_a_stated_reward_is_believed_of_a_trusted_site_alone(task):
    group = group_with(CORRECT, STYLE)
    site = group.id.site

    assert judged(task, group, [site]).is_sound
    assert judged(task, group, ["*"]).is_sound
    for trusted in ((), ("another",)):
        with pytest.raises(RewardError, match=r"style cannot be computed again.*verification.trust_rewards_of"):
            judged(task, group, trusted)


@pytest.mark.parametrize(
    ("parts", "reward", "words"),
    [
        # A trusted site states what it alone knows, and nothing else.
        ((dataclasses.replace(CORRECT, value=1.0), STYLE), None, "reward: 1.4, computed 0.4"),
        ((dataclasses.replace(CORRECT, value=1.0), STYLE), 0.4, "correct is 1, computed 0"),
        ((CORRECT, STYLE), 0.9, "reward: 0.9, computed 0.4"),
        ((CORRECT, dataclasses.replace(STYLE, weight=1.0)), 0.4, "not 1 x correct, 0.5 x style"),
        ((CORRECT, dataclasses.replace(STYLE, value=1.01)), None, "style is 1.01, outside 0 to 1"),
        ((CORRECT, dataclasses.replace(STYLE, value=float("nan"))), 0.0, "style is nan, outside 0 to 1"),
        ((CORRECT,), None, "style is missing"),
        ((), 0.0, "style is missing"),
    ],
)
def test_trust_covers_no_more_than_the_reward_itself(task, parts, reward, words):
    finding = judged(task, group_with(*parts, reward=reward), ["*"])

    assert finding.reason is DropReason.REWARD_MISMATCH
    assert words in finding.detail


@pytest.mark.parametrize("task", ["signed"], indirect=True)
def test_a_signed_reward_needs_no_trust(task, signer, tmp_path):
    answer, asked = task.prompt(0).answer, messages_of(task.prompt(0))
    proof = sign(signer, "style", asked, TEXT, answer, 0.8)

    assert judged(task, group_with(CORRECT, dataclasses.replace(STYLE, signature=proof))).is_sound
    stolen = {
        "another value": dataclasses.replace(STYLE, value=1.0, signature=proof),
        "of another text": dataclasses.replace(STYLE, signature=sign(signer, "style", asked, "other", answer, 0.8)),
        "of another key": dataclasses.replace(
            STYLE, signature=sign(new_key(tmp_path / "k"), "style", asked, TEXT, answer, 0.8)
        ),
    }
    for part in stolen.values():
        # Whoever sends it: a false signature is worse than none.
        finding = judged(task, group_with(CORRECT, part), ["*"])
        assert finding.reason is DropReason.REWARD_MISMATCH
        assert "the signature of style is of none of its signed_by" in finding.detail
    with pytest.raises(RewardError, match="no key of its signed_by signed it"):
        judged(task, group_with(CORRECT, STYLE))


def test_a_learner_that_nothing_could_reach_does_not_start(task):
    with pytest.raises(ConfigError, match=r"^verification.trust_rewards_of: a learner cannot compute style again"):
        check_trust(task, ())
    check_trust(task, ("eu-1",))
    check_trust(build_task(TaskConfig(digits=1)), ())


def test_a_learner_does_not_start_with_an_environment_that_it_cannot_step_again_and_no_site_to_trust():
    task, repeats = (plain_task(environments=(SimpleNamespace(name="maze", is_deterministic=word),))
                     for word in (False, True))  # fmt: skip

    with pytest.raises(ConfigError, match=r"^verification\.trust_rewards_of: maze is not deterministic"):
        check_trust(task, ())
    check_trust(task, ("eu-1",))
    check_trust(task, ("*",))
    check_trust(repeats, ())


def test_groups_of_such_an_environment_are_trained_on_from_a_trusted_site_alone():
    group = group_with(CORRECT)
    # Chance may decide the first messages, so the prompt is not compared; to make it would begin an episode.
    conversations = SimpleNamespace(at=lambda index: SimpleNamespace(name="maze", is_deterministic=False))
    task = plain_task(num_prompts=1)

    def judged_by(*trusted):
        return judge_rewards(
            group, task=task, prompter=None, tolerance=1e-6, trusted=trusted, conversations=conversations
        )

    assert judged_by(group.id.site).is_sound
    assert judged_by("*").is_sound
    for trusted in ((), ("another",)):
        with pytest.raises(RewardError, match=r"^maze leaves things to chance.*verification\.trust_rewards_of"):
            judged_by(*trusted)


@pytest.mark.parametrize("task", ["signed"], indirect=True)
def test_a_learner_of_signed_rewards_starts_without_trust(task):
    check_trust(task, ())


def test_prompts_and_digest_are_the_tasks_where_nobody_is_asked(task):
    here = task.without_remote()

    assert here.digest == task.digest
    assert np.isnan(here.score(here.prompt(0), "x")[1].value)


@pytest.mark.process
def test_a_signed_value_goes_the_whole_way_from_its_service_to_the_check(signer):
    def reply(document):
        asked, name = [Message(**turn) for turn in document["messages"]], document["reward"]
        proofs = [sign(signer, name, asked, text, document["answer"], 0.3) for text in document["completions"]]
        return {"rewards": [0.3] * len(proofs), "signatures": [proof.hex() for proof in proofs]}

    with serving(reply) as server:
        style = {"kind": "http", "name": "style", "url": server.url, "weight": 0.5, "signed_by": [signer.public_key]}
        task = build_task(
            TaskConfig(digits=1, rewards=[{"kind": "match", "name": "correct"}, style], reward_timeout_s=20)
        )
        try:
            parts = task.score(task.prompt(0), TEXT)
            sealed = seal(group_with(*parts))
            # As a coordinator reads it.
            (message,) = pushed_from_pb(push_of(rollout_pb2.Group.FromString(sealed.data)), limit_groups=1)
            assert canonical(message) == sealed
            group = open_group(sealed)
            num_asked = len(server.asked)

            assert group.rollouts[0].reward_parts == parts
            assert judged(task, group).is_sound
            assert len(server.asked) == num_asked == 1
        finally:
            task.close()
