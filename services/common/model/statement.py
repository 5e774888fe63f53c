"""What a learner states of its configuration, for sites that join with a short file."""

from __future__ import annotations

import logging
from typing import Any

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import Contract
from heterorl.common.wire.statement import Statement, contract_digest, statement_to_bytes

_LOG = logging.getLogger(__name__)
LOCAL = frozenset(
    {"reward_path", "reward_timeout_s", "reward_workers", "cache_dir", "directory", "api_key_env", "api_key_file",
     "ca_file", "cache_file", "rubric_file", "python", "shown", "sandbox"}
)  # fmt: skip
"""Keys of a task that say where things are on one machine: no node states them, and none adopts them."""


def statement_of(config: Any, contract: Contract) -> bytes:
    """The configuration of a learner as it is stated; empty, with a warning, where it has no such form."""
    task = config.task.model_dump(mode="json", exclude_unset=True)
    settings = {
        "task": without_local({"name": config.task.name, **task}),
        "sampling": config.sampling.model_dump(mode="json"),
        "lora": config.lora.model_dump(mode="json"),
        "group_size": config.group_size,
        "use_chat_template": config.use_chat_template,
        "chat_template_arguments": dict(config.chat_template_arguments),
    }
    try:
        return statement_to_bytes(Statement(contract=contract_digest(contract), settings=settings))
    except InvalidRequest as error:
        _LOG.warning("nothing is stated for sites with a [join] section, they must state everything: %s", error)
        return b""


def without_local(value: Any) -> Any:
    """A task's table without the keys of one machine, in its sources and rewards too."""
    if isinstance(value, dict):
        return {key: without_local(entry) for key, entry in value.items() if key not in LOCAL}
    return [without_local(entry) for entry in value] if isinstance(value, list | tuple) else value
