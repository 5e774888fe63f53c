"""Notes beside the training: of what was kept, once it is settled; whatever goes wrong with them, nothing waits."""

import asyncio
import dataclasses

import numpy as np
import pytest

from heterorl.common.errors import StaleEpoch
from heterorl.common.process.metrics import SAMPLE_NOTES
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import FinishReason
from heterorl.common.types.sample import EvaluationSample, SampleNote, SampleRollout
from heterorl.learner import sample_notes as module
from heterorl.learner.sample_notes import SampleNotes
from tests.support.learner_world import queued

NUMBERS = {"reward": 1.0, "reward_parts": (), "finish_reason": FinishReason.EOS}


class FakeReader:
    """Makes a note of no text; fails where it is told."""

    def __init__(self, problem=None):
        self.problem = problem
        self.ratios = []

    def note(self, group, ratios, *, limit_bytes):
        self.ratios.append(dict(ratios))
        if self.problem is not None:
            raise self.problem
        return SampleNote(group=group.id, prompt="", rollouts=())


class FakeApi:
    """Remembers notes; refuses where it is told."""

    def __init__(self, problem=None):
        self.problem = problem
        self.sent = []

    async def note_samples(self, *, epoch, notes, evaluations=()):
        if self.problem is not None:
            raise self.problem
        self.sent += [(epoch, note.group) for note in notes]
        self.sent += [(epoch, len(evaluations))] if evaluations else []


def wanted(sequence):
    return dataclasses.replace(queued(sequence), wants_note=True)


def outcomes():
    return {name: SAMPLE_NOTES.labels(name)._value.get() for name in ("sent", "given_up")}


@pytest.fixture
async def start():
    tasks = []

    def begin(notes):
        tasks.append(asyncio.create_task(notes.run()))
        return notes

    yield begin
    for task in tasks:
        assert not task.done(), "a note ended the loop"
        task.cancel()


async def test_note_is_sent_when_the_version_is_out_and_only_of_groups_that_are_kept(start):
    api, reader = FakeApi(), FakeReader()
    notes = start(SampleNotes(api=api, epoch=3, reader=reader))
    groups = [wanted(1), queued(2), wanted(3)]
    ratios = {(0, 1): np.ones(2, np.float32), (2, 0): np.zeros(1, np.float32)}
    notes.trained(groups, ratios)
    await notes.finish()
    assert api.sent == []

    notes.published([entry.group.id for entry in groups])
    await notes.finish()

    assert api.sent == [(3, groups[0].group.id), (3, groups[2].group.id)]
    assert [set(each) for each in reader.ratios] == [{1}, {0}]


async def test_groups_of_steps_that_were_undone_are_forgotten(start):
    api = FakeApi()
    notes = start(SampleNotes(api=api, epoch=3, reader=FakeReader()))
    notes.trained([wanted(1)], {})
    notes.begin()

    notes.published([wanted(1).group.id])
    await notes.finish()

    assert api.sent == []


async def test_rejected_group_has_its_note_at_once(start):
    api = FakeApi()
    notes = start(SampleNotes(api=api, epoch=3, reader=FakeReader()))

    notes.rejected([queued(7).group])
    await notes.finish()

    assert api.sent == [(3, queued(7).group.id)]


@pytest.mark.parametrize(
    ("api", "reader"),
    [
        (FakeApi(StaleEpoch("superseded")), FakeReader()),
        (FakeApi(TimeoutError()), FakeReader()),
        (FakeApi(), FakeReader(OverflowError("the text of token 7 is secret"))),
    ],
)
async def test_note_that_fails_is_given_up_and_the_next_one_is_made(start, api, reader, caplog):
    notes = start(SampleNotes(api=api, epoch=3, reader=reader))
    before = outcomes()

    notes.rejected([queued(1).group, queued(2).group])
    await notes.finish()
    api.problem = reader.problem = None
    notes.rejected([queued(3).group])
    await notes.finish()

    assert api.sent == [(3, queued(3).group.id)]
    assert {name: count - before[name] for name, count in outcomes().items()} == {"sent": 1, "given_up": 2}
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
    assert "secret" not in caplog.text


