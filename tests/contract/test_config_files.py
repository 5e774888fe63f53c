"""The example configurations are valid and agree where all nodes must agree."""

import tomllib
from pathlib import Path

import pytest

from heterorl.common.process.config import load
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.learner.config import LearnerConfig
from heterorl.sampler.config import SamplerConfig

FILES = Path(__file__).parents[2] / "deploy" / "config"
SCHEMAS = {"coordinator": CoordinatorConfig, "learner": LearnerConfig, "sampler": SamplerConfig}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_example_is_valid(name):
    load(SCHEMAS[name], FILES / f"{name}.toml")


def test_examples_agree_on_what_every_node_must_share():
    learner, sampler = (tomllib.loads((FILES / f"{name}.toml").read_text()) for name in ("learner", "sampler"))

    for key in ("task", "sampling", "group_size", "model_dir", "coordinator"):
        assert learner[key] == sampler[key]
