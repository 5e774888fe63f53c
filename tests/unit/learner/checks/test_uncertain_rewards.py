"""Mathematics that take too long to compare: worth nothing, and nobody's fault where two machines differ."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import RewardError
from heterorl.common.tasks.rewards import answer_match
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.rollout import DropReason, RewardPart
from heterorl.learner.checks.reward_checks import judge_rewards
from tests.support.run import Run, rollout

pytestmark = pytest.mark.process

HANGS = "$\\boxed{9^{9^{9^{9}}}}$"
TEXTS = {"slow": HANGS, "right": "$42$", "wrong": "$41$"}


@pytest.fixture(scope="module", params=["alone", "weighted in a mixture"])
def task(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number}?", "answer": "42"}) + "\n" for number in range(4)))
    source = {"name": f"jsonl:{path}", "match": "math_verify", "reward_timeout_s": 1.0, "evaluation_size": 1}
    if request.param != "alone":
        source["rewards"] = [{"kind": "match", "name": "math", "weight": 1.0}]
        source = {"name": "mixture", "sources": [{**source, "label": "math"}, {"name": "arithmetic", "label": "sums"}]}
    # Processor time alone, however long it takes by the clock.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_match, "PATIENCE", 1000.0)
        task = build_task(TaskConfig.model_validate(source))
    yield task
    task.close()


def judged(task, directory, *stated):
    """What the learner says of a group of (text, stated reward)."""
    run = Run(None, directory)
    number = next(number for number in range(task.num_prompts) if task.prompt(number).text == "1?")
    name = task.score(task.prompt(number), "x")[0].name
    texts = [TEXTS[text] for text, _ in stated]
    rollouts = [
        rollout(
            0, token_ids=np.array([place], np.int32), reward=value, reward_parts=(RewardPart(name=name, value=value),)
        )
        for place, (_, value) in enumerate(stated)
    ]
    group = run.group(SimpleNamespace(id=0, prompt_index=number), version=0, rollouts=tuple(rollouts))
    prompter = SimpleNamespace(
        encode_prompt=lambda prompt: group.prompt_token_ids, completion=lambda ids, prompt: texts[int(ids[0])]
    )
    return judge_rewards(group, task=task, prompter=prompter, tolerance=1e-6)


@pytest.mark.timeout(120)
def test_completion_that_takes_too_long_is_wrong_and_costs_no_group(task, tmp_path):
    assert judged(task, tmp_path, ("right", 1.0), ("slow", 0.0)).is_sound


@pytest.mark.timeout(120)
def test_site_whose_machine_had_the_time_is_no_cheat(task, tmp_path):
    with pytest.raises(RewardError, match="in a time so near its limit that either may be right"):
        judged(task, tmp_path, ("right", 1.0), ("slow", 1.0))


@pytest.mark.timeout(120)
def test_quick_comparison_leaves_no_doubt(task, tmp_path):
    finding = judged(task, tmp_path, ("right", 1.0), ("wrong", 1.0))
    assert finding.reason is DropReason.REWARD_MISMATCH
