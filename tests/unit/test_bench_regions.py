"""The benchmark of far regions: keys of its arms, bytes of its schemes, its engine's clock, shares and goals."""

import json

import numpy as np
import pytest

from benchmarks.regions.__main__ import document_of, rows_to_keep
from benchmarks.regions.arms import (
    ARMS,
    GROUPS_PER_VERSION,
    ONE,
    SITES,
    keys_of,
    lengths_of,
    order_of,
    scheme_bytes,
    version_s,
)
from benchmarks.regions.engine import length_of, versions_of
from benchmarks.regions.learner import sparse_bytes
from benchmarks.regions.picture import draw
from benchmarks.regions.summary import goals_of, percentile, ratios, summaries
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from tests.support.wan_link import QUEUE_S, Way

BY_NAME = {arm.name: arm for arm in ARMS}


def test_only_the_outage_has_more_room_and_a_wider_bound():
    plain = keys_of(BY_NAME["heterorl"], staleness=16, outage_s=200.0)
    cut = keys_of(BY_NAME["outage"], staleness=16, outage_s=200.0)

    assert plain == {"max_staleness_versions": 16, "max_outstanding_groups": 4 * GROUPS_PER_VERSION}
    assert cut["max_staleness_versions"] >= 16 + 200 / version_s()
    # What one site makes meanwhile is its equal share at most.
    assert cut["max_outstanding_groups"] / len(SITES) > 200 / version_s() * GROUPS_PER_VERSION / len(SITES)


def test_a_slow_region_lowers_the_capacity():
    assert BY_NAME["slow"].capacity == pytest.approx(0.775)
    assert {arm.capacity for arm in ARMS if arm.name != "slow"} == {1.0}


def test_bytes_of_a_scheme():
    sizes = [{"version": number, "full": 1000, "sparse": 10 + number} for number in range(1, 6)]

    assert scheme_bytes("full", sizes, have=1, want=4) == 1000
    assert scheme_bytes("sparse", sizes, have=1, want=4) == 12 + 13 + 14


def test_positions_and_values_are_counted():
    layout = Layout.build([TensorSpec(name="w", dtype="bf16", shape=(100_000,))])
    old, few, many = Arena(layout), Arena(layout), Arena(layout)
    rng = np.random.default_rng(0)
    for arena, count in ((few, 100), (many, 10_000)):
        arena.chunk(0)[rng.choice(100_000, count, replace=False)] = rng.integers(1, 30_000, count)

    assert sparse_bytes(old, few) < sparse_bytes(old, many) < 2 * 100_000
    # Two bytes of position and two of value at most, and a header.
    assert 10_000 < sparse_bytes(old, many) < 4 * 10_000 + 100


@pytest.mark.parametrize(("minutes", "repeats"), [(30, 3), (5, 1), (170, 3)])
def test_all_runs_fit_into_the_minutes(minutes, repeats):
    lengths = lengths_of(minutes, repeats, num_arms=len(ARMS), outage_s=None)

    assert lengths.span_s * repeats * len(ARMS) < 60 * minutes
    assert lengths.outage_s <= 200
    assert lengths_of(170, 3, num_arms=len(ARMS), outage_s=None).outage_s == 200
    assert lengths_of(minutes, repeats, num_arms=len(ARMS), outage_s=7).outage_s == 7


def test_each_repeat_begins_with_another_arm():
    orders = [[arm.name for arm in order_of(repeat, ARMS)] for repeat in range(3)]

    assert len({order[0] for order in orders}) == 3
    assert [sorted(order) for order in orders] == [sorted(BY_NAME)] * 3


def test_lengths_follow_the_seed_alone():
    lengths = [length_of(seed, 0) for seed in range(2000)]

    assert lengths == [length_of(seed, 0) for seed in range(2000)]
    assert 70 < np.median(lengths) < 90
    assert max(lengths) == 192


def test_each_token_has_the_version_that_was_loaded():
    found = versions_of(10.0, 5, 1.0, [(0.0, 3), (12.5, 4), (14.0, 6)])

    assert found.tolist() == [3, 3, 4, 4, 6]


def test_a_line_sends_one_packet_after_another_and_loses_what_waits_too_long():
    way = Way(1000.0)

    assert way.leave(100, 5.0) == pytest.approx(5.1)
    assert way.leave(150, 5.0) == pytest.approx(5.25)
    assert way.leave(100, 5.0) is None
    assert way.leave(100, 5.25 - QUEUE_S + 0.001) == pytest.approx(5.35)
    assert Way(0.0).leave(100, 5.0) == 5.0


def row(arm, repeat, tokens, *, num_bytes=0, dropped=None):
    numbers = dict.fromkeys(
        ("learner_waits", "learner_publishes", "swap_s", "staleness_p50", "staleness_p95", "busy_cores", "own_cores"),
        1.0,
    )
    return {
        "arm": arm, "repeat": repeat, "tokens_per_s": tokens, "trained_tokens_per_s": tokens / 2, **numbers,
        "bytes_per_version": dict.fromkeys(SITES, num_bytes), "dropped": dropped or {},
        "schemes": {"full": 1200, "sparse": 13, "ours": 10},
    }  # fmt: skip


ROWS = [
    row(ONE, 0, 100.0), row(ONE, 1, 200.0), row("heterorl", 0, 97.0, num_bytes=10),
    row("heterorl", 1, 194.0, num_bytes=10), row("full", 0, 60.0, num_bytes=1200, dropped={"stale": 2}),
    row("full", 1, 100.0, num_bytes=1200, dropped={"stale": 3}), row("sparse", 0, 90.0, num_bytes=13),
    row("slow", 0, 77.5, num_bytes=10),
]  # fmt: skip


def test_a_share_is_of_the_one_site_run_of_its_repeat():
    found = {one["arm"]: one for one in summaries(ROWS)}

    assert ratios(ROWS, "heterorl", "tokens_per_s") == [0.97, 0.97]
    assert found["full"]["share"] == {"mean": 0.55, "min": 0.5, "max": 0.6}
    assert found["full"]["dropped"] == {"stale": 5}
    assert found["slow"]["share_of_capacity"] == pytest.approx(1.0)
    assert "outage" not in found


def test_goals_are_reached_or_missed_or_open():
    goals = {one["what"]: one for one in goals_of(summaries(ROWS))}

    assert goals["heterorl: share of one site"]["is_reached"] is True
    assert goals["outage: share of one site"]["is_reached"] is None
    assert goals["bytes of a version: full snapshot over ours"]["number"] == 120
    assert goals["bytes of a version: positions and values over ours"]["is_reached"] is False


def test_a_percentile_without_values():
    assert percentile([], 0.5) == -1.0
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(range(100), 0.95) == 95


def test_an_unfinished_file_of_the_same_settings_is_continued(tmp_path):
    path, settings = tmp_path / "regions.json", {"repeats": 2, "arms": list(BY_NAME)}
    path.write_text(json.dumps(document_of(settings, ROWS)))

    assert rows_to_keep(path, settings) == ROWS
    assert rows_to_keep(path, {**settings, "repeats": 3}) == []
    assert rows_to_keep(tmp_path / "none.json", settings) == []
    path.write_text(json.dumps({**document_of(settings, ROWS), "is_complete": True}))
    assert rows_to_keep(path, settings) == []


def test_the_picture_is_drawn_from_any_arms(tmp_path):
    draw({"summaries": summaries(ROWS)}, tmp_path / "regions.png")

    assert (tmp_path / "regions.png").stat().st_size > 10_000
