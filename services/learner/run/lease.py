"""The learner's lease: taken once, renewed by a task of its own, so that no long step can lose it."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from heterorl.common.api import LearnerApi
from heterorl.common.errors import ConfigError
from heterorl.common.process.clock import Clock
from heterorl.common.process.patience import Patience
from heterorl.common.types.common import Contract
from heterorl.common.types.policy import LeaseGrant
from heterorl.learner.progress import StepWatch

_LOG = logging.getLogger(__name__)
MIN_RENEWAL_S, MAX_RENEWAL_S = 0.05, 300.0
RENEWALS_PER_TERM = 3
"""Two renewals may be lost before the lease is anybody's."""


async def acquire(
    api: LearnerApi,
    *,
    holder: str,
    contract: Contract,
    request_id: str,
    patience: Patience,
    flavours: Sequence[str] = (),
    incarnation: str = "",
    groups_per_version: int = 0,
    statement: bytes = b"",
) -> LeaseGrant:
    """Become the run's learner, waiting while another one is.

    Args:
        api: the coordinator.
        holder: name of this learner.
        contract: what this learner runs with.
        request_id: fresh for every process, so that a repeated request is one request.
        patience: how to wait.
        flavours: what is published of each version beside the weights that are trained.
        incarnation: name of the state directory.
        groups_per_version: groups that one version is made of.
        statement: the configuration behind the contract, for sites that join with a short file.

    Raises:
        ContractMismatch: this learner disagrees with the run.
    """
    grant = await patience.insist(
        lambda: api.acquire_lease(
            holder=holder,
            contract=contract,
            request_id=request_id,
            flavours=flavours,
            incarnation=incarnation,
            groups_per_version=groups_per_version,
            statement=statement,
        )
    )
    _LOG.info("holding the lease, epoch %d, head is version %d", grant.epoch, grant.head_version)
    return grant


def renewal_s(ttl_s: float) -> float:
    """Seconds until the next renewal of a lease of so many; of a term that makes no sense, a sensible one."""
    wait_s = ttl_s / RENEWALS_PER_TERM
    return min(max(wait_s, MIN_RENEWAL_S), MAX_RENEWAL_S) if math.isfinite(wait_s) else MIN_RENEWAL_S


def check_messages(grant: LeaseGrant, *, own_bytes: int) -> None:
    """Refuse to lead with a smaller limit than the coordinator's: a group of others' making would end every stream.

    Raises:
        ConfigError: the learner's own limit is too small.
    """
    if own_bytes < grant.max_message_bytes:
        problem = f"{own_bytes} is below the coordinator's, {grant.max_message_bytes}: its groups may not fit"
        raise ConfigError("max_message_bytes", problem, action=f"set it to {grant.max_message_bytes}")


def check_groups(grant: LeaseGrant, *, groups_per_version: int) -> None:
    """Refuse a version of more groups than the coordinator hands out before it is published: it would never be whole.

    Raises:
        ConfigError: no version comes to so many groups.
    """
    most = grant.most_groups_per_version
    if 0 < most < groups_per_version:
        problem = f"a version needs {groups_per_version} groups, and the coordinator has at most {most} under way"
        action = "set the coordinator's groups_per_version to groups_per_step times steps_per_version, or lower these"
        raise ConfigError("steps_per_version", problem, action=action)


async def _ignore(grant: LeaseGrant) -> None:
    pass


async def renew(
    api: LearnerApi,
    *,
    grant: LeaseGrant,
    clock: Clock,
    patience: Patience,
    on_grant: Callable[[LeaseGrant], Awaitable[None]] = _ignore,
    progress: StepWatch | None = None,
) -> None:
    """Renew forever; an unreachable coordinator is waited for, since nobody else can reach it either.

    `on_grant` hears every answer; `progress` is told with every renewal, so that a long step shows how far it is.

    Raises:
        StaleEpoch: the lease is another learner's; every effect of this one must stop.
    """
    epoch, ttl_s = grant.epoch, grant.ttl_s
    while True:
        await clock.sleep(renewal_s(ttl_s))
        renewed = await patience.insist(
            lambda: api.renew_lease(epoch=epoch, progress=None if progress is None else progress.now)
        )
        ttl_s = renewed.ttl_s
        await on_grant(renewed)
