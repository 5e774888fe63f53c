"""Which prompts to hand out, and how many: pure. Staleness is bounded by pacing, not by throwing work away."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What pacing looks at: `outstanding` groups are with samplers, queued, or with the learner."""

    head_version: int
    policy_version: int
    outstanding: int
    held: int = 0
    """Assignments that the asking site holds."""
    coming: int = 0
    """Versions that others make while the asking site makes a group, as its last groups and versions lasted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Options of pacing."""

    groups_per_version: int
    max_staleness_versions: int
    outstanding_limit: int
    held_limit: int = 0
    """Assignments that one site may hold; 0 is no bound."""
    held_by: str = "site_work_groups"
    """What says so, for people to read."""


def decide_grant(load: Load, pace: Pace, *, wanted: int) -> tuple[int, str]:
    """Grant as many groups as can still be trained in time, and say what bounds the number.

    A group behind k outstanding ones is trained k // groups_per_version versions from now, so it may be granted while
    head + k // groups_per_version - policy_version <= max_staleness_versions. What comes after `coming` versions is
    behind those, however few groups are outstanding.
    """
    lag = load.head_version - load.policy_version
    if lag > pace.max_staleness_versions:
        needed = load.head_version - pace.max_staleness_versions
        return 0, f"policy {load.policy_version} is {lag} versions old; pull version {needed} or newer"
    if load.outstanding >= pace.groups_per_version and lag + load.coming > pace.max_staleness_versions:
        # Of the next version's groups none is withheld: it cannot come without them.
        return 0, (
            f"paced: {load.coming} versions come while the site makes a group, at {lag} behind;"
            f" max_staleness_versions is {pace.max_staleness_versions}"
        )
    by_staleness = (pace.max_staleness_versions - lag + 1) * pace.groups_per_version - load.outstanding
    by_limit = pace.outstanding_limit - load.outstanding
    by_site = pace.held_limit - load.held if pace.held_limit else wanted
    granted = max(0, min(wanted, by_staleness, by_limit, by_site))
    if granted == wanted:
        return granted, "as wanted"
    if by_site < min(by_limit, by_staleness):
        return granted, f"quota: the site holds {load.held} assignments, {pace.held_by} is {pace.held_limit}"
    if by_limit <= by_staleness:
        return granted, f"paced: {load.outstanding} of {pace.outstanding_limit} groups are outstanding"
    return granted, f"paced: at {lag} versions behind, {load.outstanding} outstanding groups reach the staleness bound"


def permute(index: int, *, size: int, key: str) -> int:
    """Map 0..size-1 onto itself in an order that `key` decides (a Feistel network with cycle walking)."""
    bits = max(2, (size - 1).bit_length())
    half = (bits + 1) // 2
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_hash(f"{key}/{number}/{right}") & mask)
        value = (left << half) | right
        if value < size:
            return value


def prompt_of(assignment: int, *, num_prompts: int, seed: int) -> int:
    """The prompt of an assignment: every prompt once per pass, each pass in another order."""
    rounds, position = divmod(assignment, num_prompts)
    return permute(position, size=num_prompts, key=f"{seed}/{rounds}")


def seed_of(assignment: int, *, seed: int) -> int:
    """The sampling seed of an assignment, 63 bits: assigned, so that no site can choose among its samples."""
    return _hash(f"sampling/{seed}/{assignment}") >> 1


def draw_of(assignment: int, *, seed: int) -> float:
    """A number in [0, 1) of an assignment, for decisions about it that a restart makes again."""
    return _hash(f"explore/{seed}/{assignment}") / 2.0**64


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
