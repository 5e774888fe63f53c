"""Draws of trajectories of several turns, repeated from the seed of their group."""

import asyncio
import dataclasses

import numpy as np
import pytest

from benchmarks.generated import assignments, played
from benchmarks.verify import build_site
from benchmarks.verify_cheats import SEED
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model.logprobs import group_key
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import turns_of, without_stale
from heterorl.coordinator.groups.schedule import seed_of
from heterorl.learner.checks.findings import VerificationConfig, judge_margins
from heterorl.sampler.rollout.group_builder import GroupBuilder
from tests.support.games import Games

SIZE, TURNS = 4, 3


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=1)
    return build_site(str(model_dir), digits=1, group_size=SIZE)[0]


def drawn(site, *, other=0):
    """Groups of an engine with seeded draws, whose environment answers twice."""
    games = Games(length=9, max_turns=TURNS)
    games.max_live = 64
    builder = GroupBuilder(
        task=site.task, prompter=site.prompter, site=SiteId("one"), incarnation="a", group_size=SIZE,
        clock=SystemClock(), is_seeded=True, max_new_tokens=3, max_trajectory_tokens=60, conversations=games,
    )  # fmt: skip
    work = assignments(range(3), num_prompts=site.task.num_prompts, seed=SEED, draws=SEED)
    return asyncio.run(played(builder, site.engine(), work, state_root=site.state_root, other=other))


def judged(site, group):
    key = group_key(seed=seed_of(group.assignment, seed=SEED), prompt_index=group.prompt_index)
    return judge_margins(site.replayer.replay(group, key=key), VerificationConfig())


def test_honest_turns_are_what_the_seed_draws(site):
    groups = drawn(site)

    assert {len(turns_of(rollout)) for group in groups for rollout in group.rollouts} == {TURNS}
    assert all(group.is_seeded for group in groups)
    assert all(judged(site, group).is_sound for group in groups)
    # Members differ, so that one may not stand for another.
    assert len({rollout.token_ids.tobytes() for rollout in groups[0].rollouts}) > 1


def test_later_turns_that_were_drawn_again_are_found(site):
    for mine, others in zip(drawn(site), drawn(site, other=1), strict=True):
        number = next(
            number
            for number, (one, other) in enumerate(zip(mine.rollouts, others.rollouts, strict=True))
            if not np.array_equal(one.token_ids, other.token_ids)
        )
        one, other = mine.rollouts[number], others.rollouts[number]
        end = turns_of(one)[0][1]
        assert np.array_equal(one.token_ids[:end], other.token_ids[:end])
        rollouts = tuple(other if place == number else each for place, each in enumerate(mine.rollouts))

        finding = judged(site, dataclasses.replace(mine, rollouts=rollouts))

        assert finding.detail.startswith(f"rollouts[{number}]: ")


def test_turns_behind_stale_ones_keep_their_draws(site):
    def aged(rollout):
        start = turns_of(rollout)[0][1]
        spans = tuple(
            dataclasses.replace(span, version=1) if span.is_drawn and span.start >= start else span
            for span in rollout.spans
        )
        return dataclasses.replace(rollout, spans=spans)

    for group in drawn(site):
        mixed = dataclasses.replace(group, rollouts=tuple(map(aged, group.rollouts)))
        masked = without_stale(mixed, oldest=1)

        assert all(
            rollout.num_drawn < whole.num_drawn for rollout, whole in zip(masked.rollouts, group.rollouts, strict=True)
        )
        assert judged(site, masked).is_sound
