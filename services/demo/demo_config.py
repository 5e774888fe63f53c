"""Settings of the demo: options, two regimes, configurations, certificates, output directory.

It deletes only files that an earlier demo wrote, by name, and refuses other directories. Certificates are new for each
demo and valid for a day.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from heterorl.certs.authority_directory import Authority
from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.identity.spiffe import Role
from heterorl.common.identity.tls import files_in
from heterorl.common.process.files import try_lock
from heterorl.learner.loss.loss_config import LossConfig

MAX_SEED = 2**31 - 1
DEVICES = ("cpu", "cuda")
_PACKAGES = ("jinja2", "matplotlib", "safetensors", "tomli_w", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of the command."""

    out: Path = Path("runs/demo")
    tiny: bool = False
    algorithm: str = "gepo"
    seed: int = 0
    cache: Path = Path(".cache/heterorl")
    device: str = "cpu"
    """Device of learner and samplers: cpu or cuda."""


def algorithms() -> tuple[str, ...]:
    """Names of the learner's losses, except `custom`, which needs a function."""
    members = get_args(get_args(LossConfig)[0])
    names = (get_args(member.model_fields["kind"].annotation)[0] for member in members)
    return tuple(name for name in names if name != "custom")


def check_options(options: DemoOptions) -> None:
    """Refuse options that would fail later.

    Raises ConfigError that names the option and its values, DependencyMissing for a package of the extra `demo`.
    """
    if options.algorithm not in algorithms():
        raise ConfigError("--algorithm", f"{options.algorithm!r} is not one of {', '.join(algorithms())}")
    if not 0 <= options.seed <= MAX_SEED:
        raise ConfigError("--seed", f"{options.seed} is not between 0 and {MAX_SEED}")
    if options.cache.exists() and not options.cache.is_dir():
        raise ConfigError(
            "--cache", f"{options.cache} is not a directory", action="name a directory, or leave the option out"
        )
    try:
        options.cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        action = "name a directory that this user can write"
        raise ConfigError("--cache", f"cannot create {options.cache}: {error.strerror}", action=action) from error
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise DependencyMissing(package, "demo")
    if options.device not in DEVICES:
        raise ConfigError("--device", f"{options.device!r} is not one of {', '.join(DEVICES)}")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device", "torch sees no CUDA device", action="remove it to use the CPU")


SITES = ("site-east", "site-west")
RUN_ID = "demo"
NODES = (("coordinator", "main"), ("learner", "learner"), *(("sampler", site) for site in SITES), ("operator", "demo"))
"""Role and site of every certificate; the operator's is for `heterorl top`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Sizes of a run whose learning rate makes staleness matter.

    At a hundredth of that rate all algorithms give equal results: old and new policy hardly differ.
    """

    digits: int
    warm_start_target: float
    warm_start_batch: int
    max_steps: int
    lag_versions: int
    max_staleness_versions: int
    groups_per_step: int
    learning_rate: float
    evaluate_every: int
    required_gain: float
    time_limit_s: float
    """Longest time without a step, for a slow machine."""
    group_size: int = 8
    num_evaluation: int = 256


FULL = Regime(
    digits=3,
    warm_start_target=0.25,
    warm_start_batch=256,
    max_steps=300,
    lag_versions=64,
    max_staleness_versions=80,
    groups_per_step=32,
    learning_rate=1e-3,
    evaluate_every=10,
    required_gain=0.20,
    time_limit_s=600.0,
)
TINY = Regime(
    digits=2,
    warm_start_target=0.2,
    warm_start_batch=128,
    max_steps=24,
    lag_versions=8,
    max_staleness_versions=16,
    groups_per_step=8,
    learning_rate=3e-4,
    evaluate_every=8,
    required_gain=-1.0,
    time_limit_s=300.0,
)


def certificates_dir(options: DemoOptions) -> Path:
    """Directory of the demo's own authority."""
    return options.out / "certs"


def tls_table(options: DemoOptions, *, role: str, site: str) -> dict[str, str]:
    """Section `tls` of a node."""
    return files_in(certificates_dir(options) / f"{role}-{site}")


