"""run.json of the state directory: release and configuration of the learner."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import heterorl
from heterorl.common.api import LearnerApi
from heterorl.common.errors import RemoteError, StaleEpoch
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.files import replacing
from heterorl.common.types.run import facts_of
from heterorl.learner.learner_config import LearnerConfig

_LOG = logging.getLogger(__name__)
RUN_FILE = "run.json"


def write_run_file(config: LearnerConfig) -> None:
    """Write the release and every key of the configuration, whole or not at all; keys name files, not secrets.

    Logs each change since the last start.
    """
    path = config.state_dir / RUN_FILE
    for line in _changes(path, _run(config)):
        _LOG.warning("changed since the last start: %s", line)
    with replacing(path, is_durable=False) as file:
        file.write((json.dumps(_run(config), indent=2) + "\n").encode())


async def describe_run(api: LearnerApi, config: LearnerConfig, *, epoch: int, backoff: Backoff) -> None:
    """Send the same to the coordinator, for people; an earlier release does not know the call.

    Raises:
        StaleEpoch: another learner took over.
    """
    facts = facts_of(_run(config))

    async def tell() -> None:
        try:
            await api.describe_run(epoch=epoch, facts=facts)
        except RemoteError as error:
            # A server of an earlier release refuses with an unnamed error, now and later.
            if type(error) is not RemoteError:
                raise
            _warn(error)

    try:
        await backoff.retry(tell)
    except StaleEpoch:
        raise
    except RemoteError as error:
        _warn(error)


def _changes(path: Path, run: Mapping[str, Any]) -> list[str]:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    old, new = dict(_leaves(before)), dict(_leaves(json.loads(json.dumps(run))))
    return [
        f"{key} {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def _leaves(table: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(table, dict):
        yield key.removeprefix("config."), table
        return
    for name, value in table.items():
        yield from _leaves(value, f"{key}.{name}" if key else name)


def _warn(error: RemoteError) -> None:
    _LOG.warning("the coordinator refused the description of the run; continuing: %s", error)


def _run(config: LearnerConfig) -> dict[str, Any]:
    return {"heterorl_version": heterorl.__version__, "config": config.model_dump(mode="json")}
