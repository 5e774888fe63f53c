"""The envelope of sequence log-ratios: what is outside is not trained on, and the step takes other groups."""

import asyncio
import dataclasses
import random
from types import SimpleNamespace

import numpy as np

from heterorl.common.model import tensors
from heterorl.common.process.backoff import Backoff
from heterorl.common.types.rollout import DropReason
from heterorl.common.weights.arena import Arena
from heterorl.learner.run.inbox import Inbox
from heterorl.learner.run.training_loop import TrainingLoop
from heterorl.learner.step_metrics import StepTimer
from tests.support.clock import ManualClock
from tests.support.learner_world import GRANT, learner_config, queued
from tests.support.training import tiny_model


class Api:
    def __init__(self):
        self.rejected = []
        self.is_told = asyncio.Event()

    async def reject_groups(self, *, epoch, rejections):
        self.rejected += rejections
        self.is_told.set()


def selection_of(tmp_path, api, inbox, **verification):
    model = tiny_model()
    published = Arena(tensors.layout_of(model, "bf16"))
    tensors.store(model, published)
    return TrainingLoop(
        config=learner_config(tmp_path, verification=verification), api=api,
        backend=SimpleNamespace(torch_model=model),
        publisher=SimpleNamespace(position=SimpleNamespace(shadow=published, head_version=0)), inbox=inbox,
        backoff=Backoff(clock=ManualClock(), rng=random.Random(0), base_s=1.0, cap_s=1.0),
        progress=StepTimer(clock=ManualClock()), grant=GRANT, evaluator=None, step=0,
    )  # fmt: skip


async def take(selection, count):
    return await selection.take(count, head=0, weights=selection.publisher.position.shadow)


def improbable(entry):
    rollouts = tuple(
        dataclasses.replace(rollout, sampler_logprobs=np.full(rollout.token_ids.size, -1000.0, np.float32))
        for rollout in entry.group.rollouts
    )
    return dataclasses.replace(entry, group=dataclasses.replace(entry.group, rollouts=rollouts))


async def filled(groups):
    inbox = Inbox(8)
    inbox.open_stream()
    for group in groups:
        await inbox.put(group)
    return inbox


async def test_groups_outside_the_envelope_are_rejected_and_replaced(tmp_path):
    api = Api()
    inbox = await filled([queued(1), improbable(queued(2)), queued(3)])

    # Random weights of 50 tokens against made-up log-probs: ratios of some nats; 1000 is far outside.
    taken = await take(selection_of(tmp_path, api, inbox, max_log_ratio=100.0), 2)

    assert [entry.group.id.sequence for entry in taken] == [1, 3]
    (rejected,) = api.rejected
    assert (rejected.id.sequence, rejected.reason) == (2, DropReason.LOGPROB_MISMATCH)
    assert "mean log-ratio" in rejected.detail
    assert {group_id.sequence for group_id in inbox.held} == {1, 3}


async def test_without_an_envelope_nothing_is_computed(tmp_path):
    api = Api()
    selection = selection_of(tmp_path, api, await filled([improbable(queued(1)), queued(2)]))
    selection.backend = None

    assert len(await take(selection, 2)) == 2
    assert api.rejected == []


async def test_wait_for_replacements_ends_with_the_inbox(tmp_path):
    inbox, api = await filled([queued(1), improbable(queued(2))]), Api()
    waiting = asyncio.create_task(take(selection_of(tmp_path, api, inbox, max_log_ratio=100.0), 2))
    await api.is_told.wait()
    await inbox.close()

    assert await waiting == []
