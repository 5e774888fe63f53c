"""A group whose rollouts span versions is as old as its oldest token, by versions and by digest."""

from dataclasses import replace

import numpy as np
import pytest

from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import DropReason, FinishReason, Group, GroupId, Span
from heterorl.common.wire.sealed_groups import columns_of, seal
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups.validation import MAX_SWAPS, SPANS_OF_TURN, Facts, content_problem, judge
from tests.support.groups import group_to_pb
from tests.support.run import CONTRACT, INCARNATION, SITE, rollout

ROOT = Digest("a" * 64)
MIXED = (Span(version=3, start=0, end=1), Span(version=8, start=1, end=3))


@pytest.mark.parametrize(
    ("bound", "head", "oldest", "mask_stale", "expected"),
    [
        (7, 10, 3, False, None),
        # 11 - 3 = 8, though most tokens are 3 versions old
        (7, 11, 3, False, DropReason.STALE_AT_INGEST),
        (7, 10, 8, False, DropReason.INVALID),
        # the newest token is of a version that does not exist yet
        (7, 7, 3, False, DropReason.UNKNOWN_VERSION),
        # The youngest token counts where older ones are masked: 15 - 8 = 7, and 16 - 8 = 8.
        (7, 15, 3, True, None),
        (7, 16, 3, True, DropReason.STALE_AT_INGEST),
    ],
)
def test_staleness_counts_from_the_oldest_token_unless_stale_ones_are_masked(bound, head, oldest, mask_stale, expected):
    group = Group(
        id=GroupId(site=SITE, incarnation=INCARNATION, sequence=1), assignment=1, prompt_index=7,
        prompt_token_ids=np.array([2, 3], np.int32), rollouts=(rollout(8), rollout(8, spans=MIXED)),
        oldest_version=oldest, state_root=ROOT, generation_s=0.1,
    )  # fmt: skip
    facts = Facts(
        head_version=head, superseded_s=1.0, state_root=ROOT, assignment_prompt=7, is_answered=False
    )  # fmt: skip
    config = CoordinatorConfig(max_staleness_versions=bound, max_superseded_s=60.0, mask_stale=mask_stale)

    message = content_problem(columns_of(group_to_pb(group)), CONTRACT, max_prompt_tokens=9)
    reason, message = (DropReason.INVALID, message) if message else judge(seal(group), facts, config)

    assert reason is expected, message


@pytest.mark.parametrize("over", [0, 1])
def test_spans_of_a_rollout_are_bounded(over):
    """A span of each token made a group about 20 times as large in the learner."""
    count = SPANS_OF_TURN + MAX_SWAPS + over
    spans = tuple(Span(version=3 + number % 2, start=number, end=number + 1) for number in range(count))
    many = replace(
        rollout(3), token_ids=np.full(count, 3, np.int32), sampler_logprobs=np.zeros(count, np.float32), spans=spans,
        finish_reason=FinishReason.LENGTH,
    )  # fmt: skip
    contract = replace(
        CONTRACT,
        end_token_ids=(),
        max_trajectory_tokens=count,
        sampling=replace(CONTRACT.sampling, max_new_tokens=count),
    )
    group = Group(
        id=GroupId(site=SITE, incarnation=INCARNATION, sequence=1), assignment=1, prompt_index=7,
        prompt_token_ids=np.array([2, 3], np.int32), rollouts=(many, many), oldest_version=3, state_root=ROOT,
        generation_s=0.1,
    )  # fmt: skip

    problem = content_problem(columns_of(group_to_pb(group)), contract, max_prompt_tokens=9)

    assert problem == (f"span_counts: rollout 0 has {count} spans, at most {count - 1}" if over else "")
