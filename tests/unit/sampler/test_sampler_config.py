"""What a sampler's configuration says of the loop."""

import pytest

from heterorl.common.process.config_file import InvalidConfig, load
from heterorl.sampler.sampler_config import SamplerConfig


def test_weights_are_swapped_in_flight_unless_draws_are_named_by_one_version():
    assert SamplerConfig().swap == "in_flight"
    assert load(SamplerConfig, None, ["seeded_sampling=true"]).swap == "drain"
    with pytest.raises(InvalidConfig, match="seeded_sampling needs swap"):
        load(SamplerConfig, None, ["seeded_sampling=true", "swap=in_flight"])
