"""How a completion ends is judged of every rollout: with the end token, or at the longest length."""

import dataclasses
import re

import numpy as np
import pytest

from heterorl.common.types.common import Digest, LoraSettings
from heterorl.common.types.rollout import DropReason, FinishReason, Group, GroupId, PushStatus, Span
from heterorl.common.wire.common_messages import contract_from_pb, contract_to_pb
from heterorl.common.wire.sealed_groups import columns_of
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups.validation import ending_problem
from heterorl.coordinator.versions.lineage import contract_difference, contract_remedy
from tests.support.clock import ManualClock
from tests.support.groups import group_to_pb
from tests.support.run import CONTRACT, INCARNATION, SITE, Run, rollout

GROUP = Group(
    id=GroupId(site=SITE, incarnation=INCARNATION, sequence=1), assignment=1, prompt_index=1,
    prompt_token_ids=np.array([3], np.int32), rollouts=(), oldest_version=0, state_root=Digest(""), generation_s=0.0,
)  # fmt: skip
END = 1
OTHER_END = 9
STATED = dataclasses.replace(CONTRACT, end_token_ids=(END,))
SEVERAL = dataclasses.replace(CONTRACT, end_token_ids=(END, OTHER_END))


def ending(ids, finish_reason, contract=STATED):
    """Of a run whose completions have at most 4 tokens."""
    two = rollout(0, token_ids=np.array(ids, np.int32), sampler_logprobs=-np.ones(len(ids), np.float32),
                  spans=(Span(version=3, start=0, end=len(ids)),), finish_reason=finish_reason)  # fmt: skip
    group = dataclasses.replace(GROUP, rollouts=(two, two))
    return ending_problem(columns_of(group_to_pb(group)), contract)


@pytest.mark.parametrize(
    ("ids", "finish_reason", "problem"),
    [
        ([5, 6, END], FinishReason.EOS, ""),
        ([END], FinishReason.EOS, ""),
        ([5, 6, 7, END], FinishReason.EOS, ""),
        ([5, 6, 7, 8], FinishReason.LENGTH, ""),
        ([5, 6, 7], FinishReason.LENGTH, "3 tokens without the end token 1"),
        ([5, 6, 7], FinishReason.EOS, "endings: rollout 0 says eos, its last token is 7"),
        ([5, 6, 7, END], FinishReason.LENGTH, "endings: rollout 0 says length, its last token is 1"),
        ([5, END, 7, 8], FinishReason.LENGTH, "before its end"),
        ([END, END], FinishReason.EOS, "before its end"),
    ],
)
def test_ending_is_plausible_or_named(ids, finish_reason, problem):
    found = ending(ids, finish_reason)

    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(
    ("ids", "finish_reason", "problem"),
    [
        ([5, 6, END], FinishReason.EOS, ""),
        ([5, 6, OTHER_END], FinishReason.EOS, ""),
        ([5, 6, 7, OTHER_END], FinishReason.LENGTH, "endings: rollout 0 says length, its last token is 9"),
        ([5, 6, 7], FinishReason.EOS, "endings: rollout 0 says eos, its last token is 7"),
        ([5, 6, 7], FinishReason.LENGTH, "3 tokens without the end token 1 or 9"),
        ([5, OTHER_END, 7, END], FinishReason.EOS, "rollout 0 has end token 9 before its end"),
        ([END, OTHER_END], FinishReason.EOS, "rollout 0 has end token 1 before its end"),
    ],
)
def test_any_of_several_end_tokens_ends_a_completion_and_no_other_does(ids, finish_reason, problem):
    found = ending(ids, finish_reason, SEVERAL)

    assert problem in found
    assert bool(found) == bool(problem)


def test_nothing_is_judged_in_a_run_whose_end_token_is_not_stated():
    assert ending([5, END, 7], FinishReason.LENGTH, CONTRACT) == ""


def test_other_end_tokens_are_a_difference():
    other = dataclasses.replace(STATED, end_token_ids=(2,))

    key = "sampling.end_token_ids (of model_dir where it is not set)"
    assert contract_difference(STATED, other) == f"{key}: the run has (1,), this node (2,)"
    assert contract_difference(SEVERAL, STATED) == f"{key}: the run has (1, 9), this node (1,)"
    assert contract_difference(STATED, CONTRACT) == f"{key}: the run has (1,), this node ()"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("min_members", "sampling.min_members (half of group_size where it is 0)"),
        ("max_turns", "task.max_turns (1 without an environment)"),
        ("max_trajectory_tokens", "sampling.max_trajectory_tokens"),
    ],
)
def test_what_differs_of_turns_and_members_is_named_as_the_configuration_does(name, key):
    offered = dataclasses.replace(CONTRACT, **{name: 3})

    found = contract_difference(CONTRACT, offered)

    assert found == f"{key}: the run has {getattr(CONTRACT, name)}, this node 3"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CONTRACT)])
def test_each_difference_of_a_site_has_a_remedy(name):
    changed = LoraSettings(rank=4, alpha=8.0, target_modules=("q",)) if name == "lora" else 3
    if name == "sampling":
        changed = dataclasses.replace(CONTRACT.sampling, top_k=3)
    difference = contract_difference(CONTRACT, dataclasses.replace(CONTRACT, **{name: changed}))

    assert re.match("set|copy", contract_remedy(difference))


def test_one_end_token_has_the_bytes_of_programs_that_know_no_more():
    message = contract_to_pb(STATED)

    assert (message.eos_token_id, list(message.end_token_ids)) == (END, [])
    assert contract_from_pb(message) == STATED
    # They judge no ending where they could only judge it wrongly.
    several = contract_to_pb(SEVERAL)
    assert not several.HasField("eos_token_id")
    assert contract_from_pb(several) == SEVERAL
    # Whoever states them in another order, or one of them twice.
    several.end_token_ids[:] = [OTHER_END, END, OTHER_END]
    assert contract_from_pb(several) == SEVERAL


async def test_group_with_a_cut_completion_is_dropped_and_its_prompt_handed_out_again(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    (tmp_path / "run").mkdir()
    run = Run(core, tmp_path / "run")
    run.contract = STATED
    await run.begin()
    await run.publish()
    await run.register()
    (work,) = await run.lease()
    cut = rollout(0, finish_reason=FinishReason.LENGTH, token_ids=np.array([5, 6, 7], np.int32))

    (outcome,) = await core.push_groups([run.group(work, rollouts=(rollout(0), cut))])

    assert (outcome.status, outcome.reason) == (PushStatus.DROPPED, DropReason.INVALID)
    assert "token_ids: rollout 1 has 3 tokens without the end token" in outcome.message
    assert work in [*await run.lease(33), *await run.lease()], "behind a version's worth of new ones"
    await core.close()