def coordinator_tables(regime: Regime, options: DemoOptions) -> dict[str, Any]:
    """Configuration of the coordinator."""
    return {
        "run_id": RUN_ID,
        "data_dir": str(options.out / "coordinator"),
        "listen": "127.0.0.1:0",
        "tls": {
            **tls_table(options, role="coordinator", site="main"),
            "revoked": str(certificates_dir(options) / "revoked"),
        },
        "metrics_port": 0,
        "seed": options.seed,
        "groups_per_version": regime.groups_per_step,
        "max_staleness_versions": regime.max_staleness_versions,
    }


def learner_tables(regime: Regime, options: DemoOptions, *, address: str, model_dir: Path) -> dict[str, Any]:
    """Configuration of the learner."""
    return {
        "run_id": RUN_ID,
        "coordinator": address,
        "tls": tls_table(options, role="learner", site="learner"),
        "model_dir": str(model_dir),
        "state_dir": str(options.out / "learner"),
        "metrics_port": 0,
        "group_size": regime.group_size,
        "groups_per_step": regime.groups_per_step,
        "max_steps": regime.max_steps,
        "task": {"name": "arithmetic", "digits": regime.digits},
        "sampling": {"max_new_tokens": regime.digits + 2},
        "loss": {"kind": options.algorithm},
        "backend": {"lr": regime.learning_rate, "threads": 1, "device": options.device},
        "evaluation": {
            "every_versions": regime.evaluate_every,
            "num_prompts": regime.num_evaluation,
            "batch_rows": regime.num_evaluation,
            "temperature": 1.0,
            "seed": options.seed,
        },
    }


def sampler_tables(regime: Regime, options: DemoOptions, *, site: str, address: str, model_dir: Path) -> dict[str, Any]:
    """Configuration of one sampler, `lag_versions` behind."""
    return {
        "site": site,
        "coordinator": address,
        "tls": tls_table(options, role="sampler", site=site),
        "model_dir": str(model_dir),
        "state_dir": str(options.out / site),
        "metrics_port": 0,
        "group_size": regime.group_size,
        # The regime was measured with sites exactly lag_versions behind.
        "swap": "drain",
        "work_ahead_s": 0.0,
        "delay_seed": options.seed + SITES.index(site),
        "heartbeat_s": 0.5,
        "task": {"name": "arithmetic", "digits": regime.digits},
        "sampling": {"max_new_tokens": regime.digits + 2},
        "engine": {
            "kind": "hf",
            "threads": 1,
            "device": options.device,
            "batch_rows": regime.groups_per_step // 2 * regime.group_size,
        },
        "delay": {"kind": "fixed", "semantics": "transit", "unit": "versions", "value": regime.lag_versions},
    }


LIFETIME = datetime.timedelta(days=1)


def make_certificates(options: DemoOptions, *, now: datetime.datetime) -> None:
    """Write the certificates that the configurations name; `now` is an aware datetime.

    Raises ConfigError if the directory has an authority already, OSError if it cannot be written.
    """
    authority = Authority(certificates_dir(options))
    authority.init(run=RUN_ID, now=now, lifetime=LIFETIME)
    for role, site in NODES:
        authority.issue(role=Role(role), site=site, hosts=(), out=None, now=now, lifetime=LIFETIME)


MARKER = ".heterorl-demo"
OWN = (
    *("certs", "config", "logs", "coordinator", "learner", *SITES),
    *("model", "model.writing", "summary.json", "report.html"),
)
_NOTE = "Written by `heterorl demo`. Its next run with this --out replaces its own results here, and nothing else.\n"


@contextlib.contextmanager
def claim(out: Path) -> Iterator[Path]:
    """Create the directory, or delete an earlier demo's results in it.

    Raises ConfigError if the directory is not a demo's, is not writable, or another demo runs in it.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", f"{out} is not a directory", action="name a directory, or leave the option out")
    try:
        if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
            problem = f"{out} is not empty and was not written by the demo; nothing in it was touched"
            raise ConfigError("--out", problem, action="give a new or empty directory")
        out.mkdir(parents=True, exist_ok=True)
        file = (out / MARKER).open("a", encoding="ascii")
    except OSError as error:
        raise ConfigError(
            "--out", f"cannot write to {out}: {error.strerror}", action="name a directory that this user can write"
        ) from error
    with file:
        # Child processes do not inherit the lock.
        if not try_lock(file):
            raise ConfigError("--out", f"another demo is running in {out}", action="give another directory")
        if file.tell() == 0:
            file.write(_NOTE)
            file.flush()
        for name in OWN:
            _remove(out / name)
        yield out


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
