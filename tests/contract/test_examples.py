"""The small examples are valid, agree with one another, and their reward says what its page says."""

import importlib.util
from pathlib import Path

import pytest

from heterorl.common.process.config_file import load
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.train.custom_loss_check import check_custom_loss
from heterorl.sampler.sampler_config import SamplerConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = EXAMPLES / "own-reward"


def test_a_learner_and_a_sampler_on_one_machine_agree():
    coordinator = load(CoordinatorConfig, OWN / "coordinator.toml")
    learner = load(LearnerConfig, OWN / "learner.toml")
    sampler = load(SamplerConfig, OWN / "sampler.toml")

    for key in ("task", "sampling", "group_size", "model_dir", "coordinator", "use_chat_template"):
        assert getattr(learner, key) == getattr(sampler, key)
    assert learner.coordinator == coordinator.listen
    assert learner.run_id == coordinator.run_id
    assert learner.groups_per_step * learner.steps_per_version == coordinator.groups_per_version


def test_the_learner_with_another_loss_differs_in_nothing_else():
    own = load(LearnerConfig, OWN / "learner.toml")
    other = load(LearnerConfig, EXAMPLES / "own-loss" / "learner.toml")

    changed = {key for key in LearnerConfig.model_fields if getattr(own, key) != getattr(other, key)}
    assert changed == {"state_dir", "loss", "task"}
    # The task differs in how the reward's directory is written, and in nothing else.
    assert Path(other.task.reward_path).resolve() == Path(own.task.reward_path).resolve()
    assert own.task.model_copy(update={"reward_path": ""}) == other.task.model_copy(update={"reward_path": ""})


def test_the_other_loss_is_one_that_the_learner_would_start_with():
    loss = load(LearnerConfig, EXAMPLES / "own-loss" / "learner.toml").loss

    check_custom_loss(loss)
    assert loss_spec_of(loss).custom.options == {"eps_low": 0.2, "eps_high": 0.28}


@pytest.mark.parametrize(
    ("completion", "parts"),
    [
        ("640", {"digits": 0.8, "length": 0.2}),
        ("641", {"digits": 0.8 * 2 / 3, "length": 0.2}),
        ("64", {"digits": 0.8 * 2 / 3, "length": 0.0}),
        ("", {"digits": 0.0, "length": 0.0}),
    ],
)
def test_the_reward_gives_partial_credit(completion, parts):
    spec = importlib.util.spec_from_file_location("digits", OWN / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.score("12+34=", completion, "640") == pytest.approx(parts)