async def test_abandoned_group_has_a_note_where_it_is_kept(start):
    api = FakeApi()
    notes = start(SampleNotes(api=api, epoch=3, reader=FakeReader()))

    notes.abandoned([queued(7), wanted(8)])
    await notes.finish()

    assert api.sent == [(3, wanted(8).group.id)]


async def test_what_waits_is_bounded_in_bytes_too(start, monkeypatch):
    rollouts = wanted(1).group.rollouts
    assert module._size(module._Settled(group=wanted(1).group, ratios={})) > 8 * sum(len(r.token_ids) for r in rollouts)
    monkeypatch.setattr(module, "_size", lambda _: 10)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 30)
    api = FakeApi()
    notes = SampleNotes(api=api, epoch=3, reader=FakeReader())
    before = outcomes()

    # Those of steps that are in no version yet count too.
    notes.trained([wanted(1), wanted(2)], {})
    notes.rejected([wanted(number).group for number in (3, 4, 5)])
    assert outcomes()["given_up"] - before["given_up"] == 2
    notes.published([wanted(1).group.id])
    start(notes)
    await notes.finish()
    assert [group.sequence for _, group in api.sent] == [3, 1]

    # Room that was taken is given back, by what was sent and by what was undone.
    notes.begin()
    notes.rejected([wanted(number).group for number in (6, 7, 8)])
    await notes.finish()
    assert len(api.sent) == 5


async def test_evaluations_are_sent_some_at_a_time(start):
    api = FakeApi()
    notes = start(SampleNotes(api=api, epoch=3, reader=FakeReader()))
    sample = EvaluationSample(version=1, site=SiteId(""), prompt_index=0, prompt="", rollouts=())

    notes.evaluated((sample,) * (module.EVALUATIONS_AT_ONCE + 1))
    await notes.finish()

    assert api.sent == [(3, module.EVALUATIONS_AT_ONCE), (3, 1)]


@pytest.mark.parametrize("letter", ["a", "é", "語", "😀"])
async def test_messages_of_evaluations_are_bounded_in_bytes_and_not_in_characters(start, letter):
    api, size = FakeApi(), 1000 * len(letter.encode())
    # Half of the largest message, as in a run: a text may take half as much in memory as in UTF-8.
    notes = start(SampleNotes(api=api, epoch=3, reader=FakeReader(), limit_bytes=12_000))
    texts = [SampleRollout(completion=letter * 500, **NUMBERS) for _ in range(2)]
    samples = [
        EvaluationSample(version=1, site=SiteId(""), prompt_index=number, prompt="", rollouts=tuple(texts))
        for number in range(30)
    ]
    assert module._size(samples[:1]) >= size / 2

    notes.evaluated(samples)
    notes.evaluated([dataclasses.replace(samples[0], prompt=letter * 50_000)])
    await notes.finish()

    *counts, alone = [count for _, count in api.sent]
    assert (sum(counts), alone) == (30, 1)
    assert 2 < max(counts) * size <= 24_000


async def test_nothing_waits_for_a_queue_that_is_full(start, monkeypatch):
    notes = SampleNotes(api=FakeApi(), epoch=3, reader=FakeReader())
    before = outcomes()

    notes.rejected([queued(number).group for number in range(1, module.MAX_WAITING + 4)])

    assert outcomes()["given_up"] - before["given_up"] == 3
    # A learner that ends does not wait for ever either.
    monkeypatch.setattr(module, "FINISH_S", 0.05)
    await notes.finish()


async def test_without_a_reader_nothing_is_said():
    notes = SampleNotes()
    notes.trained([wanted(1)], {})
    notes.published([wanted(1).group.id])
    notes.rejected([wanted(2).group])

    await notes.finish()


def test_groups_of_unpublished_steps_are_bounded():
    notes = SampleNotes(api=FakeApi(), epoch=3, reader=FakeReader())

    notes.trained([wanted(number) for number in range(1, module.MAX_WAITING + 10)], {})

    assert len(notes._trained) == module.MAX_WAITING
