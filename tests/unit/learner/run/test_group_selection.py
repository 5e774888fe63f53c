"""Groups of equal rewards make room for others, up to the bound of a step."""

import dataclasses
import random
from types import SimpleNamespace

from heterorl.common.process.backoff import Backoff
from heterorl.common.types.rollout import DropReason, Span
from heterorl.learner.run.inbox import Inbox
from heterorl.learner.run.training_loop import TrainingLoop
from heterorl.learner.sample_notes import SampleNotes
from heterorl.learner.step_metrics import StepTimer
from tests.support.clock import ManualClock
from tests.support.learner_world import GRANT, learner_config, queued


class Api:
    """Notes what it is told, and hands the inbox the groups that then come."""

    def __init__(self, inbox, coming):
        self.inbox, self.coming, self.told = inbox, list(coming), []

    async def abandon_groups(self, *, epoch, ids, reason, counted_as):
        self.told.append(([group_id.sequence for group_id in ids], counted_as, reason))
        for _ in ids:
            if self.coming:
                await self.inbox.put(self.coming.pop(0))


class Noted(SampleNotes):
    def __init__(self):
        self.numbers = []

    def abandoned(self, groups):
        self.numbers += [queued.group.id.sequence for queued in groups if queued.wants_note]


def uniform(sequence, **changes):
    entry = queued(sequence)
    rollouts = tuple(dataclasses.replace(rollout, reward=1.0) for rollout in entry.group.rollouts)
    return dataclasses.replace(entry, group=dataclasses.replace(entry.group, rollouts=rollouts), **changes)


async def selection_of(tmp_path, groups, *, room, coming=(), head=0, notes=None, **bounds):
    inbox = Inbox(8)
    inbox.open_stream()
    for group in groups:
        await inbox.put(group)
    return TrainingLoop(
        config=learner_config(tmp_path, dynamic_sampling={"max_replaced_per_step": room}), api=Api(inbox, coming),
        backend=None, publisher=SimpleNamespace(position=SimpleNamespace(head_version=head)), inbox=inbox,
        backoff=Backoff(clock=ManualClock(), rng=random.Random(0), base_s=1.0, cap_s=1.0),
        progress=StepTimer(clock=ManualClock()), grant=dataclasses.replace(GRANT, **bounds),
        notes=notes or SampleNotes(), evaluator=None, step=0,
    )  # fmt: skip


def numbers(groups):
    return [entry.group.id.sequence for entry in groups]


async def test_step_keeps_its_size_and_its_order_when_groups_are_replaced(tmp_path):
    selection = await selection_of(
        tmp_path, [uniform(1), queued(2), uniform(3, wants_note=True)], room=10, notes=Noted(),
        coming=[uniform(4), queued(5), queued(6)],
    )  # fmt: skip

    taken = await selection.take(3, head=0)

    assert numbers(taken) == [2, 5, 6]
    reason = "all rewards are equal; step 1 takes other groups"
    assert selection.api.told == [([1, 3], DropReason.UNIFORM, reason), ([4], DropReason.UNIFORM, reason)]
    assert selection.num_replaced == 3
    assert selection.notes.numbers == [3], "a text is sent of what may be kept alone"
    assert [group_id.sequence for group_id in selection.inbox.held] == [2, 5, 6]


async def test_step_trains_on_equal_rewards_beyond_its_bound_and_the_next_one_counts_anew(tmp_path):
    selection = await selection_of(tmp_path, [uniform(1), uniform(2)], room=1, coming=[uniform(3)])

    first = await selection.take(2, head=0)
    assert (numbers(first), selection.num_replaced) == ([2, 3], 1)

    for sequence in (4, 5):
        await selection.inbox.put(uniform(sequence))
    selection.api.coming = [queued(6)]
    second = await selection.take(2, head=0)
    assert (numbers(second), selection.num_replaced) == ([5, 6], 1)


async def test_nothing_is_replaced_by_default(tmp_path):
    selection = await selection_of(tmp_path, [uniform(1), uniform(2)], room=0)

    assert numbers(await selection.take(2, head=0)) == [1, 2]
    assert (selection.api.told, selection.num_replaced) == ([], 0)


async def test_group_that_is_too_old_counts_as_that_whatever_its_rewards(tmp_path):
    selection = await selection_of(
        tmp_path, [uniform(1)], room=5, coming=[queued(2)], head=3, max_staleness_versions=2
    )  # fmt: skip
    selection.api.coming = [
        dataclasses.replace(entry, group=dataclasses.replace(entry.group, oldest_version=3))
        for entry in selection.api.coming
    ]

    assert numbers(await selection.take(1, head=3)) == [2]
    assert [(told[0], told[1]) for told in selection.api.told] == [([1], DropReason.STALE_AT_COMMIT)]
    assert selection.num_replaced == 0


def aged(sequence, *versions):
    """Rollouts whose last token is of the given versions, and whose others are of version 0."""
    entry = queued(sequence)
    rollouts = []
    for rollout, version in zip(entry.group.rollouts, versions, strict=True):
        last = rollout.token_ids.size
        spans = [Span(version=0, start=0, end=last - 1), Span(version=version, start=last - 1, end=last)]
        rollouts.append(dataclasses.replace(rollout, spans=tuple(span for span in spans if span.start < span.end)))
    group = dataclasses.replace(entry.group, rollouts=tuple(rollouts), oldest_version=0)
    return dataclasses.replace(entry, group=group)


async def test_stale_tokens_leave_a_group_and_a_group_with_too_few_members_left_is_given_up(tmp_path):
    size = len(queued(1).group.rollouts)
    selection = await selection_of(
        tmp_path, [aged(1, *[5] * size), aged(2, *[5] * (size - 1), 0), aged(3, *[0] * size), queued(4)], room=0, head=5,
        coming=[aged(5, *[4] * size)], max_staleness_versions=2, masks_stale=True,
    )  # fmt: skip
    selection.config = learner_config(tmp_path, sampling={"min_members": size})

    taken = await selection.take(2, head=5)

    assert numbers(taken) == [1, 5]
    assert [[rollout.num_drawn for rollout in entry.group.rollouts] for entry in taken] == [[1] * size] * 2
    assert [entry.group.oldest_version for entry in taken] == [5, 4]
    assert [told[0] for told in selection.api.told] == [[2], [3], [4]]
