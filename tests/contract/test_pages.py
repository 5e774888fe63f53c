"""TOML in pages is a part of a configuration that a service accepts."""

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_config import SamplerConfig

ROOT = Path(__file__).parents[2]
SCHEMAS = (CoordinatorConfig, LearnerConfig, SamplerConfig, RelayConfig)
NOT_OF_ONE_SERVICE = {"docs/launch.md", "docs/untrusted.md", "docs/variants.md"}
"""Pages with the file of a whole run, or with keys of two services in one block."""
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "docs/*.md", "deploy/*.md", "examples/**/README.md")
    for path in sorted(ROOT.glob(pattern))
    if "```toml" in path.read_text(encoding="utf-8") and path.relative_to(ROOT).as_posix() not in NOT_OF_ONE_SERVICE
]


def _refusals(schema, values):
    """Keys that a service lacks, and wrong values; not the keys that a part of a file leaves out."""
    try:
        schema.model_validate(values)
    except ValidationError as error:
        return [(one["loc"], one["msg"]) for one in error.errors() if one["type"] != "missing"]
    return []


def _refused(text):
    """Blocks of TOML that every service refuses, each with the shortest list of refusals."""
    blocks = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    blocks += [tomllib.loads(f"loss = {one}") for one in re.findall(r"`(\{kind = .*?\})`", text)]
    found = [min((_refusals(schema, block) for schema in SCHEMAS), key=len) for block in blocks]
    return [one for one in found if one]


@pytest.mark.parametrize("name", PAGES)
def test_toml_of_a_page_is_a_part_of_a_configuration(name):
    assert _refused((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", ["```toml\n[difficulty]\noutside = 1\n```", '`{kind = "gspo", clip_on = "topr"}`'])
def test_toml_that_no_service_accepts_is_found(text):
    assert len(_refused(text)) == 1
