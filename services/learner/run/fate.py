"""What to do with a checkpoint at a start, by the fate of its publication, and without one: pure."""

from __future__ import annotations

import enum
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.learner.publish.cursor import Cursor


class Action(enum.Enum):
    """What to do with a checkpoint."""

    CONTINUE = "continue"
    REPUBLISH = "republish"
    ROLL_BACK = "roll_back"
    SKIP = "skip"


def decide(
    cursor: Cursor, *, head_version: int, committed_version: int | None, is_in_lineage: bool
) -> tuple[Action, str]:
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
            return Action.REPUBLISH, f"its publication after version {head_version} was never committed"
        return Action.SKIP, f"it follows version {cursor.parent_version}, the head is version {head_version}"
    if committed_version == head_version:
        return Action.CONTINUE, f"it is the head, version {head_version}"
    if is_in_lineage:
        return Action.ROLL_BACK, f"it is version {committed_version}, the head is version {head_version}"
    return Action.SKIP, f"version {committed_version} was abandoned"


def not_adopted(state_dir: Path, run_id: str, *, version: int, step: int) -> ConfigError:
    """Why a learner without a usable checkpoint does not go on from published weights unasked."""
    return ConfigError(
        "adopt_without_optimizer",
        f"{state_dir} has no usable checkpoint of run {run_id}, which stands at version {version}, step {step}: to go"
        " on from its published weights alone throws the optimizer's state away",
        action="start the learner that trained it, or this one with that one's state_dir; where that is lost, set"
        " adopt_without_optimizer = true for one start",
    )
