"""Numbers of steps and versions as operators see them."""

import dataclasses
import math

import pytest

from heterorl.common.process.metrics import REGISTRY
from heterorl.common.types.common import CompletionNumbers, Digest, PartMean, SiteTokens, SourceReport
from heterorl.common.types.policy import Manifest, PayloadKind, PayloadRef
from heterorl.learner.step_metrics import observe_start, observe_step, observe_version
from tests.support.learner_world import queued
from tests.support.run import REPORT


def shown(name, **labels):
    return REGISTRY.get_sample_value(f"heterorl_learner_{name}", labels)


def test_before_the_first_step_numbers_are_unknown_and_counters_exist():
    observe_start()

    assert math.isnan(shown("ess_ratio"))
    assert math.isnan(shown("reward_mean"))
    assert shown("steps_total", applied="false") is not None
    assert shown("last_step_timestamp_seconds") > 1_700_000_000


def test_age_of_a_trained_group_includes_its_time_in_the_learner():
    group = dataclasses.replace(queued(1), policy_age_s=20.0)
    site = group.group.id.site
    ages = shown("policy_age_seconds_sum", site=site) or 0.0
    staleness = shown("staleness_versions_sum", site=site) or 0.0

    observe_step(REPORT, [group], head_version=group.group.oldest_version + 3, held_s=[1.5])

    assert shown("policy_age_seconds_sum", site=site) == ages + 21.5
    assert shown("staleness_versions_sum", site=site) == staleness + 3
    assert shown("ess_ratio") == REPORT.ess_fraction


def test_curves_of_a_step_are_shown_and_parts_that_are_gone_are_not():
    numbers = CompletionNumbers(
        length_mean=5.0, length_p95=7.5, length_max=8, length_low_reward=4.0, truncated_fraction=0.25,
        uniform_fraction=0.5, reward_parts=(PartMean(name="right", mean=0.75),),
        sites=(SiteTokens(site="eu-1", num_groups=2, num_tokens=20),),
    )  # fmt: skip
    tokens = shown("site_tokens_total", site="eu-1") or 0.0

    observe_step(dataclasses.replace(REPORT, completions=numbers), [], head_version=0, held_s=[])

    assert [shown("completion_tokens", stat=stat) for stat in ("mean", "p95", "max", "low_reward")] == [5, 7.5, 8, 4]
    assert math.isnan(shown("completion_tokens", stat="high_reward"))
    assert (shown("truncated_ratio"), shown("equal_reward_groups_ratio")) == (0.25, 0.5)
    assert shown("reward_part_mean", part="right") == 0.75
    assert shown("site_tokens_total", site="eu-1") == tokens + 20
    observe_step(
        dataclasses.replace(REPORT, completions=dataclasses.replace(numbers, reward_parts=())), [], head_version=0,
        held_s=[],
    )  # fmt: skip
    assert shown("reward_part_mean", part="right") is None


@pytest.mark.parametrize("is_applied", [True, False])
def test_groups_count_as_trained_where_their_step_was_applied(is_applied):
    group = queued(1)
    site = group.group.id.site
    numbers = CompletionNumbers(
        length_mean=5.0, length_p95=7.5, length_max=8, length_low_reward=4.0, truncated_fraction=0.25,
        uniform_fraction=0.5, reward_parts=(), sites=(SiteTokens(site=site, num_groups=1, num_tokens=20),),
    )  # fmt: skip
    sources = (SourceReport(label="sums", num_groups=1, reward_mean=0.5),)
    report = dataclasses.replace(REPORT, completions=numbers, sources=sources, is_applied=is_applied)

    def counts():
        found = [
            REGISTRY.get_sample_value("heterorl_tokens_total"),
            shown("site_tokens_total", site=site),
            shown("source_groups_total", source="sums"),
            shown("staleness_versions_count", site=site),
            shown("inbox_seconds_count"),
        ]
        return [value or 0.0 for value in found]

    before = counts()
    observe_step(report, [group], head_version=3, held_s=[1.0])

    added = [after - one for after, one in zip(counts(), before, strict=True)]
    assert added == ([REPORT.num_tokens, 20, 1, 1, 1] if is_applied else [0] * 5)


def test_metrics_of_a_loss_are_shown_and_those_that_are_gone_are_not():
    observe_step(REPORT, [], head_version=0, held_s=[], metrics_of_loss={"drift": 0.5})
    assert shown("loss_metric_mean", metric="drift") == 0.5

    observe_step(REPORT, [], head_version=0, held_s=[])
    assert shown("loss_metric_mean", metric="drift") is None


def test_version_shows_what_its_delta_saved():
    delta = PayloadRef(
        kind=PayloadKind.DELTA, from_version=3, to_version=4, digest=Digest("a" * 64), num_bytes=50
    )  # fmt: skip
    snapshot = dataclasses.replace(delta, kind=PayloadKind.SNAPSHOT, from_version=-1, num_bytes=900)
    manifest = Manifest(
        run_id="run", epoch=1, version=4, parent_version=3, parent_digest="b" * 64, layout_id=Digest("c" * 64),
        chunk_digests=(), state_root=Digest("d" * 64), step=4, num_changed=25, num_elements=500, full_bytes=1000,
        payloads=(delta, snapshot),
    )  # fmt: skip

    before = {kind: shown("versions_total", kind=kind) or 0.0 for kind in ("delta", "snapshot")}

    observe_version(manifest, encode_s=0.25, publish_s=0.1)
    full = dataclasses.replace(manifest, payloads=(snapshot,))

    assert shown("version") == 4
    assert shown("version_bytes", kind="delta") == 50
    assert shown("version_bytes", kind="snapshot") == 900
    assert shown("compression_ratio") == 20.0
    assert shown("changed_ratio") == 0.05
    assert shown("versions_total", kind="delta") == before["delta"] + 1
    observe_version(full, encode_s=0.5, publish_s=0.1)
    assert shown("versions_total", kind="snapshot") == before["snapshot"] + 1
    assert shown("compression_ratio") == 1000 / 900, "of what is pulled, not of an older delta"
