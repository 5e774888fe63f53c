"""What a learner ran with, in the order in which people ask."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_FACTS = (
    ("model", "config.model_dir"),
    ("task", "config.task.name"),
    ("reward", "config.task.reward"),
    ("loss", "config.loss.kind"),
    ("learning rate", "config.backend.lr"),
    ("group size, answers", "config.group_size"),
    ("groups a step", "config.groups_per_step"),
    ("steps a version", "config.steps_per_version"),
    ("steps wanted", "config.max_steps"),
    ("new tokens, at most", "config.sampling.max_new_tokens"),
    ("temperature", "config.sampling.temperature"),
    ("chat template", "config.use_chat_template"),
    ("adapters, rank", "config.lora.rank"),
    ("backend", "config.backend.kind"),
    ("device", "config.backend.device"),
    ("computed in", "config.backend.compute_dtype"),
    ("published in", "config.backend.published_dtype"),
    ("learner's heterorl", "heterorl_version"),
)


def facts_of(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of a learner's run.json: name and value; what is not there or empty is left out."""
    rows = []
    for name, path in _FACTS:
        value: Any = run
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in (None, "", 0, False):
            rows.append((name, str(value)))
    if rows:
        digest = hashlib.sha256(json.dumps(run.get("config"), sort_keys=True).encode()).hexdigest()
        rows.append(("configuration", f"{digest[:12]} (SHA-256 of its keys and values)"))
    return rows
