"""The small examples are valid, agree with one another, and their reward says what its page says."""

import importlib.util
from pathlib import Path

import pytest

from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.process.config_file import load
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import assemble
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.train.custom_loss_check import check_custom_loss
from heterorl.sampler.sampler_app import load_components
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.clock import ManualClock
from tests.support.run import Run

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


@pytest.mark.process
async def test_the_three_services_of_the_run_take_one_another(tmp_path):
    model = {"model_dir": str(write_tiny_model(tmp_path / "model", seed=0, hidden_size=32, num_layers=1))}
    configs = [
        load(schema, OWN / f"{name}.toml").model_copy(update={**changes, key: tmp_path / name})
        for schema, name, key, changes in (
            (CoordinatorConfig, "coordinator", "data_dir", {}),
            (LearnerConfig, "learner", "state_dir", model),
            (SamplerConfig, "sampler", "state_dir", model),
        )
    ]
    coordinator, learner, sampler = configs
    # As both start: each tries a reward of digits.py.
    parts, components = assemble(learner), load_components(sampler)
    parts.close()
    components.close()
    core = await Coordinator.open(coordinator, ManualClock())
    try:
        run = Run(core, tmp_path)
        run.contract = parts.contract
        await run.begin(holder=learner.holder)
        await core.register(run.registration(site=sampler.site, contract=components.contract))
    finally:
        await core.close()

    assert components.contract == parts.contract


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
