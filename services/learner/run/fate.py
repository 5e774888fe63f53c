"""How a learner goes on, as a table over its checkpoints, newest first, and the fate of their publications: pure.

    the checkpoint's publication      way         what it does
    is the head                       CONTINUE    its state is the masters'; nothing is published
    never committed, after the head   REPUBLISH   publishes it; where its groups are refused, drops it and goes down
    in the lineage, before the head   ROLL_BACK   publishes it again over the head: the versions between are abandoned
    never committed, after another    SKIP        goes down to the next checkpoint
    abandoned                         SKIP        the same

    where no checkpoint was taken
    there is no version               START       publishes version 0; only where there is no checkpoint at all
    there is a head                   ADOPT       takes its published weights; the optimizer starts anew

A checkpoint that the disk does not give, or that restores to another state than it published, is gone down from too.
"""

from __future__ import annotations

import enum
from pathlib import Path

from heterorl.common.errors import ConfigError, OperatorError
from heterorl.common.types.policy import NO_VERSION
from heterorl.learner.publish.cursor import Cursor


class Way(enum.Enum):
    """How to go on."""

    CONTINUE = "continue"
    REPUBLISH = "republish"
    ROLL_BACK = "roll_back"
    SKIP = "skip"
    START = "start"
    ADOPT = "adopt"


def decide(cursor: Cursor, *, head_version: int, committed_version: int | None, is_in_lineage: bool) -> tuple[Way, str]:
    """Judge a checkpoint by the fate of its publication.

    Args:
        cursor: the checkpoint's.
        head_version: newest version.
        committed_version: what the publication became; None when it was never committed. Under the newest epoch this
            answer is final: an older epoch's publication can no longer arrive.
        is_in_lineage: whether that version can still be pulled, so was not abandoned.
    """
    if committed_version is None:
        if cursor.parent_version == head_version:
            return Way.REPUBLISH, f"its publication after version {head_version} was never committed"
        return Way.SKIP, f"it follows version {cursor.parent_version}, the head is version {head_version}"
    if committed_version == head_version:
        return Way.CONTINUE, f"it is the head, version {head_version}"
    if is_in_lineage:
        return Way.ROLL_BACK, f"it is version {committed_version}, the head is version {head_version}"
    return Way.SKIP, f"version {committed_version} was abandoned"


def decide_without(*, head_version: int, num_checkpoints: int, state_dir: Path, run_id: str) -> Way:
    """How to go on where no checkpoint was taken.

    Raises:
        OperatorError: there are checkpoints of a run whose versions the coordinator has lost.
    """
    if head_version != NO_VERSION:
        return Way.ADOPT
    if num_checkpoints:
        raise OperatorError(
            f"{state_dir} has checkpoints of run {run_id}, the coordinator has no version of it",
            action="restore the coordinator's data_dir, or choose another state_dir to start anew",
        )
    return Way.START


def not_adopted(state_dir: Path, run_id: str, *, version: int, step: int) -> ConfigError:
    """Why a learner without a usable checkpoint does not go on from published weights unasked."""
    return ConfigError(
        "adopt_without_optimizer",
        f"{state_dir} has no usable checkpoint of run {run_id}, which stands at version {version}, step {step}: to go"
        " on from its published weights alone throws the optimizer's state away",
        action="start the learner that trained it, or this one with that one's state_dir; where that is lost, set"
        " adopt_without_optimizer = true for one start",
    )
