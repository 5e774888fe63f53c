"""What a sampler's configuration says of the loop."""

import pytest

from heterorl.common.process.config_file import InvalidConfig, load
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.sampler_config import SamplerConfig


def test_weights_are_swapped_in_flight_unless_draws_are_named_by_one_version():
    assert SamplerConfig().swap == "in_flight"
    assert load(SamplerConfig, None, ["seeded_sampling=true"]).swap == "drain"
    with pytest.raises(InvalidConfig, match="seeded_sampling needs swap"):
        load(SamplerConfig, None, ["seeded_sampling=true", "swap=in_flight"])


@pytest.mark.parametrize(
    ("config", "key"),
    [(SamplerConfig, 'variant="int8"'), (LearnerConfig, 'variants=["int8"]')],
    ids=["sampler", "learner"],
)
def test_adapters_have_no_variants(config, key):
    adapters = ["lora.rank=2", 'lora.target_modules=["q_proj"]']

    load(config, None, [key])
    load(config, None, adapters)
    with pytest.raises(InvalidConfig, match="with lora: adapters are small and published as they are"):
        load(config, None, [key, *adapters])
