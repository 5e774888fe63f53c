"""Numbers of steps and versions as operators see them."""

import dataclasses
import math

from heterorl.common.process.metrics import REGISTRY
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import Manifest, PayloadKind, PayloadRef
from heterorl.learner.observe import observe_start, observe_step, observe_version
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
    assert shown("version_encode_seconds") == 0.25
    assert shown("versions_total", kind="delta") == before["delta"] + 1
    observe_version(full, encode_s=0.5, publish_s=0.1)
    assert shown("versions_total", kind="snapshot") == before["snapshot"] + 1
    assert shown("compression_ratio") == 1000 / 900, "of what is pulled, not of an older delta"
