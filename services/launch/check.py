"""A node's configuration against its service's own schema, in the words of run.toml."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from heterorl.common.errors import OperatorError
from heterorl.launch.node import Kind, Node

Problems = Callable[[Kind, dict[str, Any]], Sequence[tuple[str, str]]]
"""What a service says against a table: dotted keys and what is wrong with each. An empty key is about several."""
_SHARED = (
    "task", "sampling", "lora", "loss", "model_dir", "group_size", "groups_per_step", "steps_per_version", "max_steps",
    "use_chat_template", "chat_template_arguments",
)  # fmt: skip
_OWN = {"backend": "learner", "engine": "samplers"}


class InvalidNodes(OperatorError):
    """Services would refuse what run.toml says; one line for each key."""


def check_nodes(nodes: Sequence[Node], problems: Problems) -> None:
    """Check every node before anything is written.

    Raises:
        InvalidNodes: a service would refuse its configuration.
    """
    lines: dict[str, None] = {}
    for node in nodes:
        for key, text in problems(node.kind, node.config):
            where = node.stated.get(key) or key_in_run(node.kind, key)
            lines[f"{where}: {text}" if where else f"{node.name}: {text}"] = None
    if lines:
        head = [f"run.toml has {len(lines)} problems:"] if len(lines) > 1 else []
        raise InvalidNodes("\n".join([*head, *lines]))


def key_in_run(kind: Kind, key: str) -> str:
    """Where run.toml says a key of a service; empty for no key."""
    first = key.partition(".")[0]
    if not key:
        return ""
    section = {"sampler": "samplers", "relay": "relays"}.get(kind, kind)
    if first in _SHARED and kind in ("learner", "sampler"):
        return f"run.{key}"
    if first in _OWN and kind in ("learner", "sampler"):
        return f"{_OWN[first]}.{key}"
    return f"{section}.config.{key}"
