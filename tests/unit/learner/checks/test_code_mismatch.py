"""Code of completions that comes to another result at the learner: whose fault that is."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from heterorl.common.errors import RewardError
from heterorl.common.tasks.arithmetic import ArithmeticTask
from heterorl.common.tasks.rewards.sandbox.code_reward import CodeReward
from heterorl.common.tasks.rewards.weighted import NamedReward, WeightedTask
from heterorl.common.tasks.sources.mixture import MixtureTask, Source
from heterorl.common.tasks.task import Doubts
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.rollout import DropReason, RewardPart, total_reward
from heterorl.learner.checks.reward_checks import judge_rewards
from tests.support.learner_world import queued

TEXT = "what it says"


class Coins(CodeReward):
    """Code whose results are known before."""

    def __init__(self, *values):
        self.values, self.num_workers, self.digest, self.is_slow = list(values), 1, "d", False

    def score(self, prompt, completion):
        return (RewardPart(name="reward", value=self.values.pop(0)),)

    def doubts(self, prompt, completion):
        return Doubts(near=("reward",) if self.is_slow else (), by_code=("reward",))


def task_with(coins):
    own = ArithmeticTask(digits=1)
    correct = NamedReward(name="correct", weight=1.0, source=own, is_own_score=True)
    return WeightedTask(own, [correct, NamedReward(name="tests", weight=0.5, source=coins)])


def judged(task, *parts, text=TEXT, reward=None):
    group = queued(1).group
    total = total_reward(parts) if reward is None else reward
    rollout = dataclasses.replace(group.rollouts[0], reward=total, reward_parts=parts)
    group = dataclasses.replace(group, prompt_index=0, rollouts=(rollout,))
    prompter = SimpleNamespace(encode_prompt=lambda prompt: group.prompt_token_ids, completion=lambda ids, prompt: text)
    return judge_rewards(group, task=task, prompter=prompter, tolerance=1e-6)


CORRECT = RewardPart(name="correct", value=0.0)
PASSED = RewardPart(name="tests", value=1.0, weight=0.5)


def test_code_with_the_stated_result_is_run_once():
    coins = Coins(1.0, 0.0)

    assert judged(task_with(coins), CORRECT, PASSED).is_sound
    assert coins.values == [0.0]


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.0, 1.0), (0.5, 0.25)])
def test_code_that_comes_to_several_results_is_not_held_against_its_site(values):
    coins = Coins(*values)

    with pytest.raises(RewardError, match=r"tests is 1, computed 0.* and then .*: the code .* leaves it to chance"):
        judged(task_with(coins), CORRECT, PASSED)
    assert coins.values == []


def test_code_that_agrees_with_itself_has_failed_and_says_that_it_was_code():
    coins = Coins(0.0, 0.0, 0.0, 1.0)

    finding = judged(task_with(coins), CORRECT, PASSED)

    assert (finding.reason, finding.detail) == (DropReason.CODE_MISMATCH, "rollouts[0].reward: 0.5, computed 0")
    assert coins.values == [1.0], "it is run three times"
    one = Source(label="only", weight=1.0, task=task_with(Coins(0.0, 0.0, 0.0)))
    assert judged(MixtureTask([one]), CORRECT, PASSED).reason is DropReason.CODE_MISMATCH


@pytest.mark.parametrize(
    ("parts", "reward"),
    [
        ((CORRECT, PASSED), 0.75),
        ((dataclasses.replace(CORRECT, value=1.0), PASSED), None),
        ((CORRECT, dataclasses.replace(PASSED, weight=1.0)), None),
        ((CORRECT, dataclasses.replace(PASSED, value=1.5)), None),
        ((CORRECT, dataclasses.replace(PASSED, value=float("nan"))), 0.5),
        ((CORRECT,), 0.5),
        ((), 0.5),
    ],
)
def test_what_no_code_explains_is_held_against_the_site_in_full(parts, reward):
    coins = Coins(0.0, 1.0)
    coins.is_slow = True

    assert judged(task_with(coins), *parts, reward=reward).reason is DropReason.REWARD_MISMATCH
    assert coins.values == [1.0], "nothing is run again for it"


def test_a_time_near_the_limit_is_seen_before_anything_runs_again():
    coins = Coins(0.0, 0.0)
    coins.is_slow = True

    with pytest.raises(RewardError, match="in a time so near its limit"):
        judged(task_with(coins), CORRECT, PASSED)
    assert coins.values == [0.0]


@pytest.mark.process
def test_a_forged_result_of_code_in_the_sandbox_is_found(tmp_path):
    rows = [{"prompt": f"{n}", "answer": json.dumps(["assert f(2) == 4"])} for n in range(4)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # So much that no run of such code comes near it.
    rewards = [{"kind": "code", "name": "tests", "test_timeout_s": 60.0}]
    task = build_task(
        TaskConfig(name=f"jsonl:{tmp_path}/code.jsonl", evaluation_size=1, rewards=rewards, reward_timeout_s=60.0)
    )
    part = RewardPart(name="tests", value=1.0)
    try:
        assert judged(task, part, text="```python\ndef f(x): return 4\n```").is_sound
        assert judged(task, part, text="```python\ndef f(x): return 5\n```").reason is DropReason.CODE_MISMATCH
    finally:
        task.close()
