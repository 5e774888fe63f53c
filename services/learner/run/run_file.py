"""What this learner runs with, for whoever looks at its directory later: run.json of the state directory."""

from __future__ import annotations

import json
import logging
from typing import Any

import heterorl
from heterorl.common.api import LearnerApi
from heterorl.common.errors import RemoteError, StaleEpoch
from heterorl.common.process.files import replacing
from heterorl.common.process.patience import Patience
from heterorl.common.types.facts import facts_of
from heterorl.learner.config import LearnerConfig

_LOG = logging.getLogger(__name__)
RUN_FILE = "run.json"


def write_run_file(config: LearnerConfig) -> None:
    """Write the release and every key of the configuration, whole or not at all; keys name files, not secrets."""
    path = config.state_dir / RUN_FILE
    with replacing(path, is_durable=False) as file:
        file.write((json.dumps(_run(config), indent=2) + "\n").encode())


async def describe_run(api: LearnerApi, config: LearnerConfig, *, epoch: int, patience: Patience) -> None:
    """Tell the coordinator too, for people who look at the run; one of an earlier release does not know the question.

    Raises:
        StaleEpoch: another learner took over.
    """
    facts = facts_of(_run(config))

    async def tell() -> None:
        try:
            await api.describe_run(epoch=epoch, facts=facts)
        except RemoteError as error:
            # Whoever does not know the question has no name for its refusal, and will not know it later.
            if type(error) is not RemoteError:
                raise
            _warn(error)

    try:
        await patience.insist(tell)
    except StaleEpoch:
        raise
    except RemoteError as error:
        _warn(error)


def _warn(error: RemoteError) -> None:
    _LOG.warning("the coordinator does not take what is said of the run, going on: %s", error)


def _run(config: LearnerConfig) -> dict[str, Any]:
    return {"heterorl_version": heterorl.__version__, "config": config.model_dump(mode="json")}
