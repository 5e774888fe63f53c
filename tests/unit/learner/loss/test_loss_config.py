"""The learning rule and backend as a person writes them."""

import pytest
from pydantic import TypeAdapter, ValidationError

from heterorl.learner.loss.loss_config import GepoConfig, LossConfig
from heterorl.learner.loss.loss_spec import ALGORITHMS, caveats, loss_spec_of, open_share
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.losses import CATALOGUE

ADAPTER = TypeAdapter(LossConfig)


KINDS = ALGORITHMS.keys()


def test_catalogue_of_the_tests_has_every_algorithm():
    kinds = {config.kind for config in CATALOGUE.values()}

    assert kinds == KINDS | {"custom"}, "add the kind to CATALOGUE in tests/support/losses.py"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_kind_alone_selects_a_loss_with_its_rule(kind):
    loss = ADAPTER.validate_python({"kind": kind})

    assert loss.kind == kind
    assert loss.sampler_kl == 0.005
    assert loss_spec_of(loss).sampler_kl == 0.005


@pytest.mark.parametrize("kind", ["gepo", "gspo", "grpo"])
def test_clip_range_is_the_reference_implementation_s(kind):
    loss = ADAPTER.validate_python({"kind": kind})

    assert (loss.eps_low, loss.eps_high) == (0.2, 0.2)
    assert (loss_spec_of(loss).low, loss_spec_of(loss).high) == (0.8, 1.2)


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"kind": "gspo", "clip_on": "gepo"}, {"denominator": "own", "clip_on": "gepo"}),
        ({"kind": "gepo", "clip_on": "gspo"}, {"denominator": "contraharmonic", "clip_on": "gspo"}),
        ({"kind": "gepo", "denominator": "arithmetic"}, {"denominator": "arithmetic"}),
        ({"kind": "gepo", "denominator": "geometric"}, {"denominator": "geometric"}),
        ({"kind": "gepo", "step_size": "ess"}, {"step_size": "ess", "has_group_denominator": True}),
        ({"kind": "gepo", "opsm_threshold": 0.5}, {"opsm_threshold": 0.5}),
        ({"kind": "gepo", "m2_budget": 0.04}, {"m2_budget": 0.04, "needs_first_pass": True}),
        ({"kind": "gepo", "positive_weight": "one"}, {"positive_weight": "one", "level": "sequence"}),
        ({"kind": "mis", "level": "geometric"}, {"level": "sequence", "normalisation": "length", "high": 3.0}),
        ({"kind": "gepo_1s"}, {"low": 0.8, "high": 101.0, "denominator": "contraharmonic", "negative_weight": "own"}),
        ({"kind": "gepo_product"}, {"high": 101.0, "negative_weight": "product", "needs_first_pass": False}),
        ({"kind": "gepo_whole"}, {"low": 0.8, "high": 101.0, "drift_limit": 1.1}),
        ({"kind": "ds_gspo"}, {"defensive_fraction": 0.005, "denominator": "own"}),
        ({"kind": "gspo", "negative_weight": "product"}, {"negative_weight": "product", "denominator": "own"}),
        ({"kind": "gepo", "denominator": "leave_one_out"}, {"denominator": "leave_one_out"}),
        ({"kind": "grpo", "dual_clip": 3.0}, {"dual_clip": 3.0, "high": 1.2}),
        ({"kind": "impala", "rho_cap": 2.0}, {"high": 2.0, "trace_cap": 1.0, "is_score": True}),
        ({"kind": "grpo", "reference_kl": 0.04}, {"reference_kl": 0.04, "needs_reference": True}),
        ({"kind": "mois"}, {"mixture_age": 8.0, "mixture_slope": 1.0, "needs_staleness": True}),
        ({"kind": "dapo"}, {"low": 0.8, "high": 1.28, "aggregation": "token_mean", "drop_uniform_groups": False}),
    ],
)
def test_combinations_are_expressible(table, parts):
    spec = loss_spec_of(ADAPTER.validate_python(table))

    assert {name: getattr(spec, name) for name in parts} == parts


def test_reproduction_choices_are_pointed_out():
    assert caveats(loss_spec_of(GepoConfig()), max_new_tokens=99) == ()
    assert "shortest" in caveats(loss_spec_of(GepoConfig(normalisation="raw")), max_new_tokens=5)[0]
    assert "micro_batch_tokens" in caveats(loss_spec_of(GepoConfig(scope="microbatch")), max_new_tokens=5)[0]


