"""What a learner runs with, in the order in which people ask: names and values, for status and reports."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from heterorl.common.errors import InvalidRequest

STEPS_WANTED = "steps wanted"
CHANGED = "changed after step"
"""Begins the name of a fact that the coordinator adds: what a start changed, and after which step."""
MAX_CHANGES = 20
"""Of the newest; earlier ones stay in the log of audit."""
_DIGEST = "configuration"
MAX_FACTS, MAX_CHARACTERS = 64, 300
_FACTS = (
    ("model", "config.model_dir"),
    ("task", "config.task.name"),
    ("reward", "config.task.reward"),
    ("loss", "config.loss.kind"),
    ("own loss", "config.loss.function"),
    ("learning rate", "config.backend.lr"),
    ("learning rate falls", "config.backend.lr_schedule"),
    ("group size, answers", "config.group_size"),
    ("groups a step", "config.groups_per_step"),
    ("steps a version", "config.steps_per_version"),
    (STEPS_WANTED, "config.max_steps"),
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


def facts_of(run: Mapping[str, Any]) -> dict[str, str]:
    """What a learner's run.json says: `heterorl_version` and `config`; what is not there or empty is left out."""
    facts = {}
    for name, path in _FACTS:
        value: Any = run
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in (None, "", 0, False):
            facts[name] = "".join(c for c in str(value) if c.isprintable())[:MAX_CHARACTERS]
    if facts:
        digest = hashlib.sha256(json.dumps(run.get("config"), sort_keys=True).encode()).hexdigest()
        facts[_DIGEST] = f"{digest[:12]} (SHA-256 of its keys and values)"
    return facts


def parse_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Facts as another machine sent them.

    Raises:
        InvalidRequest: there are too many, or one is too long or not printable.
    """
    if len(facts) > MAX_FACTS:
        raise InvalidRequest(f"{len(facts)} facts, at most {MAX_FACTS} are kept")
    for name, value in facts.items():
        if not re.fullmatch(r"[a-z][a-z0-9 ,.'_-]{0,63}", name):
            raise InvalidRequest(f"{name[:64]!r} is no name of a fact")
        if len(value) > MAX_CHARACTERS or not value.isprintable():
            raise InvalidRequest(f"fact {name}: at most {MAX_CHARACTERS} printable characters")
    return dict(facts)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What one start's facts say otherwise than those of the start before, in words; empty where nothing is."""
    names = [name for name in {**before, **after} if not name.startswith(CHANGED) and name != _DIGEST]
    said = [
        f"{name} {before.get(name, 'unset')} -> {after.get(name, 'unset')}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    if not said and before.get(_DIGEST) != after.get(_DIGEST):
        said = ["keys that are not among these facts (the learner's log names them)"]
    return ", ".join(said)


def with_changes(before: Mapping[str, str], after: Mapping[str, str], *, words: str, step: int) -> dict[str, str]:
    """New facts, and what starts have changed: those that were known, and `words` after a step."""
    known = {name: value for name, value in before.items() if name.startswith(CHANGED)}
    if words:
        name = f"{CHANGED} {step}"
        known[name] = f"{known[name]}, then {words}" if name in known else words
        known[name] = known[name][:MAX_CHARACTERS]
    return {**after, **dict(list(known.items())[-MAX_CHANGES:])}


def changed_steps(facts: Mapping[str, str]) -> tuple[int, ...]:
    """The steps after which a start changed something."""
    numbers = (name.removeprefix(CHANGED).strip() for name in facts if name.startswith(CHANGED))
    return tuple(int(number) for number in numbers if number.isdecimal())


def steps_wanted(facts: Mapping[str, str]) -> int:
    """Steps that the run is to take; 0 where nobody said."""
    text = facts.get(STEPS_WANTED, "")
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else 0
