"""What a learner's and a coordinator's file refuse, because two keys contradict each other."""

import pytest
from pydantic import ValidationError

from heterorl.common.process.config_file import load
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.train.backend_config import Fsdp2BackendConfig

GAME = {"use_chat_template": True, "task": {"name": "seeds", "environment": "games:Guess"}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"backend": {"kind": "fsdp2", "compile": True, "sequence_parallel": 2}},
            "compile does not go with sequence_parallel",
        ),
        ({"backend": {"kind": "deepspeed", "stage": 0, "offload_optimizer": True}}, "needs stage 1, 2 or 3"),
        ({"backend": {"reference_model_dir": "/nonexistent"}}, "the loss reads no reference model"),
        ({"variants": ["int8", "int8"]}, "names one twice"),
        ({"task": GAME["task"]}, "turns need a chat template"),
        ({**GAME, "evaluation": {"every_versions": 1}}, "draws one turn of an episode"),
        ({**GAME, "sampling": {"router_replay": "rollout"}}, 'set router_replay to "none"'),
        (
            {"sampling": {"router_replay": "rollout"}, "loss": {"kind": "grpo", "reference_kl": 0.04}},
            "loss.reference_kl: the reference model does not replay; set loss.reference_kl to 0",
        ),
        (
            {
                "sampling": {"router_replay": "rollout"},
                "loss": {"kind": "custom", "function": "mine:loss", "reads_reference": True},
            },
            "loss.reads_reference: the reference model does not replay; set loss.reads_reference to false",
        ),
        (
            {**GAME, "sampling": {"max_new_tokens": 65, "max_trajectory_tokens": 64}},
            "groups with a longer first turn are refused",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(values, words):
    with pytest.raises(ValidationError, match=words):
        LearnerConfig.model_validate(values)


def test_every_rank_has_the_configuration_of_the_first(tmp_path, monkeypatch):
    source = {"name": "seeds", "label": "a"}
    config = LearnerConfig.model_validate(
        {
            "use_chat_template": True,
            "task": {"name": "mixture", "environment": "games:Guess", "max_turns": 4, "sources": [source]},
            "backend": {"kind": "fsdp2", "grad_clip": float("inf")},
            "loss": {"kind": "tis", "cap": float("inf")},
        }
    )
    path = tmp_path / "learner.toml"
    path.write_text('[backend]\nkind = "fsdp2"\n[loss]\nkind = "custom"\nfunction = "mine:loss"\n')
    own = load(LearnerConfig, path)
    monkeypatch.chdir(path.parent.parent)

    assert LearnerConfig.of_text(own.to_text()).loss.directory == str(tmp_path)
    made = LearnerConfig(backend=Fsdp2BackendConfig(lr=0.5))
    assert LearnerConfig.of_text(made.to_text()).backend == made.backend
    other = LearnerConfig.of_text(config.to_text())

    assert other == config
    assert other.drawn_semantics() == config.drawn_semantics()
    assert other.task.max_turns_of_all == 4


def test_each_of_them_alone_is_taken():
    for values in (
        {"backend": {"kind": "fsdp2", "compile": True}},
        {"backend": {"kind": "fsdp2", "sequence_parallel": 2}},
        {"backend": {"kind": "deepspeed", "stage": 1, "offload_optimizer": True}},
        {"variants": ["int8", "fp8_e4m3"]},
        GAME,
        {**GAME, "sampling": {"max_new_tokens": 64, "max_trajectory_tokens": 64}},
        {**GAME, "task": {**GAME["task"], "max_turns": 1}, "evaluation": {"every_versions": 1}},
    ):
        LearnerConfig.model_validate(values)


def test_groups_under_way_are_those_of_four_versions():
    assert CoordinatorConfig(groups_per_version=32).outstanding_limit == 128
    assert CoordinatorConfig(groups_per_version=32, max_outstanding_groups=40).outstanding_limit == 40


def test_losses_divide_by_the_drawn_tokens_that_all_turns_may_have():
    def longest(**task):
        sampling = {"max_new_tokens": 64, "max_trajectory_tokens": 300}
        return LearnerConfig.model_validate({**GAME, "task": {**GAME["task"], **task}, "sampling": sampling})

    assert longest(max_turns=1).drawn_semantics().max_new_tokens == 64
    assert longest(max_turns=4).drawn_semantics().max_new_tokens == 256
    # No rollout has more tokens than that.
    assert longest(max_turns=5).drawn_semantics().max_new_tokens == 300
    assert LearnerConfig.model_validate({"sampling": {"max_new_tokens": 64}}).drawn_semantics().max_new_tokens == 64
