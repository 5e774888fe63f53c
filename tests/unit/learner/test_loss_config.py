"""The learning rule and backend as a person writes them."""

import pytest
from pydantic import TypeAdapter, ValidationError

from services.learner.backend_config import TorchBackendConfig
from services.learner.loss_config import GepoConfig, GrpoConfig, GspoConfig, LossConfig

ADAPTER = TypeAdapter(LossConfig)


@pytest.mark.parametrize(("kind", "schema"), [("gepo", GepoConfig), ("gspo", GspoConfig), ("grpo", GrpoConfig)])
def test_kind_selects_the_loss(kind, schema):
    loss = ADAPTER.validate_python({"kind": kind})

    assert type(loss) is schema
    assert (loss.eps_low, loss.eps_high, loss.kl_coefficient) == (0.2, 0.2, 0.005)


def test_gepo_defaults_are_those_of_the_reference_implementation():
    loss = GepoConfig()

    assert (loss.denominator, loss.advantage, loss.aggregation) == ("contraharmonic", "mean", "sequence_mean")


@pytest.mark.parametrize(
    "table",
    [{"kind": "ppo"}, {"kind": "gspo", "denominator": "geometric"}, {"kind": "gepo", "eps_low": -0.1}, {}],
)
def test_wrong_loss_is_refused(table):
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(table)


@pytest.mark.parametrize("table", [{"device": "tpu"}, {"lr": 0}, {"betas": (0.9, 1.0)}, {"micro_batch_tokens": 0}])
def test_wrong_backend_is_refused(table):
    with pytest.raises(ValidationError):
        TorchBackendConfig.model_validate(table)
