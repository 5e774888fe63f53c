"""Options of `heterorl demo`, all of them checked before anything is written, trained or started."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.learner.loss.config import LossConfig

MAX_SEED = 2**31 - 1
DEVICES = ("cpu", "cuda")
_PACKAGES = ("jinja2", "matplotlib", "safetensors", "tomli_w", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What a person may choose.

    Example:
        DemoOptions(out=Path("runs/demo"), algorithm="gepo", seed=0)
    """

    out: Path = Path("runs/demo")
    tiny: bool = False
    algorithm: str = "gepo"
    seed: int = 0
    cache: Path = Path(".cache/heterorl")
    device: str = "cpu"
    """Where the learner and the samplers compute: cpu or cuda."""


def algorithms() -> tuple[str, ...]:
    """Names of the learner's losses, from its own configuration; not `custom`, which needs a function."""
    members = get_args(get_args(LossConfig)[0])
    names = (get_args(member.model_fields["kind"].annotation)[0] for member in members)
    return tuple(name for name in names if name != "custom")


def check_options(options: DemoOptions) -> None:
    """Refuse what would fail later.

    Raises:
        ConfigError: an option has an impossible value; names the option and what it may be.
        DependencyMissing: a package of the extra `demo` is not installed.
    """
    if options.algorithm not in algorithms():
        raise ConfigError("--algorithm", f"{options.algorithm!r} is not one of {', '.join(algorithms())}")
    if not 0 <= options.seed <= MAX_SEED:
        raise ConfigError("--seed", f"{options.seed} is not between 0 and {MAX_SEED}")
    if options.cache.exists() and not options.cache.is_dir():
        raise ConfigError("--cache", f"{options.cache} is not a directory")
    try:
        options.cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--cache", f"cannot create {options.cache}: {error.strerror}") from error
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise DependencyMissing(package, "demo")
    if options.device not in DEVICES:
        raise ConfigError("--device", f"{options.device!r} is not one of {', '.join(DEVICES)}")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device", "torch sees no CUDA device", action="leave it out to use the CPU")
