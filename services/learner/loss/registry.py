"""From a loss configuration to the parts it is made of; nothing else in the learner asks for `kind`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from heterorl.learner.loss.config import LossConfig
from heterorl.learner.loss.rule import Rule

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gepo": {"level": "sequence"},
    "gepo_plus": {"level": "sequence"},
    "ds_gepo": {"level": "sequence"},
    "eqp": {"level": "sequence", "denominator": "expected_learner"},
    "gspo": {"level": "sequence"},
    "ds_gspo": {"level": "sequence"},
    "gspo_token": {"level": "spread"},
    "gmpo": {"level": "sequence", "clip": "token_log"},
    "grpo": {},
    "dr_grpo": {},
    "dapo": {},
    "bnpo": {},
    "delta_l": {},
    "opsm": {},
    "decoupled_ppo": {},
    "m2po": {"clip": "none"},
    "topr": {
        "level": "sequence",
        "normalisation": "raw",
        "clip": "truncate",
        "high": 1.0,
        "positive_weight": "one",
    },
    "cispo": {"clip": "truncate"},
    "tis": {"clip": "truncate"},
    "mis": {"clip": "drop"},
}
"""What each algorithm fixes; the rest is its configuration's keys or the defaults of `Rule`."""

LEVELS: dict[str, dict[str, Any]] = {
    "token": {"level": "token"},
    "sequence": {"level": "sequence", "normalisation": "raw"},
    "geometric": {"level": "sequence", "normalisation": "length"},
}

_PARTS = {field.name for field in fields(Rule)}


def rule_of(config: LossConfig) -> Rule:
    """The parts that the configuration names."""
    keys: dict[str, Any] = dict(config)
    parts = {name: value for name, value in keys.items() if name in _PARTS} | ALGORITHMS[config.kind]
    if "eps_low" in keys:
        parts |= {"low": 1.0 - keys["eps_low"], "high": 1.0 + keys["eps_high"]}
    if "eps_log" in keys:
        parts |= {"low": -keys["eps_log"], "high": keys["eps_log"]}
    if "cap" in keys:
        parts |= {"low": keys.get("floor", 0.0), "high": keys["cap"]}
    if config.kind in ("mis", "tis"):
        parts |= LEVELS[config.level]
    return Rule(**parts)


def caveats(rule: Rule) -> tuple[str, ...]:
    """What an operator should be told once about a choice that is allowed but rarely wanted."""
    notes = []
    if rule.has_group_denominator and rule.normalisation == "raw":
        notes.append("loss.normalisation = raw: the denominator is that of the shortest rollout of each group")
    if rule.scope == "microbatch":
        notes.append("loss.scope = microbatch: the loss depends on micro_batch_tokens; for reproduction only")
    return tuple(notes)
