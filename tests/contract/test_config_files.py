"""The example configurations are valid and agree where all nodes must agree."""

import re
import tomllib
from pathlib import Path

import pytest

from heterorl.common.process.config_file import load
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_config import SamplerConfig

FILES = Path(__file__).parents[2] / "deploy" / "config"
SCHEMAS = {
    "coordinator": CoordinatorConfig,
    "learner": LearnerConfig,
    "learner-deepspeed": LearnerConfig,
    "relay": RelayConfig,
    "sampler": SamplerConfig,
    "sampler-vllm": SamplerConfig,
}


def test_every_file_is_checked():
    assert {path.stem for path in FILES.glob("*.toml")} == set(SCHEMAS)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_example_is_valid(name):
    load(SCHEMAS[name], FILES / f"{name}.toml")


def test_ports_of_nodes_that_a_machine_may_have_twice_are_their_own():
    # `deploy/install.sh sampler:site-1 sampler:site-2` copies one file twice; a port that is set does not move.
    set_ports = {name for name in SCHEMAS if "metrics_port" in tomllib.loads((FILES / f"{name}.toml").read_text())}

    # Prometheus looks for the coordinator's alone.
    assert set_ports == {"coordinator"}


def test_examples_agree_on_what_every_node_must_share():
    names = set(SCHEMAS) - {"coordinator", "relay"}
    first, *others = (tomllib.loads((FILES / f"{name}.toml").read_text()) for name in sorted(names))

    for other in others:
        for key in ("task", "sampling", "group_size", "model_dir", "coordinator"):
            assert other[key] == first[key]


@pytest.mark.parametrize(
    ("name", "section", "kind"), [("learner-deepspeed", "backend", "deepspeed"), ("sampler-vllm", "engine", "vllm")]
)
def test_file_of_an_engine_differs_from_the_plain_ones_by_the_engine(name, section, kind):
    plain, other = (tomllib.loads((FILES / f"{file}.toml").read_text()) for file in (name.partition("-")[0], name))

    assert other[section]["kind"] == kind
    changed = {key for key in plain.keys() | other.keys() if plain.get(key) != other.get(key)}
    assert changed == {section}


def test_sampler_file_shows_devices_in_the_place_of_device(tmp_path):
    text = (FILES / "sampler.toml").read_text(encoding="utf-8")
    line, devices = re.search(r"^device = .*(devices = \[.*\]).*$", text, re.MULTILINE).group(0, 1)
    (tmp_path / "sampler.toml").write_text(text.replace(line, devices), encoding="utf-8")

    assert load(SamplerConfig, tmp_path / "sampler.toml").engine.devices == (0, 1)
