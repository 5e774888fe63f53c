"""A run.toml of several hosts, and what the launchers make of it."""

from __future__ import annotations

import tomllib
from typing import Any

from heterorl.common.process.config_file import Config
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.launch.run_file import RunFile
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_config import SamplerConfig

SCHEMAS: dict[str, type[Config]] = {
    "coordinator": CoordinatorConfig, "learner": LearnerConfig, "relay": RelayConfig, "sampler": SamplerConfig,
}  # fmt: skip
RUN = """
[run]
id = "my-run"
model_dir = "/models/start"
data_dirs = ["/data"]
group_size = 4
groups_per_step = 16
steps_per_version = 2
task = {name = "jsonl:/data/train.jsonl", match = "math_verify"}
sampling = {max_new_tokens = 512}
loss = {kind = "gepo"}

[coordinator]
host = "coord.example"
config = {max_staleness_versions = 32}

[learner]
host = "gpu.example"
nproc = 2
backend = {kind = "fsdp2", device = "cuda", lr = 1e-6}

[[relays]]
site = "eu"
host = "eu.example"

[[samplers]]
site = "eu"
host = "eu.example"
count = 2
devices = [0, 1, 2, 3]
relay = "eu"
engine = {kind = "vllm"}

[[samplers]]
site = "us"
host = "us.example"
engine = {threads = 2}
"""
NODES = ["coordinator", "relay-eu", "learner", "sampler-eu-1", "sampler-eu-2", "sampler-us"]


def run_table() -> dict[str, Any]:
    """The example as a table of its own, to be changed."""
    return tomllib.loads(RUN)


def run_file(**changes: Any) -> RunFile:
    """The example with other sections."""
    return RunFile.model_validate({**run_table(), **changes})
