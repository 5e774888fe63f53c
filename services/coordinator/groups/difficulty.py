"""Prompts that are worth handing out: mean rewards by prompt, and which assignments are passed over; store operations.

    prompts         prompt_index, mean (weighted to the newest groups), num_groups, band    a row for each prompt seen
    prompt_totals   name, count    prompts of each band, and assignments passed over

Guarantees: an assignment's prompt follows from its number alone, here as everywhere: a number whose prompt is outside
the window is passed over for good, in the transaction that hands out the one behind it, so nothing else knows of
windows. A mean counts groups whose rewards the learner let through, each once. The work of a lease is bounded by
MAX_PASSED for each assignment, whatever the number of prompts; one behind so many others goes out wherever it lies.
"""

from __future__ import annotations

from collections.abc import Iterable

from heterorl.common.errors import MalformedPayload
from heterorl.common.types.run import PromptCounts
from heterorl.common.wire.sample import outline
from heterorl.common.wire.seal import read_sealed
from heterorl.coordinator.config import DifficultyConfig
from heterorl.coordinator.groups.schedule import draw_of, prompt_of
from heterorl.coordinator.store.connection import Connection

MAX_PASSED = 16
"""Assignments that are passed over before one is handed out whatever its prompt."""
NEWEST_WEIGHT = 0.25
"""Of the newest group in a prompt's mean, once it has four: the policy changes, and with it what is hard."""
TOO_HARD, IN_WINDOW, TOO_EASY, PASSED = "too hard", "in window", "too easy", "passed over"


def band_of(mean: float, config: DifficultyConfig) -> str:
    """Where a mean reward lies."""
    return TOO_HARD if mean < config.low else TOO_EASY if mean > config.high else IN_WINDOW


def decide(mean: float | None, config: DifficultyConfig, *, draw: float) -> tuple[bool, str]:
    """Whether a prompt is handed out, and why; `draw` in [0, 1) is the assignment's, None the mean of an unseen one."""
    if mean is None:
        return True, "unseen"
    band = band_of(mean, config)
    if band == IN_WINDOW:
        return True, band
    return draw < config.explore, "explored" if draw < config.explore else band


def choose(
    connection: Connection, first: int, count: int, *, num_prompts: int, seed: int, config: DifficultyConfig
) -> tuple[list[tuple[int, int]], int]:
    """The next `count` assignments from `first` on with their prompts, and the number behind the last one."""
    chosen: list[tuple[int, int]] = []
    number, passed, num_passed = first, 0, 0
    while len(chosen) < count:
        prompt = prompt_of(number, num_prompts=num_prompts, seed=seed)
        if config.is_on and passed < MAX_PASSED:
            row = connection.execute("SELECT mean FROM prompts WHERE prompt_index = ?", (prompt,)).fetchone()
            is_wanted, _ = decide(row[0] if row else None, config, draw=draw_of(number, seed=seed))
        else:
            is_wanted = True
        if is_wanted:
            chosen.append((number, prompt))
            passed = 0
        else:
            passed, num_passed = passed + 1, num_passed + 1
        number += 1
    if num_passed:
        _add(connection, PASSED, num_passed)
    return chosen, number


def note_groups(connection: Connection, contents: Iterable[bytes | None], config: DifficultyConfig) -> None:
    """Set: count groups in the means of their prompts; those without content were counted before."""
    if not config.is_on:
        return
    for data in contents:
        if data is not None:
            try:
                prompt, reward = read_sealed(data).prompt_index, outline(data).reward_mean
            except MalformedPayload:
                # Damaged since it was leased: no reason to refuse a version.
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


def counts(connection: Connection, config: DifficultyConfig, *, num_prompts: int) -> PromptCounts | None:
    """Prompts by band, as their newest group found them; None where no window is kept."""
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
