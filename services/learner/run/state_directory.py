"""The state directory's lock and run.json, and the learner's lease.

    state_dir/incarnation    "<32 hex digits> <number of the file's inode>"
    state_dir/epochs         epochs of the leases that its learner held
    state_dir/run.json       release and configuration of the learner

Guarantees: a restart is told from a second learner. Every start from the same directory has the same random name, also
after SIGKILL; a copied directory gets another one, because its file has another inode. Such a learner, or one whose
file was lost, waits for the end of a lease. A version of an epoch that is not noted is another learner's. A task of its
own renews the lease, so no long step loses it.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any

import heterorl
from heterorl.common.api import LearnerApi
from heterorl.common.errors import ConfigError, RemoteError, StaleEpoch
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock
from heterorl.common.process.config_file import flatten
from heterorl.common.process.files import make_directory, replacing, room, try_lock, usable
from heterorl.common.types.policy import LeaseGrant
from heterorl.common.types.run import RUN_FILE, facts_of
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.step_metrics import StepTimer

_LOG = logging.getLogger(__name__)
INCARNATION_FILE = "incarnation"
EPOCHS_FILE = "epochs"
_LINE = re.compile(r"([0-9a-f]{32}) ([0-9]+)\n?")
MIN_RENEWAL_S, MAX_RENEWAL_S = 0.05, 300.0
RENEWALS_PER_TERM = 3
"""Two renewals may be lost before the lease expires."""


@contextlib.contextmanager
def hold_directory(path: Path) -> Iterator[Path]:
    """Create the directory and hold its lock until the process ends.
    Raises ConfigError if it cannot be used or another process holds it, DiskFull."""
    with usable("state_dir", path):
        make_directory(path, mode=0o700)
        file = (path / "lock").open("w")
    with file:
        if not try_lock(file):
            raise ConfigError("state_dir", f"{path} is used by another learner", action="stop it first")
        yield path


def read_incarnation(directory: Path) -> str:
    """The name of this state directory's learner; made if missing.
    Raises DiskFull if it cannot be written."""
    path = directory / INCARNATION_FILE
    # A damaged file has no valid name.
    with contextlib.suppress(FileNotFoundError, ValueError), path.open(encoding="ascii") as file:
        found = _LINE.fullmatch(file.read(256))
        if found and int(found[2]) == _inode(file):
            return found[1]
    name = secrets.token_hex(16)
    # A rename keeps the inode.
    with _written(path) as made:
        made.write(f"{name} {_inode(made)}\n".encode("ascii"))
    return name


@contextlib.contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    with room(path.parent), replacing(path) as file:
        yield file


def read_epochs(directory: Path) -> tuple[int, ...]:
    """Epochs of this state directory's learner, ascending.
    None where the file is missing or damaged."""
    try:
        words = (directory / EPOCHS_FILE).read_text(encoding="ascii").split()
        return tuple(sorted(int(word) for word in words))
    except (FileNotFoundError, ValueError):
        return ()


def note_epoch(directory: Path, epoch: int) -> None:
    """Note durably that this state directory's learner holds an epoch.
    Raises DiskFull if it cannot be written."""
    known = read_epochs(directory)
    if epoch not in known:
        with _written(directory / EPOCHS_FILE) as file:
            file.write((" ".join(map(str, (*known, epoch))) + "\n").encode("ascii"))


def _inode(file: IO[bytes] | IO[str]) -> int:
    return os.fstat(file.fileno()).st_ino


def renewal_s(ttl_s: float) -> float:
    """Seconds until the next renewal, bounded for any coordinator's term."""
    wait_s = ttl_s / RENEWALS_PER_TERM
    return min(max(wait_s, MIN_RENEWAL_S), MAX_RENEWAL_S) if math.isfinite(wait_s) else MIN_RENEWAL_S


def check_messages(grant: LeaseGrant, *, own_bytes: int) -> None:
    """Refuse a smaller message limit than the coordinator's.
    A larger group would end every stream."""
    if own_bytes < grant.max_message_bytes:
        problem = f"{own_bytes} is below the coordinator's, {grant.max_message_bytes}: its groups may not fit"
        raise ConfigError("max_message_bytes", problem, action=f"set it to {grant.max_message_bytes}")


def check_groups(grant: LeaseGrant, *, groups_per_version: int) -> None:
    """Refuse versions of more groups than the coordinator hands out.
    It hands out no more before one is published, so none would be whole."""
    most = grant.most_groups_per_version
    if 0 < most < groups_per_version:
        problem = f"a version needs {groups_per_version} groups, and the coordinator hands out at most {most} at once"
        action = "set the coordinator's groups_per_version to groups_per_step times steps_per_version, or lower these"
        raise ConfigError("steps_per_version", problem, action=action)


async def renew(
    api: LearnerApi,
    *,
    grant: LeaseGrant,
    clock: Clock,
    backoff: Backoff,
    on_grant: Callable[[LeaseGrant], Awaitable[None]],
    progress: StepTimer,
) -> None:
    """Renew forever; waits while the coordinator cannot be reached.

    `on_grant` gets every answer; `progress` goes with every renewal, so that a long step shows how far it is. Raises
    StaleEpoch if the lease is another learner's; every effect of this one must stop.
    """
    epoch, ttl_s = grant.epoch, grant.ttl_s
    while True:
        await clock.sleep(renewal_s(ttl_s))
        renewed = await backoff.retry(lambda: api.renew_lease(epoch=epoch, progress=progress.now))
        ttl_s = renewed.ttl_s
        await on_grant(renewed)


def write_run_file(config: LearnerConfig) -> None:
    """Write the release and every key of the configuration.

    The file is written whole or not at all. Keys name files, not secrets. Logs each change since the last start.
    """
    path = config.state_dir / RUN_FILE
    for line in _changes(path, _run(config)):
        _LOG.warning("the configuration changed since the last start: %s", line)
    with room(path.parent), replacing(path, is_durable=False) as file:
        file.write((json.dumps(_run(config), indent=2) + "\n").encode())


async def describe_run(api: LearnerApi, config: LearnerConfig, *, epoch: int, backoff: Backoff) -> None:
    """Send release and configuration to the coordinator, for people.
    Raises StaleEpoch if another learner took over."""
    facts = facts_of(_run(config))
    try:
        await backoff.retry(lambda: api.describe_run(epoch=epoch, facts=facts))
    except StaleEpoch:
        raise
    except RemoteError as error:
        _LOG.warning("the coordinator refused the description of the run; the run goes on: %s", error)


def _changes(path: Path, run: dict[str, Any]) -> list[str]:
    try:
        old = flatten(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        return []
    new = flatten(json.loads(json.dumps(run)))
    return [
        f"{key.removeprefix('config.')} {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def _run(config: LearnerConfig) -> dict[str, Any]:
    return {"heterorl_version": heterorl.__version__, "config": config.model_dump(mode="json")}
