"""Write the exact versions that each service needs: the closure of its dependencies, taken from lock.txt.

An image or a site's environment then holds what its service imports and nothing else; the coordinator's holds no torch.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DIRECTORY = Path(__file__).parent
UNPINNED = {"pip", "setuptools", "wheel"}
"""What every new environment brings itself; 'pip freeze' leaves these out of the lock."""
EXTRAS = {"coordinator": (), "learner": ("learner",), "sampler": ("sampler",)}
"""Extras of pyproject.toml that a service is installed with."""


def pins(lock: str) -> dict[str, str]:
    """Map canonical package names to the lock's own lines."""
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(Requirement(line).name): line for line in lines}


def closure(declared: list[str], locked: dict[str, str]) -> set[str]:
    """Canonical names of everything that the declared requirements need in this environment.

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
        if name in UNPINNED:
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


def subset(service: str) -> str:
    """The text of one service's file."""
    project = tomllib.loads((DIRECTORY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = list(project["dependencies"])
    waiting = list(EXTRAS[service])
    while waiting:
        for text in project["optional-dependencies"][waiting.pop()]:
            requirement = Requirement(text)
            if canonicalize_name(requirement.name) == project["name"]:
                waiting += requirement.extras
            else:
                declared.append(text)
    locked = pins((DIRECTORY / "lock.txt").read_text(encoding="utf-8"))
    lines = [locked[name] for name in sorted(closure(declared, locked))]
    return "\n".join([f"# What a {service} needs, from lock.txt; made by 'make subsets'.", *lines, ""])


def main() -> None:
    """Write every file."""
    for service in EXTRAS:
        (DIRECTORY / f"{service}.txt").write_text(subset(service), encoding="utf-8")


if __name__ == "__main__":
    main()
