"""What a site or a coordinator that means harm may send to a learner, and what becomes of it."""

import asyncio
import dataclasses
import math
import random

import numpy as np
import pytest

from heterorl.common.errors import StateMismatch
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.policy import PayloadKind, PayloadRef, SignedManifest
from heterorl.common.types.rollout import MAX_PART_VALUE, RewardPart
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.common.wire.policy_messages import manifest_from_bytes, manifest_to_bytes
from heterorl.learner.checks.verifier import MAX_REWARD, Limits, judge
from heterorl.learner.publish.version_payloads import upload
from heterorl.learner.run.inbox import Inbox
from heterorl.learner.run.state_directory import MAX_RENEWAL_S, MIN_RENEWAL_S, renewal_s
from heterorl.learner.step_metrics import TrainingLog
from tests.support.learner_world import (
    GROUP_SIZE,
    VOCAB,
    FragileApi,
    fill,
    learn,
    learner_config,
    make_group,
    open_coordinator,
    queued,
)

LIMITS = Limits(group_size=GROUP_SIZE, vocab_size=VOCAB, max_sequence_tokens=0)


def _rewarded(*rewards):
    group = make_group(1)
    rollouts = tuple(
        dataclasses.replace(rollout, reward=reward) for rollout, reward in zip(group.rollouts, rewards, strict=True)
    )
    return dataclasses.replace(group, rollouts=rollouts)


@pytest.mark.parametrize("reward", [1.1 * MAX_REWARD, -1e300, math.inf, math.nan])
def test_group_with_an_absurd_reward_is_not_trained_on(reward):
    """One of them makes the step of all sites not finite, and ten such steps in a row end the learner."""
    assert "a reward of" in judge(_rewarded(0.0, reward), LIMITS).detail
    assert judge(_rewarded(0.0, -MAX_REWARD), LIMITS).is_sound


@pytest.mark.parametrize("value", [1.1 * MAX_PART_VALUE, -1e308, math.inf, math.nan])
def test_group_with_an_absurd_part_is_not_trained_on(value):
    """A part of weight 0 is no reward, and its mean is reported with the step."""
    group = _rewarded(0.0, 0.0)
    measured = (RewardPart(name="off\n", value=value, weight=0.0),)
    first = dataclasses.replace(group.rollouts[0], reward_parts=measured)
    detail = judge(dataclasses.replace(group, rollouts=(first, *group.rollouts[1:])), LIMITS).detail
    assert detail == f"a value of {value:g} of the reward's part off ; at most 1e+15 is taken"

    largest = dataclasses.replace(first, reward_parts=(dataclasses.replace(measured[0], value=-MAX_PART_VALUE),))
    assert judge(dataclasses.replace(group, rollouts=(largest, *group.rollouts[1:])), LIMITS).is_sound


def test_group_is_not_trained_on_where_the_advantage_is_not_defined_for_its_rewards():
    """The step would raise, the learner end, the group return to the queue and be leased first to the next learner."""
    unit = dataclasses.replace(LIMITS, has_unit_rewards=True)

    assert "outside [0, 1]" in judge(_rewarded(0.0, 1.5), unit).detail
    assert judge(_rewarded(0.0, 1.0), unit).is_sound
    assert judge(_rewarded(0.0, 1.5), LIMITS).is_sound


def test_group_that_cannot_become_a_batch_is_not_trained_on():
    group = make_group(1)
    first = dataclasses.replace(group.rollouts[0], sampler_logprobs=np.zeros(0, np.float32))

    assert "log-prob" in judge(dataclasses.replace(group, rollouts=(first, *group.rollouts[1:])), LIMITS).detail
    assert "prompt" in judge(dataclasses.replace(group, prompt_token_ids=np.zeros(0, np.int32)), LIMITS).detail


async def test_group_without_a_credit_takes_no_memory():
    inbox = Inbox(4)
    inbox.open_stream()

    for sequence in range(1, 100):
        await inbox.put(queued(sequence))

    assert len(inbox._waiting) == 4
    assert [group_id.sequence for group_id in inbox.held] == [1, 2, 3, 4]


@pytest.mark.parametrize("ttl_s", [0.0, -5.0, 1e-9, 1e308, math.inf, math.nan])
def test_renewal_is_neither_hot_nor_never(ttl_s):
    assert MIN_RENEWAL_S <= renewal_s(ttl_s) <= MAX_RENEWAL_S
    assert renewal_s(9.0) == 3.0


async def test_upload_that_brings_nothing_is_not_repeated_without_a_pause(tmp_path):
    path = tmp_path / "payload"
    path.write_bytes(b"x" * 100)
    slept = []

    class Waiting(SystemClock):
        async def sleep(self, seconds):
            slept.append(seconds)

    class Deaf:
        calls = 0

        async def query_upload(self, *, digest):
            return 100 if self.calls == 5 else 0

        async def upload_payload(self, **values):
            self.calls += 1
            return 0

    payload = PayloadRef(
        kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=0, digest=bytes_digest(path.read_bytes()), num_bytes=100
    )
    backoff = Backoff(clock=Waiting(), rng=random.Random(0), base_s=1.0, cap_s=8.0)

    await upload(Deaf(), payload, path, epoch=1, backoff=backoff)

    assert len(slept) == 4, "before each upload but the first"


async def test_head_that_is_not_what_the_checkpoint_published_is_not_continued(tmp_path):
    """A coordinator restored from an old copy, or one that lies: its version of that number is another."""
    core = await open_coordinator(tmp_path)
    config = learner_config(tmp_path, max_steps=1)
    await fill_and_learn(core, config)

    class Other(FragileApi):
        def __getattr__(self, name):
            call = super().__getattr__(name)
            if name != "get_signed_manifest":
                return call

            async def other(**values):
                signed = await call(**values)
                manifest = dataclasses.replace(manifest_from_bytes(signed.data), state_root="0" * 64)
                return SignedManifest(data=manifest_to_bytes(manifest), signature=signed.signature)

            return other

    with pytest.raises(StateMismatch, match="restored from a backup"):
        await learn(config, Other(core))
    await core.close()


async def fill_and_learn(core, config):
    await asyncio.gather(learn(config, core), fill(core, 2))


@pytest.mark.parametrize(
    "row",
    ['{"version": Infinity}', '{"version": 1e400}', '{"version": NaN}', "[" * 100_000, "7"],
    ids=lambda row: row[:30],
)
def test_last_row_of_another_program_is_left_out(tmp_path, row):
    (tmp_path / "versions.jsonl").write_text(f"{row}\n")

    assert TrainingLog(tmp_path).last_version == -1


async def test_row_that_a_disk_has_damaged_does_not_keep_the_learner_from_starting(tmp_path):
    core = await open_coordinator(tmp_path)
    config = learner_config(tmp_path, max_steps=1)
    await fill_and_learn(core, config)
    path = config.state_dir / "versions.jsonl"
    path.write_bytes(b"\0\xff\0\n7\n" + path.read_bytes() + b"7\n")

    assert (await learn(config, core)).version == 1
    assert TrainingLog(config.state_dir).last_version == 1
    await core.close()
