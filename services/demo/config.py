"""What the demonstration runs: two regimes, and the configuration of each process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterorl.demo.options import DemoOptions

SITES = ("site-east", "site-west")
RUN_ID = "demo"
NODES = (
    ("coordinator", "main"),
    ("learner", "learner"),
    *(("sampler", site) for site in SITES),
    ("operator", "demo"),
)
"""Role and site of every certificate; the operator's is the live view's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Where staleness matters: a learning rate at which 64 versions are far away.

    At a hundredth of it all algorithms are equal, because old and new policy hardly differ.
    """

    digits: int
    warm_start_target: float
    warm_start_batch: int
    max_steps: int
    lag_versions: int
    max_staleness_versions: int
    groups_per_step: int
    group_size: int
    learning_rate: float
    evaluate_every: int
    num_evaluation: int
    required_gain: float
    time_limit_s: float
    """Longest time without a step, of a machine that is slow or busy."""


FULL = Regime(
    digits=3,
    warm_start_target=0.25,
    warm_start_batch=256,
    max_steps=300,
    lag_versions=64,
    max_staleness_versions=80,
    groups_per_step=32,
    group_size=8,
    learning_rate=1e-3,
    evaluate_every=10,
    num_evaluation=256,
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
    group_size=8,
    learning_rate=3e-4,
    evaluate_every=8,
    num_evaluation=256,
    required_gain=-1.0,
    time_limit_s=300.0,
)


def certificates_dir(options: DemoOptions) -> Path:
    """Directory of the demonstration's own authority."""
    return options.out / "certs"


def tls_table(options: DemoOptions, *, role: str, site: str) -> dict[str, str]:
    """Section `tls` of a node: where `certificates.make_certificates` puts its files."""
    node = certificates_dir(options) / f"{role}-{site}"
    return {"ca": str(node / "ca.crt"), "cert": str(node / "node.crt"), "key": str(node / "node.key")}


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
        # As the demo's range was measured: a site is exactly so many versions behind.
        "swap": "drain",
        "work_ahead_s": 0.0,
        "seed": options.seed + SITES.index(site),
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
