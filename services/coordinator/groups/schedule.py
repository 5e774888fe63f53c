"""Pacing: how many prompts a site gets, and which.

Pacing bounds staleness without throwing work away.

`decide_grant` and the functions of an assignment's number are pure. The window of difficulty uses mean rewards in the
store:

    prompts         prompt_index, mean (weighted to the newest groups), num_groups, band    a row for each prompt seen
    prompt_totals   name, count    prompts of each band, and assignments passed over

An assignment's number determines its prompt. A number whose prompt is outside the window is skipped for good; after
MAX_PASSED skipped numbers the next one is handed out. A mean counts each group once whose rewards the learner accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from heterorl.common.errors import MalformedPayload
from heterorl.common.types.run import PromptCounts
from heterorl.common.wire.sample_messages import outline
from heterorl.common.wire.sealed_groups import read_sealed
from heterorl.coordinator.coordinator_config import CoordinatorConfig, DifficultyConfig
from heterorl.coordinator.store.database import Connection

_ROUNDS = 4


def decide_grant(
    config: CoordinatorConfig,
    *,
    wanted: int,
    head_version: int,
    policy_version: int,
    outstanding: int,
    held: int = 0,
    coming: int = 0,
    held_limit: int = 0,
    held_by: str = "site_work_groups",
) -> tuple[int, str]:
    """Grant groups that can be trained in time; returns number and reason.

    A group behind k outstanding ones (with samplers, queued, or with the learner) is trained k // groups_per_version
    versions from now. It may be granted while head + k // groups_per_version - policy_version <=
    max_staleness_versions. After one version's groups, the versions `coming` from others count; a site that holds
    none still gets one assignment, because only its groups can show that it has become faster. `held` are the site's
    assignments, `held_limit` is how many it may hold (0: no bound), `held_by` the bound's name for messages.
    """
    bound, limit, as_wanted = config.max_staleness_versions, config.outstanding_limit, "as wanted"
    lag = head_version - policy_version
    if lag > bound:
        needed = head_version - bound
        return 0, f"policy {policy_version} is {lag} versions old; pull version {needed} or newer"
    if outstanding >= config.groups_per_version and lag + coming > bound:
        # The groups of the next version are never withheld: without them it cannot come.
        if held:
            return 0, (
                f"paced: {coming} versions come while the site makes a group, at {lag} behind;"
                f" max_staleness_versions is {bound}"
            )
        wanted, as_wanted = min(wanted, 1), "one group, to time the site again"
    by_staleness = (bound - lag + 1) * config.groups_per_version - outstanding
    by_limit = limit - outstanding
    by_site = held_limit - held if held_limit else wanted
    granted = max(0, min(wanted, by_staleness, by_limit, by_site))
    if granted == wanted:
        return granted, as_wanted
    if by_site < min(by_limit, by_staleness):
        return granted, f"quota: the site holds {held} assignments, {held_by} is {held_limit}"
    if by_limit <= by_staleness:
        return granted, f"paced: {outstanding} of {limit} groups are outstanding"
    return granted, f"paced: at {lag} versions behind, {outstanding} outstanding groups reach the staleness bound"


def permute(index: int, *, size: int, key: str) -> int:
    """Map 0..size-1 onto itself in an order that `key` decides.
    The method is a Feistel network with cycle walking."""
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
    """The prompt of an assignment.
    A pass has every prompt once, in an order of its own."""
    rounds, position = divmod(assignment, num_prompts)
    return permute(position, size=num_prompts, key=f"{seed}/{rounds}")


def seed_of(assignment: int, *, seed: int) -> int:
    """The sampling seed of an assignment, 63 bits.
    It is assigned, so that no site can choose among its samples."""
    return _hash(f"sampling/{seed}/{assignment}") >> 1


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


MAX_PASSED = 16
"""Assignments skipped before one is handed out regardless of its prompt."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest group in a prompt's mean from its fourth group on, since the policy changes."""
TOO_HARD, IN_WINDOW, TOO_EASY, PASSED = "too hard", "in window", "too easy", "passed over"


def band_of(mean: float, config: DifficultyConfig) -> str:
    """The band of a mean reward."""
    return TOO_HARD if mean < config.low else TOO_EASY if mean > config.high else IN_WINDOW


def choose_prompts(
    connection: Connection, first: int, count: int, *, num_prompts: int, seed: int, config: DifficultyConfig
) -> tuple[list[tuple[int, int]], int]:
    """The next `count` assignments from `first` on, with their prompts.
    Also returns the first number after them."""
    chosen: list[tuple[int, int]] = []
    number, passed, num_passed = first, 0, 0
    while len(chosen) < count:
        prompt = prompt_of(number, num_prompts=num_prompts, seed=seed)
        seen = None
        if config.is_on and passed < MAX_PASSED:
            seen = connection.execute("SELECT mean FROM prompts WHERE prompt_index = ?", (prompt,)).fetchone()
        # A draw in [0, 1), the same after a restart.
        draw = _hash(f"explore/{seed}/{number}") / 2.0**64
        if seen is None or band_of(seen[0], config) == IN_WINDOW or draw < config.outside_share:
            chosen.append((number, prompt))
            passed = 0
        else:
            passed, num_passed = passed + 1, num_passed + 1
        number += 1
    if num_passed:
        _add(connection, PASSED, num_passed)
    return chosen, number


def note_rewards(connection: Connection, contents: Iterable[bytes | None], config: DifficultyConfig) -> None:
    """Count groups in the means of their prompts.
    A group without content was counted before."""
    if not config.is_on:
        return
    for data in contents:
        if data is not None:
            try:
                prompt, reward = read_sealed(data).prompt_index, outline(data).reward_mean
            except MalformedPayload:
                # Damaged since its lease, which must not refuse a version.
                continue
            if reward is not None:
                _note(connection, prompt, reward, config)


def _note(connection: Connection, prompt: int, reward: float, config: DifficultyConfig) -> None:
    row = connection.execute("SELECT mean, num_groups, band FROM prompts WHERE prompt_index = ?", (prompt,)).fetchone()
    mean, num_groups, before = row or (reward, 0, "")
    mean += (reward - mean) * max(NEWEST_WEIGHT, 1.0 / (num_groups + 1))
    band = band_of(mean, config)
    connection.execute(
        "INSERT INTO prompts VALUES (?, ?, ?, ?) ON CONFLICT (prompt_index)"
        " DO UPDATE SET mean = excluded.mean, num_groups = excluded.num_groups, band = excluded.band",
        (prompt, mean, num_groups + 1, band),
    )
    if band != before:
        _add(connection, band, 1)
        if before:
            _add(connection, before, -1)


def _add(connection: Connection, name: str, count: int) -> None:
    connection.execute(
        "INSERT INTO prompt_totals VALUES (?, ?) ON CONFLICT (name)"
        " DO UPDATE SET count = prompt_totals.count + excluded.count",
        (name, count),
    )


def prompt_counts(connection: Connection, config: DifficultyConfig, *, num_prompts: int) -> PromptCounts | None:
    """Prompts by band; None if the window is off."""
    if not config.is_on:
        return None
    totals = dict(connection.execute("SELECT name, count FROM prompt_totals").fetchall())
    in_window, easy, hard = (int(totals.get(name, 0)) for name in (IN_WINDOW, TOO_EASY, TOO_HARD))
    return PromptCounts(
        in_window=in_window,
        too_easy=easy,
        too_hard=hard,
        unseen=max(0, num_prompts - in_window - easy - hard),
        passed_over=int(totals.get(PASSED, 0)),
    )