@pytest.mark.parametrize(
    ("table", "tokens", "kl_token", "share"),
    [
        # Phi((1.1 - T d) / sqrt(2 T d)) and 2 Phi(-sqrt(2 T d) / 2), by hand.
        ({"kind": "gepo_whole"}, 5, 0.05, 0.8853),
        ({"kind": "gepo_whole"}, 1_000, 0.0011, 0.5),
        ({"kind": "gepo_whole"}, 4_000, 0.0011, 0.1329),
        ({"kind": "topr"}, 1_000, 0.0011, 0.4583),
        ({"kind": "gepo_product"}, 1_000, 0.0011, 0.4583),
        ({"kind": "tis", "level": "sequence"}, 1_000, 0.0011, 0.4583),
        ({"kind": "tis", "level": "token"}, 30_000, 0.0011, 1.0),
        ({"kind": "gspo"}, 30_000, 0.0011, 1.0),
        ({"kind": "gepo_1s"}, 30_000, 0.0011, 1.0),
    ],
)
def test_gates_on_whole_completions_close_with_length(table, tokens, kl_token, share):
    rule = loss_spec_of(ADAPTER.validate_python(table))

    assert open_share(rule, max_new_tokens=tokens, kl_token=kl_token) == pytest.approx(share, abs=1e-4)


def test_start_warns_where_a_gate_on_whole_completions_meets_long_ones():
    rule = loss_spec_of(ADAPTER.validate_python({"kind": "gepo_whole"}))

    assert caveats(rule, max_new_tokens=300) == ()
    (said,) = caveats(rule, max_new_tokens=4_000)
    assert "4000 tokens" in said
    assert "15% of the rollouts" in said


@pytest.mark.parametrize(
    ("table", "tokens", "is_said"),
    [
        ({"kind": "gepo"}, 100, True),
        ({"kind": "gepo_1s"}, 301, True),
        ({"kind": "gspo"}, 301, True),
        ({"kind": "gepo_1s"}, 99, False),
        ({"kind": "gepo_1s", "drift_limit": 1.7}, 301, False),
        ({"kind": "gspo", "opsm_threshold": 0.01}, 301, False),
        ({"kind": "gepo_product"}, 301, False),
        ({"kind": "topr"}, 301, False),
        ({"kind": "grpo"}, 301, False),
    ],
)
def test_start_warns_where_a_mean_over_a_long_completion_has_no_limit(table, tokens, is_said):
    said = caveats(loss_spec_of(ADAPTER.validate_python(table)), max_new_tokens=tokens)

    assert ["mean over its tokens" in note for note in said] == [True] * is_said


def test_unknown_key_is_refused_with_its_path():
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python({"kind": "cispo", "clip_on": "gepo"})

    assert caught.value.errors()[0]["loc"] == ("cispo", "clip_on")


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"kind": "grpo", "length_power": 0.5}, "length_power"),
        ({"kind": "gepo", "clip": "none", "eps_low": 0.1}, "eps_low"),
        ({"kind": "gspo", "positive_weight": "one", "eps_high": 0.1}, "eps_high"),
        ({"kind": "gepo_product", "eps_low": 0.1}, "eps_low"),
        ({"kind": "gspo", "positive_weight": "one", "negative_weight": "product", "clip_on": "gepo"}, "clip_on"),
        ({"kind": "gspo", "negative_weight": "one", "dual_clip": 3.0}, "dual_clip"),
    ],
)
def test_a_key_that_the_loss_does_not_read_is_refused(table, key):
    with pytest.raises(ValidationError, match=f"{key} has no effect without"):
        ADAPTER.validate_python(table)
    assert ADAPTER.validate_python({**table, key: getattr(ADAPTER.validate_python({"kind": table["kind"]}), key)})


def test_gepo_defaults_are_those_of_the_reference_implementation():
    loss = GepoConfig()

    assert (loss.denominator, loss.advantage, loss.aggregation) == ("contraharmonic", "mean", "sequence_mean")


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "ppo"},
        {"kind": "gspo", "denominator": "geometric"},
        {"kind": "gepo", "eps_low": -0.1},
        {},
        {"kind": "eqp", "m2_budget": 0.04},
        {"kind": "mis", "floor": 3.0},
        {"kind": "gpo"},
        {"kind": "grpo", "dual_clip": 0.5},
        {"kind": "cispo", "dual_clip": 3.0},
        {"kind": "vcpo"},
        {"kind": "custom"},
    ],
)
def test_wrong_loss_is_refused(table):
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(table)


@pytest.mark.parametrize("table", [{"device": "tpu"}, {"lr": 0}, {"betas": (0.9, 1.0)}, {"micro_batch_tokens": 0}])
def test_wrong_backend_is_refused(table):
    with pytest.raises(ValidationError):
        TorchBackendConfig.model_validate(table)
