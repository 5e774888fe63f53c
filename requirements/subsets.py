"""Write the exact versions that each service needs: the closure of its dependencies, taken from a lock.

An image or a site's environment then holds what its service imports and nothing else; the coordinator's holds no torch.
What is declared is followed through the packages that are installed, so each file is made in the environment of its
lock: `subsets.py` in that of lock.txt, `subsets.py engines` in that of engines.txt.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Set as AbstractSet
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DIRECTORY = Path(__file__).parent
UNPINNED = {"pip", "setuptools", "wheel"}
"""What every new environment brings itself, unless a lock says which; 'pip freeze' leaves these out of ours."""
EXTRAS = {"coordinator": ("postgres", "s3"), "learner": ("learner", "data"), "sampler": ("sampler", "data")}
"""Extras of pyproject.toml that a service is installed with."""
ENGINES = ("learner-deepspeed", "sampler-vllm-cpu")
"""Files that are made where the engines are installed."""
CUDA_ALONE = {"torchaudio", "torchcodec", "torchvision"}
"""What vLLM declares, text models never load, and no index has for the CPU (see engines.txt)."""
VLLM_CPU = "vllm-cpu"
"""The distribution of vLLM for the CPU, which stands for vllm."""


def pins(lock: str) -> dict[str, str]:
    """Map canonical package names to the lock's own lines."""
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(Requirement(line).name): line for line in lines}


def closure(declared: list[str], locked: dict[str, str], *, without: AbstractSet[str] = frozenset()) -> set[str]:
    """Canonical names of everything that the declared requirements need in this environment.

    Args:
        declared: requirements.
        locked: the pins, by canonical name.
        without: names that are left out, with what they alone need.

    Raises:
        KeyError: something is needed that the lock does not pin.
    """
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in declared]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in without or (name in UNPINNED and name not in locked):
            continue
        if name not in locked:
            raise KeyError(f"{name} is needed and lock.txt does not pin it: run 'make lock'")
        for wanted in {"", *requirement.extras} - {known for package, known in found if package == name}:
            found.add((name, wanted))
            waiting += [(Requirement(text), wanted) for text in _requires(name)]
    return {name for name, _ in found}


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError as error:
        raise KeyError(f"{name} is not installed here: set up the environment first") from error


def declared(*extras: str) -> list[str]:
    """What pyproject.toml declares, with some extras and the extras that these name."""
    project = tomllib.loads((DIRECTORY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, waiting = list(project["dependencies"]), list(extras)
    while waiting:
        for text in project["optional-dependencies"][waiting.pop()]:
            requirement = Requirement(text)
            if canonicalize_name(requirement.name) == project["name"]:
                waiting += requirement.extras
            else:
                found.append(text)
    return found


def locked(name: str) -> dict[str, str]:
    """The pins of a file of this directory."""
    return pins((DIRECTORY / f"{name}.txt").read_text(encoding="utf-8"))


def subset(service: str) -> str:
    """The text of one service's file."""
    lock = locked("lock")
    lines = [lock[name] for name in sorted(closure(declared(*EXTRAS[service]), lock))]
    return "\n".join([f"# What a {service} needs, from lock.txt; made by 'make subsets'.", *lines, ""])


def engine_subset(service: str) -> str:
    """The text of the file of a service with another engine.

    DeepSpeed comes beside exactly what a learner has. vLLM holds transformers and numpy back, so that its sampler has
    an environment of its own.
    """
    engines = locked("engines")
    if service == "learner-deepspeed":
        own = locked("learner")
        # What the lock knows has its version there; the engines' environment has others where vLLM holds them back.
        known = engines | locked("lock")
        for name in closure(["deepspeed"], engines):
            own.setdefault(name, known[name])
        head = (
            "# What a learner with backend deepspeed needs: learner.txt, the rest from engines.txt; by 'make subsets'."
        )
    else:
        wanted = [text for text in declared("vllm", "data") if Requirement(text).name != "vllm"]
        names = closure([*wanted, VLLM_CPU], engines, without=CUDA_ALONE)
        own = {name: engines[name] for name in names}
        head = (
            "# What a sampler with engine vllm needs on a CPU, from engines.txt; by 'make subsets'. For pip --no-deps."
        )
    return "\n".join([head, *(own[name] for name in sorted(own)), ""])


def main() -> None:
    """Write every file of this environment's lock."""
    texts = {name: engine_subset(name) for name in ENGINES} if sys.argv[1:] == ["engines"] else {
        name: subset(name) for name in EXTRAS
    }  # fmt: skip
    for name, text in texts.items():
        (DIRECTORY / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
