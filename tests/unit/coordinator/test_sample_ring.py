"""The ring of samples: what is kept and why, within its bytes, for each part its share; the same after a restart."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest

from heterorl.common.errors import InvalidRequest, StaleEpoch, UnknownSample
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import DropReason, FinishReason, PushStatus, Rejection, RewardPart
from heterorl.common.types.sample import (
    EvaluationSample,
    RolloutNote,
    SampleFilter,
    SampleKind,
    SampleNote,
    SamplePage,
    SampleRollout,
    rollout_json,
)
from heterorl.common.wire.sealed_groups import seal
from heterorl.coordinator import sample_ring
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.groups import ledger
from tests.support.clock import ManualClock
from tests.support.run import SITE, Run, credits_of, rollout
from tests.support.samples import group_of_turns, make_turns

ALL = SampleFilter()


def config_of(tmp_path, **changes):
    values = {"data_dir": tmp_path / "data", "samples_every": 1, "quarantine_failures": 0}
    return CoordinatorConfig(**{**values, **changes})


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path)


async def begin(core, tmp_path):
    (tmp_path / "run").mkdir(exist_ok=True)
    run = Run(core, tmp_path / "run")
    await run.begin()
    await run.publish()
    await run.register()
    return run


async def kept(core, wanted=ALL, **page):
    return (await core.list_samples(wanted=wanted, page=SamplePage(**page))).samples


async def take(core, run, count):
    stream = core.stream_groups(epoch=run.epoch, held=(), credits=credits_of(count))
    taken = [await anext(stream) for _ in range(count)]
    await stream.aclose()
    return taken


def note(group_id, *, prompt="1+1=", texts=("2", "3"), **changes):
    values = {"reward_parts": (), "log_ratios": np.array([0.5, -0.25, 0.125], np.float32)}
    return SampleNote(
        group=group_id,
        prompt=prompt,
        rollouts=tuple(RolloutNote(completion=text, **{**values, **changes}) for text in texts),
    )


@pytest.mark.parametrize("damage", [b"\x00", None])
async def test_group_whose_bytes_are_damaged_is_consumed_and_not_kept(core, run, damage):
    ids = await run.push(2)

    def spoil(connection):
        (data,) = connection.execute("SELECT payload FROM groups WHERE sequence = ?", (ids[0].sequence,)).fetchone()
        # Still a group, though another one.
        spoilt = damage or data.replace(b"\x00", b"\x01", 1)
        connection.execute("UPDATE groups SET payload = ? WHERE sequence = ?", (spoilt, ids[0].sequence))

    await core.database.run(spoil)
    await run.publish(consumed=ids)

    assert [each.group for each in await kept(core)] == [ids[1]]


async def test_group_that_was_trained_on_is_kept_with_its_version_and_says_what_the_learner_said(core, run):
    (group_id,) = await run.push()
    await run.publish(consumed=[group_id])
    await core.note_samples(epoch=run.epoch, notes=[note(group_id)])

    (summary,) = await kept(core)
    assert (summary.kind, summary.kept_because, summary.version) == (SampleKind.CONSUMED, "consumed", 1)
    assert (summary.site, summary.group, summary.oldest_version) == (SITE, group_id, 0)
    assert (summary.reward_min, summary.reward_mean, summary.reward_max) == (0.0, 0.5, 1.0)
    assert (summary.num_rollouts, summary.num_tokens, summary.num_truncated) == (2, 6, 0)
    assert (summary.has_texts, summary.prompt_preview, summary.completion_preview) == (True, "1+1=", "2")
    sample = await core.get_sample(sample_id=summary.id)
    first = rollout_json(sample, 0)
    assert first["prompt"] == "1+1="
    assert first["completion"] == "2"
    assert first["reward"] == 1.0
    assert first["reward_parts"] == {"correct": 1.0}
    assert first["finish_reason"] == "eos"
    assert first["kept_because"] == "consumed"
    assert (first["version"], first["site"]) == (1, SITE)
    # (0.5 - 0.25 + 0.125) / 3
    assert first["log_ratio_mean"] == pytest.approx(0.125)
    assert "token_ids" not in first
    whole = rollout_json(sample, 1, with_tokens=True)
    assert whole["token_ids"] == [5, 6, 1]
    assert whole["log_ratios"] == [0.5, -0.25, 0.125]


async def test_group_without_a_note_is_there_by_its_tokens(core, run):
    (group_id,) = await run.push()
    await run.publish(consumed=[group_id])

    (summary,) = await kept(core)
    sample = await core.get_sample(sample_id=summary.id)

    assert not summary.has_texts
    assert rollout_json(sample, 0)["completion"] is None
    assert rollout_json(sample, 0)["log_ratio_mean"] is None
    assert sample.rollouts[0].token_ids.tolist() == [5, 6, 1]
    assert sample.prompt_token_ids.tolist() == [2, 3]


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (16, [2])])
async def test_one_of_so_many_groups_is_kept_and_the_learner_is_told_at_its_lease(tmp_path, every, expected):
    core = await Coordinator.open(config_of(tmp_path, samples_every=every), ManualClock())
    run = await begin(core, tmp_path)
    ids = await run.push(6)
    queued = await take(core, run, 6)
    await run.publish(consumed=ids)

    assert [entry.group.id.sequence for entry in queued if entry.wants_note] == expected
    assert [entry.group.sequence for entry in await kept(core, is_oldest_first=True)] == expected
    await core.close()


def test_kept_groups_follow_no_rhythm_in_which_groups_arrive():
    ring = sample_ring.SampleRing(limit_bytes=1, max_sample_bytes=1, every=16, wall=lambda: 0.0)
    arrivals = [arrival for arrival in range(1, 16_001) if ring.wants(SampleKind.CONSUMED, arrival)]

    assert [(arrival - 1) // 16 for arrival in arrivals] == list(range(1000))
    # 62.5 of each place on average, with a standard deviation of 7.7.
    assert all(30 < count < 95 for count in Counter(arrival % 16 for arrival in arrivals).values())


async def test_every_rejected_group_is_kept_with_what_the_check_said(tmp_path):
    core = await Coordinator.open(config_of(tmp_path, samples_every=1000), ManualClock())
    run = await begin(core, tmp_path)
    ids = await run.push(3)
    await core.reject_groups(
        epoch=run.epoch, rejections=[Rejection(id=ids[0], reason=DropReason.REWARD_MISMATCH, detail="1, computed 0")]
    )
    await core.abandon_groups(epoch=run.epoch, ids=[ids[1]], reason="no reward")
    (work,) = await run.lease(1)
    bad = run.group(work, rollouts=(rollout(0, reward=math.nan), rollout(0)))
    (outcome,) = await core.push_groups([bad])

    assert outcome.status is PushStatus.DROPPED
    found = {entry.kept_because: entry for entry in await kept(core, SampleFilter(kind=SampleKind.REJECTED))}
    assert set(found) == {"reward_mismatch", "learner_abandoned", "invalid"}
    assert found["reward_mismatch"].detail == "1, computed 0"
    assert found["learner_abandoned"].detail == "no reward"
    assert found["invalid"].detail == "rollouts[0].reward: not finite" or "reward" in found["invalid"].detail
    assert (found["invalid"].reward_min, found["invalid"].reward_mean) == (None, None)
    sample = await core.get_sample(sample_id=found["invalid"].id)
    assert rollout_json(sample, 0)["reward"] is None
    # The version that was the newest then.
    assert {entry.version for entry in found.values()} == {0}
    counts = await core.database.run(ledger.counts)
    assert counts == await core.database.run(ledger.recount)
    await core.close()


async def test_group_that_was_dropped_for_no_fault_is_kept_by_the_rule_of_trained_ones(core, run):
    first, second = await run.lease(2)
    await core.push_groups([run.group(first)])
    group = run.group(first)
    (outcome,) = await core.push_groups([group])

    assert outcome.reason is DropReason.SURPLUS
    (summary,) = await kept(core)
    assert (summary.kind, summary.group) == (SampleKind.DROPPED, group.id)
    assert second


async def test_lost_members_are_counted_in_the_list(core):
    kept_here = sample_ring.SampleRing(limit_bytes=1 << 20, every=1, max_sample_bytes=1 << 20, wall=lambda: 1.0)
    sealed, want = seal(group_of_turns()), make_turns(1).summary
    await core.database.run(lambda connection: kept_here.keep_dropped(connection, sealed, DropReason.LOST_MEMBERS))

    (summary,) = await kept(core)

    assert (summary.num_rollouts, summary.num_lost, summary.num_truncated) == (5, 2, 1)
    assert summary.num_tokens == want.num_tokens
    assert (summary.reward_min, summary.reward_mean, summary.reward_max) == (0.0, 0.5, 1.0)
    sample = await core.get_sample(sample_id=summary.id)
    assert [one.spans for one in sample.rollouts] == [one.spans for one in make_turns(1).rollouts]


async def test_nothing_is_kept_where_nothing_may_be(tmp_path):
    core = await Coordinator.open(config_of(tmp_path, samples_bytes=0), ManualClock())
    run = await begin(core, tmp_path)
    ids = await run.push(2)
    queued = await take(core, run, 2)
    await run.publish(consumed=[ids[0]])
    await core.abandon_groups(epoch=run.epoch, ids=[ids[1]], reason="test")
    await core.note_samples(epoch=run.epoch, notes=[note(ids[0])], evaluations=[evaluation(0)])

    assert not any(entry.wants_note for entry in queued)
    listed = await core.list_samples(wanted=ALL, page=SamplePage())
    assert (listed.samples, listed.num_kept, listed.limit_bytes) == ((), 0, 0)
    await core.close()


def evaluation(index, *, version=0, completion="7", **changes):
    made = SampleRollout(
        completion=completion, reward=1.0, reward_parts=(RewardPart(name="correct", value=1.0),),
        finish_reason=FinishReason.LENGTH,
    )  # fmt: skip
    values = {
        "version": version, "site": SiteId(""), "prompt_index": index, "prompt": f"{index}+0=", "rollouts": (made,),
    }  # fmt: skip
    return EvaluationSample(**{**values, **changes})


async def test_evaluations_are_kept_once_however_often_they_are_said(core, run):
    for _ in range(2):
        await core.note_samples(
            epoch=run.epoch, notes=[], evaluations=[evaluation(0, task_set="gsm8k"), evaluation(1, task_set="gsm8k")]
        )
    await core.note_samples(epoch=run.epoch, notes=[], evaluations=[evaluation(0, task_set="aime")])

    found = await kept(core, SampleFilter(kept_because="evaluation"), is_oldest_first=True)
    assert [(entry.detail, entry.prompt_index) for entry in found] == [("gsm8k", 0), ("gsm8k", 1), ("aime", 0)]
    sample = await core.get_sample(sample_id=found[1].id)
    assert (sample.prompt, sample.rollouts[0].completion, sample.summary.num_truncated) == ("1+0=", "7", 1)
    assert rollout_json(sample, 0)["group"] is None


async def test_a_superseded_learner_says_nothing(core, run):
    (group_id,) = await run.push()
    await run.publish(consumed=[group_id])

    with pytest.raises(StaleEpoch):
        await core.note_samples(epoch=run.epoch + 1, notes=[note(group_id)])

    (summary,) = await kept(core)
    assert not summary.has_texts


async def test_notes_that_fit_nothing_have_no_effect(core, run):
    (group_id,) = await run.push()
    await run.publish(consumed=[group_id])
    other = dataclasses.replace(group_id, sequence=77)
    await core.note_samples(epoch=run.epoch, notes=[note(other), note(group_id, texts=("one of two",))])
    odd = note(group_id, log_ratios=np.zeros(5, np.float32), token_ends=np.zeros(1, np.int32))
    await core.note_samples(epoch=run.epoch, notes=[odd])

    (summary,) = await kept(core)
    sample = await core.get_sample(sample_id=summary.id)
    assert sample.rollouts[0].completion == "2"
    # Neither has one entry a token.
    assert sample.rollouts[0].log_ratios.size == sample.rollouts[0].token_ends.size == 0


async def used(core):
    """Bytes of the parts as they are counted, and as they are."""

    def operation(connection):
        counted = sample_ring.totals(connection)
        rows = connection.execute("SELECT kind, count(*), sum(num_bytes) FROM samples GROUP BY kind")
        real = {SampleKind(kind): (number, num_bytes) for kind, number, num_bytes in rows}
        (orphans,) = connection.execute(
            "SELECT count(*) FROM sample_payloads WHERE id NOT IN (SELECT id FROM samples)"
        ).fetchone()
        assert orphans == 0
        return {kind: value for kind, value in counted.items() if value != (0, 0)}, real

    return await core.database.run(operation)


async def test_bytes_are_bounded_and_rejected_groups_push_out_no_trained_one_beyond_their_share(tmp_path):
    # A sample takes 6144 bytes, so 20 fit: 10 of them are the share of trained ones.
    config = config_of(tmp_path, samples_bytes=20 * 6144 + 100)
    core = await Coordinator.open(config, ManualClock())
    run = await begin(core, tmp_path)
    trained = []
    for _ in range(4):
        ids = await run.push(4)
        await run.publish(consumed=ids)
        trained += ids
    assert len(await kept(core)) == 16
    for _ in range(10):
        ids = await run.push(4)
        await core.reject_groups(
            epoch=run.epoch,
            rejections=[Rejection(id=group_id, reason=DropReason.LOGPROB_MISMATCH, detail="x") for group_id in ids],
        )
        counted, real = await used(core)
        assert counted == real
        assert sum(num_bytes for _, num_bytes in counted.values()) <= config.samples_bytes

    found = await kept(core, is_oldest_first=True)
    by_kind = {kind: [entry.group.sequence for entry in found if entry.kind is kind] for kind in SampleKind}
    # The parts that nothing is in leave theirs to the one that asks: the newest of each are there.
    assert len(found) == 20
    assert by_kind[SampleKind.CONSUMED] == [entry.sequence for entry in trained][-len(by_kind[SampleKind.CONSUMED]) :]
    assert len(by_kind[SampleKind.CONSUMED]) >= 10
    assert len(by_kind[SampleKind.REJECTED]) >= 5
    await core.close()


async def test_a_note_takes_its_bytes_from_the_ring_too(tmp_path):
    core = await Coordinator.open(config_of(tmp_path, samples_bytes=4 * 6144), ManualClock())
    run = await begin(core, tmp_path)
    ids = await run.push(4)
    await run.publish(consumed=ids)
    assert len(await kept(core)) == 4

    await core.note_samples(epoch=run.epoch, notes=[note(ids[3], texts=("x" * 8000, "y"))])

    counted, real = await used(core)
    assert counted == real
    assert [entry.group.sequence for entry in await kept(core)] == [ids[3].sequence, ids[2].sequence]
    # One that no message could take to a reader is not taken.
    huge = note(ids[2], texts=("x" * core.config.max_group_bytes, "y"))
    await core.note_samples(epoch=run.epoch, notes=[huge])
    assert [entry.has_texts for entry in await kept(core)] == [True, False]
    await core.close()


@pytest.mark.sqlite
@pytest.mark.parametrize(
    "letter", ["x", "\N{GREEK SMALL LETTER PI}", "\N{CJK UNIFIED IDEOGRAPH-8A9E}", "\N{BEAR FACE}"]
)
async def test_samples_of_any_script_take_no_more_of_the_store_than_is_counted(core, run, letter):
    async def file_bytes():
        def operation(connection):
            names = ("page_count", "page_size")
            return math.prod(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)

        return await core.database.run(operation)

    before, long = await file_bytes(), 500 * letter
    for first in range(0, 640, 64):
        samples = [evaluation(first + more, task_set=long, prompt=long, completion=long) for more in range(64)]
        await core.note_samples(epoch=run.epoch, notes=[], evaluations=samples)

    counted, _ = await used(core)
    assert await file_bytes() - before <= sum(num_bytes for _, num_bytes in counted.values())
    (found,) = await kept(core, limit=1)
    for text in (found.detail, found.prompt_preview, found.completion_preview):
        # Whole characters, as many as fit.
        assert set(text) == {letter}
    width = len(letter.encode())
    assert (len(found.detail), len(found.prompt_preview)) == (300 // width, 160 // width)


async def test_ring_survives_a_restart_and_shrinks_with_its_bound(tmp_path):
    core = await Coordinator.open(config_of(tmp_path), ManualClock())
    run = await begin(core, tmp_path)
    ids = await run.push(6)
    await run.publish(consumed=ids)
    await core.note_samples(epoch=run.epoch, notes=[note(ids[0])])
    before = await kept(core)
    await core.close()

    core = await Coordinator.open(config_of(tmp_path), ManualClock())
    assert await kept(core) == before
    await core.close()

    core = await Coordinator.open(config_of(tmp_path, samples_bytes=2 * 6144), ManualClock())
    assert await kept(core) == before[:2]
    with pytest.raises(UnknownSample):
        await core.get_sample(sample_id=before[-1].id)
    await core.close()

    # A number is never used again: the next sample is newer than all that ever were.
    core = await Coordinator.open(config_of(tmp_path, samples_bytes=0), ManualClock())
    assert await kept(core) == ()
    await core.close()


async def test_nothing_is_kept_while_the_disk_is_full(core, run):
    core.disk.is_full = True
    (group_id,) = await run.push()
    await run.publish(consumed=[group_id])
    core.disk.is_full = False

    assert await kept(core) == ()


async def test_a_page_must_be_of_a_size(core):
    with pytest.raises(InvalidRequest, match="limit"):
        await core.list_samples(wanted=ALL, page=SamplePage(limit=0))
    with pytest.raises(InvalidRequest, match="limit"):
        await core.list_samples(wanted=ALL, page=SamplePage(limit=201))
