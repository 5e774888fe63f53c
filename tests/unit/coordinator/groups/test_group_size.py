"""Every group that is accepted fits the message that takes it to the learner, and a run cannot begin where one may not."""

import dataclasses

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, InvalidRequest
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.rollout import DropReason, Group, GroupId, LeasedGroup, PushStatus
from heterorl.common.wire.rollout_messages import leased_to_pb
from heterorl.common.wire.sealed_groups import seal
from heterorl.coordinator.coordinator_config import GROUP_OVERHEAD_BYTES, CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import queue
from heterorl.coordinator.groups.validation import contract_problem, worst_bytes
from tests.support.clock import ManualClock
from tests.support.run import CONTRACT, INCARNATION, SITE, Run, credits_of, rollout

LIMIT = 2 << 20


async def _open(path, **changes):
    values = {"data_dir": path / "data", "groups_per_version": 2, "max_message_bytes": LIMIT, **changes}
    return await Coordinator.open(CoordinatorConfig(**values), ManualClock())


@pytest.fixture
async def run(tmp_path):
    # Prompts of any length, so that the size of the group is what is judged.
    core = await _open(tmp_path, max_prompt_tokens=LIMIT - (1 << 16))
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    yield run
    await core.close()


def _sized(run, work, num_bytes):
    """A group of exactly so many bytes, by the length of its prompt."""
    group = run.group(work)
    spare = num_bytes - len(seal(group).data)
    for missing in range(16):
        made = dataclasses.replace(group, prompt_token_ids=np.full(spare - missing, 3, np.int32))
        if len(seal(made).data) == num_bytes:
            return made
    raise AssertionError("no prompt makes this size")


async def test_group_at_the_bound_reaches_the_learner_within_one_message(run):
    (work,) = await run.lease(1)

    (outcome,) = await run.api.push_groups([_sized(run, work, LIMIT - (1 << 16))])

    assert outcome.status is PushStatus.ACCEPTED
    queued = await anext(run.api.stream_groups(epoch=run.epoch, held=(), credits=credits_of(1)))
    leased = LeasedGroup(
        sealed=seal(queued.group), policy_age_s=1e9, queue_age_s=1e9, seed=2**63 - 1, variant="f" * 256
    )
    assert len(leased_to_pb(leased).SerializeToString()) <= LIMIT


async def test_group_over_the_bound_is_refused_for_good_and_counted_and_its_prompt_goes_on(tmp_path):
    core = await _open(tmp_path, max_prompt_tokens=LIMIT - (1 << 16))
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    (work,) = await run.lease(1)

    (outcome,) = await core.push_groups([_sized(run, work, LIMIT - GROUP_OVERHEAD_BYTES + 1)])

    assert (outcome.status, outcome.reason) == (PushStatus.DROPPED, DropReason.INVALID)
    assert "fit max_message_bytes" in outcome.message
    status = await core.get_status()
    assert (status.ledger.acked, status.ledger.dropped) == (1, {DropReason.INVALID: 1})
    assert work in [*await run.lease(3), *await run.lease(1)]
    await core.close()


async def test_prompt_over_its_bound_is_refused_for_good(tmp_path):
    core = await _open(tmp_path, max_prompt_tokens=4)
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    await run.register()
    first, second = await run.lease(2)
    outcomes = await core.push_groups(
        [
            run.group(first, prompt_token_ids=np.full(4, 3, np.int32)),
            run.group(second, prompt_token_ids=np.full(5, 3, np.int32)),
        ]
    )
    await core.close()

    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED, PushStatus.DROPPED]
    assert "max_prompt_tokens is 4" in outcomes[1].message


async def test_group_of_a_larger_limit_is_dropped_before_the_learner_is_sent_it(run, monkeypatch):
    (first, second) = await run.lease(2)
    await run.api.push_groups([_sized(run, first, 1 << 20), run.group(second)])
    # The operator lowers the limit, and starts again.
    small = queue.Queue.of(dataclasses_config(run.api.config, max_message_bytes=1 << 20), run.api.context.queue.ring)
    run.api.rollout._context = dataclasses.replace(run.api.context, queue=small)

    stream = run.api.stream_groups(epoch=run.epoch, held=(), credits=credits_of(2))
    queued = await anext(stream)

    assert queued.group.assignment == second.id
    assert (await run.api.get_status()).ledger.dropped == {DropReason.INVALID: 1}


def dataclasses_config(config, **changes):
    return config.model_copy(update=changes)


def _contract(**sampling):
    return dataclasses.replace(
        CONTRACT, group_size=64, vocab_size=150_000, sampling=dataclasses.replace(CONTRACT.sampling, **sampling)
    )


@pytest.mark.parametrize(("tokens", "fits"), [(32_768, True), (40_000, False)])
def test_worst_group_of_a_contract_is_compared_with_the_limit(tokens, fits):
    problem = contract_problem(_contract(max_new_tokens=tokens), CoordinatorConfig())

    assert (problem == "") is fits
    if not fits:
        assert problem.startswith("max_message_bytes: 16777216 ")
        assert "64 rollouts of 40000 tokens" in problem


def test_worst_group_is_no_smaller_than_a_real_one():
    ids = np.full(500, 149_999, np.int32)
    one = rollout(2**40, token_ids=ids, sampler_logprobs=np.full(500, -0.5, np.float32))
    real = Group(
        id=GroupId(site=SITE, incarnation=INCARNATION, sequence=2**40), assignment=2**40, prompt_index=2**40,
        prompt_token_ids=ids[:100], rollouts=(one,) * 64, oldest_version=2**40, state_root="a" * 64, generation_s=1.0,
    )  # fmt: skip

    assert len(seal(real).data) <= worst_bytes(_contract(max_new_tokens=500), max_prompt_tokens=100)


async def test_learner_whose_groups_may_not_fit_is_refused_at_its_lease(tmp_path):
    core = await _open(tmp_path)
    with pytest.raises(
        InvalidRequest, match=r"max_message_bytes: 2097152 .*raise max_message_bytes at the coordinator"
    ):
        await core.acquire_lease(holder="learner", contract=_contract(max_new_tokens=40_000), request_id="r")
    with pytest.raises(InvalidRequest, match=r"contract.group_size: 5000"):
        await core.acquire_lease(
            holder="learner", contract=dataclasses.replace(CONTRACT, group_size=5000), request_id="r"
        )
    assert (await core.get_status()).epoch == 0
    await core.close()


async def test_coordinator_whose_limit_became_too_small_does_not_start(tmp_path):
    core = await _open(tmp_path, max_message_bytes=64 << 20)
    await core.acquire_lease(holder="learner", contract=_contract(max_new_tokens=40_000), request_id="r")
    await core.close()

    with pytest.raises(ConfigError, match="max_message_bytes") as refused:
        await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), SystemClock())
    assert refused.value.key == "max_message_bytes"
