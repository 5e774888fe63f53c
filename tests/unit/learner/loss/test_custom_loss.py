"""A loss of the user's own: how it is found, what is refused before a run, and the step that it makes."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import ConfigError
from heterorl.common.process.config_file import load
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss.loss_config import CustomLossConfig, GspoConfig
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.step_metrics import PassCount
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.custom_loss_check import check_custom_loss
from tests.support.losses import GOLDEN_LEARNER, GOLDEN_REWARDS, GOLDEN_SAMPLER, OWN_LOSS, groups_of, run_loss
from tests.support.training import SAMPLING, is_identical, random_groups, tiny_model, weights

PAGE = Path(__file__).parents[4] / "docs" / "own-losses.md"
GSPO = CustomLossConfig(function="gspo:loss", directory=str(OWN_LOSS))


def _own(name, **changes):
    return CustomLossConfig(function=f"tests.support.custom_losses:{name}", **changes)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _trained(model_dir, loss, **backend):
    config = TorchBackendConfig(lr=1e-3, **backend)
    trained = TorchBackend(model_dir=model_dir, config=config, loss=loss, sampling=SAMPLING)
    reports = [
        trained.train_step(random_groups(seed=step, version=step), head_version=step + 1, step=step) for step in (1, 2)
    ]
    return trained, [dataclasses.replace(report, step_s=0.0) for report in reports]


def test_a_rollout_that_drifted_out_gives_no_gradient_where_its_derivative_is_infinite(model_dir):
    """e^800 times 0 within the function."""
    loss = _own("by_inverse_ratio", drift_limit=20.0)
    backend = TorchBackend(model_dir=model_dir, config=TorchBackendConfig(lr=1e-3), loss=loss, sampling=SAMPLING)
    groups = random_groups(seed=1, version=1)
    first = groups[0].group
    first.rollouts[0].sampler_logprobs[0] = 800.0
    rewards = [0.0] + [1.0] * (len(first.rollouts) - 1)
    rollouts = tuple(dataclasses.replace(one, reward=each) for one, each in zip(first.rollouts, rewards, strict=True))
    groups[0] = dataclasses.replace(groups[0], group=dataclasses.replace(first, rollouts=rollouts))
    report = backend.train_step(groups, head_version=2, step=1)

    assert report.is_applied
    assert math.isfinite(report.grad_norm)
    assert report.grad_norm > 0


@pytest.mark.parametrize("backend", [{"micro_batch_tokens": 4096}, {"micro_batch_tokens": 48},
                                     {"micro_batch_tokens": 48, "batching": "packed"}])  # fmt: skip
def test_the_example_takes_the_steps_of_the_built_in_gspo_to_the_last_bit(model_dir, backend):
    built_in, expected = _trained(model_dir, GspoConfig(), **backend)
    own, reports = _trained(model_dir, GSPO, **backend)

    assert reports == expected
    assert reports[0].clip_fraction > 0
    assert is_identical(weights(own.torch_model), weights(built_in.torch_model))
    for part in dataclasses.fields(own.last_sequences):
        assert torch.equal(getattr(own.last_sequences, part.name), getattr(built_in.last_sequences, part.name))
    assert own.last_metrics.keys() == {"weight", "good"}
    assert built_in.last_metrics == {}


def test_the_loss_of_the_page_takes_the_steps_of_the_built_in_gspo_to_the_last_bit(model_dir, tmp_path):
    blocks = dict(re.findall(r"^```(toml|python)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    table = blocks["toml"].replace("gspo:loss", "gspo_of_the_page:loss")
    (tmp_path / "learner.toml").write_text(table)
    (tmp_path / "gspo_of_the_page.py").write_text(blocks["python"])
    loss = load(LearnerConfig, tmp_path / "learner.toml").loss
    check_custom_loss(loss)

    built_in, expected = _trained(model_dir, GspoConfig(eps_low=0.2, eps_high=0.28))
    own, reports = _trained(model_dir, loss)

    assert [(report.loss, report.grad_norm) for report in reports] == [
        (report.loss, report.grad_norm) for report in expected
    ]
    assert expected[0].clip_fraction > 0
    assert is_identical(weights(own.torch_model), weights(built_in.torch_model))


def test_the_example_has_the_gradient_of_the_built_in_gspo_to_the_last_bit():
    outcomes = [
        run_loss(config, GOLDEN_LEARNER, groups_of([GOLDEN_SAMPLER], [GOLDEN_REWARDS]))
        for config in (GSPO, GspoConfig())
    ]

    assert (
        outcomes[0].value == outcomes[1].value == pytest.approx(-0.069811727384304 / 0.5 * 0.8658754297607, abs=1e-12)
    )
    for one, other in zip(outcomes[0].gradients, outcomes[1].gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", [{"micro_batch_tokens": 48}, {"micro_batch_tokens": 48, "batching": "packed"}])
def test_a_loss_of_the_whole_step_is_the_same_in_one_pass_and_in_many(model_dir, backend):
    _, expected = _trained(model_dir, _own("normalised"), micro_batch_tokens=4096)
    own, reports = _trained(model_dir, _own("normalised"), **backend)

    for one, other in zip(reports, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    # The first pass saw the very rollouts of the second, and ages are counted from the learner's version.
    assert own.last_metrics["row_gap"] == pytest.approx(0.0, abs=1e-6)
    assert own.last_metrics["age"] == 1.0


@pytest.mark.parametrize("loss", [GSPO, _own("normalised"), _own("over_the_sampler"), GspoConfig()])
def test_a_sound_loss_passes_the_trial(loss):
    check_custom_loss(loss)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("of_the_pass", {}, "other losses when 12 rollouts are computed in three passes"),
        ("metric_of_the_pass", {}, "other metric least when"),
        ("in_place", {}, "changes sampler_BT in place"),
        ("raising", {}, r"raised LookupError: no such rollout \(.*custom_losses.py, line \d+\)"),
        ("returning", {"what": "a tensor"}, r"returned a Tensor, not LossOutput"),
        ("returning", {"what": "a scalar"}, r"losses of shape \[\], not \[12\] or \[12, 6\]"),
        ("returning", {"what": "constants"}, "no gradient by batch.learner_BT"),
        ("returning", {"what": "nan"}, "a loss of nan or a gradient that is not finite"),
        ("returning", {"what": "a steep root"}, "a gradient that is not finite"),
        ("returning", {"what": "metrics without names"}, "returned metrics as a list: give tensors by name"),
        ("returning", {"what": "a number as metric"}, "returned metric drift as a float"),
        ("returning", {"what": "a metric of one number"}, r"metric drift of shape \[\]"),
        ("returning", {"what": "a nan metric"}, "a metric drift that is not finite"),
        ("returning", {"what": "a name with a space"}, "a metric named 'my drift'"),
        ("returning", {"what": "many metrics"}, "17 metrics, 16 are allowed"),
        ("returning", {"what": "wrong weights"}, r"weights of shape \[12, 1\]"),
        ("returning", {"what": "clips as numbers"}, "is_clipped that is not a tensor of bool"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(name, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_custom_loss(_own(name, options=options))

    assert caught.value.key == "loss.function"
    assert caught.value.action


@pytest.mark.parametrize(
    ("function", "options", "key", "words"),
    [
        ("gspo", {}, "loss.function", "'gspo' is not package.module:function"),
        (
            "no_such_module:loss",
            {},
            "loss.function",
            "there is no module no_such_module in .*next to the configuration",
        ),
        ("gspo:lost", {}, "loss.function", "has no function lost; did you mean loss"),
        ("gspo:loss", {"eps": 0.1}, "loss.options", "unexpected keyword argument 'eps'; its parameters are eps_low"),
        ("gspo:loss", {"batch": 1}, "loss.options", "batch is given by the learner"),
    ],
)
def test_a_function_that_cannot_be_had_is_an_error_of_its_key(function, options, key, words):
    with pytest.raises(ConfigError, match=words) as caught:
        loss_spec_of(CustomLossConfig(function=function, directory=str(OWN_LOSS), options=options))

    assert caught.value.key == key


def test_a_module_that_does_not_import_names_its_line(tmp_path):
    (tmp_path / "own_loss_broken.py").write_text("import torch\n\nEPS = 1 / 0\n")

    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(.*own_loss_broken.py, line 3\)"):
        loss_spec_of(CustomLossConfig(function="own_loss_broken:loss", directory=str(tmp_path)))


def test_an_error_in_the_run_names_the_users_line(model_dir):
    loss = _own("raising", options={"when_rows": 12})
    check_custom_loss(loss)

    with pytest.raises(ConfigError, match=r"raised LookupError: no such rollout \(.*custom_losses.py, line \d+\)"):
        _trained(model_dir, loss, micro_batch_tokens=4096)


def test_a_step_that_fails_after_a_pass_leaves_no_gradient_for_the_next_one(model_dir):
    loss, config = _own("raising_on_age", options={"age": 7}), TorchBackendConfig(lr=1e-3, micro_batch_tokens=64)
    passes = PassCount()
    clean, failed = (
        TorchBackend(model_dir=model_dir, config=config, loss=loss, sampling=SAMPLING, passes=passes) for _ in range(2)
    )

    with pytest.raises(ConfigError, match="no such rollout"):
        failed.train_step([*random_groups(3), *random_groups(1, max_tokens=1, version=-6)], head_version=1, step=1)
    assert passes.counts[0] > 0, "a pass has left its gradient"
    for backend in (clean, failed):
        backend.train_step(random_groups(seed=2), head_version=1, step=1)

    assert is_identical(weights(failed.torch_model), weights(clean.torch_model))


def test_a_loss_that_is_not_finite_leaves_everything_as_it_was(model_dir):
    before = weights(_trained(model_dir, _own("returning", options={"what": "constants"}))[0].torch_model)
    own, reports = _trained(model_dir, _own("returning", options={"what": "nan"}))

    assert [report.is_applied for report in reports] == [False, False]
    # Constants leave the KL penalty, which moves weights.
    assert not is_identical(weights(own.torch_model), before)


def test_options_are_part_of_what_a_rule_is():
    first, same, other = (
        loss_spec_of(CustomLossConfig(function="gspo:loss", directory=str(OWN_LOSS), options={"eps_high": eps}))
        for eps in (0.2, 0.2, 0.3)
    )

    assert first == same
    assert first != other
    assert first.custom is not None
    assert not first.needs_first_pass
    assert loss_spec_of(_own("normalised")).needs_first_pass
    assert loss_spec_of(_own("normalised", reads_reference=True)).needs_reference


def test_a_selection_of_tokens_goes_into_the_function():
    with pytest.raises(ValidationError, match="m2_budget with kind custom"):
        _own("normalised", m2_budget=0.04)


def test_the_directory_is_the_configuration_files(tmp_path):
    (tmp_path / "learner.toml").write_text('[loss]\nkind = "custom"\nfunction = "mine:loss"\ndirectory = "losses"\n')

    config = load(LearnerConfig, tmp_path / "learner.toml")

    assert config.loss.directory == str(tmp_path / "losses")
    # Other ranks are given it so.
    assert LearnerConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_check_config_tries_the_loss(tmp_path):
    path = tmp_path / "learner.toml"
    path.write_text('[loss]\nkind = "custom"\nfunction = "own_loss_wrong:loss"\n')
    (tmp_path / "own_loss_wrong.py").write_text("def loss(batch):\n    return batch.learner_BT.sum()\n")

    result = CliRunner().invoke(app, ["check-config", "learner", "--config", str(path), "--set", "tls.insecure=true"])

    assert "loss.function: own_loss_wrong:loss returned a Tensor, not LossOutput" in str(result.exception)
