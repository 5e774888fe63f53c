"""Samples survive the wire and the store's bytes; what a reader gets is what was kept and what was said of it."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import FinishReason, GroupId, RewardPart
from heterorl.common.types.sample import (
    EvaluationSample,
    RolloutNote,
    SampleFilter,
    SampleKind,
    SampleList,
    SampleNote,
    SamplePage,
    SampleRollout,
    SampleSummary,
    rollout_json,
)
from heterorl.common.wire.common_messages import to_message, to_value
from heterorl.common.wire.sample_messages import (
    StoredSample,
    evaluation_to_bytes,
    list_from_pb,
    list_request_from_pb,
    list_request_to_pb,
    list_to_pb,
    note_to_bytes,
    outline,
    sample_from_pb,
    sample_of,
    stored_to_pb,
)
from heterorl.common.wire.sealed_groups import seal
from heterorl.v1 import sample_pb2
from tests.support.run import Run, rollout
from tests.support.samples import group_of_turns, make_turns

ROOT = Path(__file__).parents[2]
name = st.text(alphabet="abc-0", min_size=1, max_size=8)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
real = st.floats(allow_nan=False, allow_infinity=False)
number = st.integers(0, 2**40)
ratios = st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(lambda values: np.array(values, np.float32))
ends = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda values: np.array(values, np.int32))
parts = st.lists(st.builds(RewardPart, name=name, value=real), max_size=2).map(tuple)
group_ids = st.builds(GroupId, site=name, incarnation=name, sequence=number)
notes = st.builds(
    SampleNote,
    group=group_ids,
    prompt=text,
    rollouts=st.lists(
        st.builds(RolloutNote, completion=text, reward_parts=parts, log_ratios=ratios, token_ends=ends), max_size=3
    ).map(tuple),
)
evaluations = st.builds(
    EvaluationSample,
    version=st.integers(-1, 2**40),
    task_set=name,
    site=name.map(SiteId),
    prompt_index=number,
    prompt=text,
    rollouts=st.lists(
        st.builds(
            SampleRollout,
            completion=text,
            token_ids=ends,
            sampler_logprobs=ratios,
            reward=real,
            reward_parts=parts,
            finish_reason=st.sampled_from(FinishReason),
        ),
        max_size=3,
    ).map(tuple),
)
summaries = st.builds(
    SampleSummary,
    id=st.integers(1, 2**40),
    kind=st.sampled_from(SampleKind),
    kept_because=name,
    detail=text,
    site=name.map(SiteId),
    group=st.none() | group_ids,
    version=st.integers(-1, 2**40),
    oldest_version=st.integers(-1, 2**40),
    kept_time=real,
    prompt_index=number,
    num_rollouts=st.integers(0, 2**20),
    num_truncated=st.integers(0, 2**20),
    num_lost=st.integers(0, 2**20),
    num_tokens=number,
    reward_min=st.none() | real,
    reward_mean=st.none() | real,
    reward_max=st.none() | real,
    has_texts=st.booleans(),
    prompt_preview=text,
    completion_preview=text,
)
filters = st.builds(
    SampleFilter,
    site=name | st.just(""),
    kind=st.none() | st.sampled_from(SampleKind),
    kept_because=name | st.just(""),
    first_version=st.none() | number,
    last_version=st.none() | number,
    min_reward=st.none() | real,
    max_reward=st.none() | real,
    is_truncated=st.none() | st.booleans(),
)
pages = st.builds(SamplePage, limit=st.integers(1, 200), before=number, after=number, is_oldest_first=st.booleans())


def same(one, other):
    """Equality that looks into arrays."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__slots__"):
        return type(one) is type(other) and all(same(getattr(one, at), getattr(other, at)) for at in one.__slots__)
    return one == other


@given(notes)
def test_note_survives_the_wire_and_the_store(note):
    assert same(to_value(SampleNote, sample_pb2.SampleNote.FromString(note_to_bytes(note))), note)


@given(evaluations)
def test_evaluation_survives_the_wire_and_the_store(evaluation):
    assert same(to_value(EvaluationSample, to_message(sample_pb2.EvaluationSample, evaluation)), evaluation)
    data = evaluation_to_bytes(evaluation)
    assert same(to_value(EvaluationSample, sample_pb2.EvaluationSample.FromString(data)), evaluation)


@given(filters, pages)
def test_question_for_a_list_survives_the_wire(wanted, page):
    assert list_request_from_pb(list_request_to_pb(wanted, page)) == (wanted, page)


@given(st.lists(summaries, max_size=3).map(tuple), pages, st.none() | st.integers(1, 2**40))
def test_page_of_a_list_survives_the_wire(samples, page, looked_up_to):
    following = None
    if looked_up_to is not None:
        before, after = (page.before, looked_up_to) if page.is_oldest_first else (looked_up_to, page.after)
        following = SamplePage(limit=page.limit, before=before, after=after, is_oldest_first=page.is_oldest_first)
    found = SampleList(samples=samples, next_page=following, num_kept=7, kept_bytes=8, limit_bytes=9)

    assert list_from_pb(list_to_pb(found), page) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"kind": 77}, "kind"),
        ({"min_reward": math.nan}, "min_reward"),
    ],
)
def test_question_that_says_nothing_is_refused(change, message):
    with pytest.raises(InvalidRequest, match=message):
        list_request_from_pb(sample_pb2.ListSamplesRequest(**{"limit": 1, **change}))


def test_evaluation_that_does_not_say_how_it_ended_is_refused():
    message = sample_pb2.EvaluationSample(rollouts=[sample_pb2.EvaluatedRollout()])

    with pytest.raises(InvalidRequest, match="finish_reason"):
        to_value(EvaluationSample, message)


def test_text_with_half_a_surrogate_pair_does_not_fail_the_message():
    note = SampleNote(group=GroupId(site=SiteId("a"), incarnation="i", sequence=1), prompt="a\ud800b", rollouts=())

    assert to_message(sample_pb2.SampleNote, note).prompt == "a?b"


def stored(group, note=b""):
    found = outline(seal(group).data)
    summary = SampleSummary(
        id=3, kind=SampleKind.REJECTED, kept_because="invalid", site=group.id.site, group=group.id, version=4,
        oldest_version=group.oldest_version, kept_time=1.5, prompt_index=group.prompt_index,
        num_rollouts=found.num_rollouts, num_truncated=found.num_truncated, num_lost=found.num_lost,
        num_tokens=found.num_tokens,
        reward_min=found.reward_min, reward_mean=found.reward_mean, reward_max=found.reward_max, has_texts=bool(note),
    )  # fmt: skip
    return StoredSample(summary=summary, content=seal(group).data, note=note)


def group_of(tmp_path, **changes):
    from heterorl.common.types.rollout import WorkAssignment

    return Run(None, tmp_path).group(WorkAssignment(id=1, prompt_index=5, seed=0, lease_s=1.0), version=2, **changes)


def test_whole_sample_survives_the_wire_with_what_was_said_of_it(tmp_path):
    group = group_of(tmp_path)
    said = SampleNote(
        group=group.id,
        prompt="1+1=",
        rollouts=tuple(
            RolloutNote(
                completion=f"it is {number}",
                reward_parts=(RewardPart(name="mine", value=0.25),) if number else (),
                log_ratios=np.array([0.5, 0.0, -0.5], np.float32),
                token_ends=np.array([2, 4, 7], np.int32),
            )
            for number in range(2)
        ),
    )
    value = stored(group, note_to_bytes(said))

    message = sample_pb2.GetSampleResponse.FromString(stored_to_pb(value).SerializeToString())
    sample = sample_from_pb(message)

    assert same(sample_of(value), sample)
    assert sample.prompt == "1+1="
    first, second = sample.rollouts
    assert first.reward_parts == group.rollouts[0].reward_parts
    assert second.reward_parts == (RewardPart(name="mine", value=0.25),)
    assert (first.completion, first.log_ratio_mean, first.versions) == ("it is 0", 0.0, (2,))
    assert second.token_ends.tolist() == [2, 4, 7]
    assert np.array_equal(first.sampler_logprobs, group.rollouts[0].sampler_logprobs)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_outline_of_rewards_that_are_not_finite_says_none(tmp_path, reward):
    group = group_of(tmp_path, rollouts=(rollout(2, reward=reward), rollout(2)))

    found = outline(seal(group).data)

    assert (found.reward_min, found.reward_mean, found.reward_max) == (None, None, None)
    assert rollout_json(sample_of(stored(group)), 0)["reward"] is None


def test_outline_counts_and_averages_huge_rewards(tmp_path):
    huge = 1.7e308
    group = group_of(
        tmp_path, rollouts=(rollout(2, reward=huge, finish_reason=FinishReason.LENGTH), rollout(2, reward=huge))
    )

    found = outline(seal(group).data)

    assert (found.num_rollouts, found.num_truncated, found.num_tokens) == (2, 1, 6)
    assert found.reward_mean == huge


def test_outline_counts_drawn_tokens_and_no_reward_of_a_lost_member():
    found = outline(seal(group_of_turns()).data)

    want = make_turns(1).summary
    assert (found.num_rollouts, found.num_truncated, found.num_lost) == (5, 1, 2)
    assert found.num_tokens == want.num_tokens == sum(len(one.sampler_logprobs) for one in make_turns(1).rollouts)
    assert (found.reward_min, found.reward_mean, found.reward_max) == (0.0, 0.5, 1.0)


def test_turns_survive_the_wire_with_what_was_said_of_their_tokens():
    want, group = make_turns(1).rollouts, group_of_turns()
    said = SampleNote(
        group=group.id,
        prompt="1+1=",
        rollouts=tuple(
            RolloutNote(
                completion=one.completion, reward_parts=(), log_ratios=one.log_ratios, token_ends=one.token_ends
            )
            for one in want
        ),
    )

    found = sample_of(stored(group, note_to_bytes(said))).rollouts

    for got, one in zip(found, want, strict=True):
        for at in ("completion", "token_ids", "sampler_logprobs", "log_ratios", "token_ends", "spans", "finish_reason"):
            assert same(getattr(got, at), getattr(one, at)), at
    assert [got.is_lost for got in found] == [False, False, False, True, True]


@pytest.mark.parametrize("count", ["num_drawn", "num_tokens"])
def test_ratios_are_of_drawn_tokens_and_ends_of_all(count):
    """One number a token is no number for each drawn token, and the other way round."""
    group, want = group_of_turns(), make_turns(1).rollouts
    sizes = [len(one.sampler_logprobs) if count == "num_drawn" else len(one.token_ids) for one in want]
    notes = tuple(
        RolloutNote(
            completion="", reward_parts=(), log_ratios=np.zeros(size, np.float32), token_ends=np.zeros(size, np.int32)
        )
        for size in sizes
    )
    note = note_to_bytes(SampleNote(group=group.id, prompt="", rollouts=notes))

    found = sample_of(stored(group, note)).rollouts[1]

    assert (len(found.log_ratios), len(found.token_ends)) == ((sizes[1], 0) if count == "num_drawn" else (0, sizes[1]))


def test_json_says_who_wrote_which_tokens():
    sample = make_turns(1)
    first, _, third, fourth, fifth = (rollout_json(sample, index) for index in range(5))

    assert first["spans"] == [{"start": 0, "end": first["num_tokens"], "version": 40, "keeps": None}]
    assert [(span["version"], span["keeps"]) for span in third["spans"]] == [
        (40, None), (None, None), (40, None), (None, 3), (41, None)
    ]  # fmt: skip
    assert third["versions"] == [40, 41]
    assert third["num_tokens"] == len(sample.rollouts[2].sampler_logprobs)
    assert [(one["finish_reason"], one["reward"], one["num_tokens"]) for one in (third, fourth)] == [
        ("length", 0.0, third["num_tokens"]), ("engine_failed", None, 0)
    ]  # fmt: skip
    # A mean over all rows is that of the group: what was lost has no reward.
    assert (fifth["finish_reason"], fifth["reward"]) == ("tool_lost", None)


def rows(page, head):
    """Rows of the table of a page under `head`, as lists of cells."""
    lines = iter((ROOT / "docs" / page).read_text(encoding="utf-8").splitlines())
    assert any(line.startswith(head) for line in lines)
    next(lines)
    return [line.strip("|").split(" | ") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]


def test_pages_have_the_keys_of_the_json_and_every_end_of_a_rollout():
    keys = rows("operate.md", "| key of the JSON | meaning |")
    said = {key for cells in keys for key in re.findall(r"`(\w+)`", cells[0])}
    tokens = next(cells[1] for cells in keys if "with `--tokens`" in cells[0])

    assert said == set(rollout_json(make_turns(1), 0))
    assert set(re.findall(r"`(\w+)`", tokens)) == set(rollout_json(make_turns(1), 0, with_tokens=True)) - said
    ends = next(cells[1] for cells in keys if "`finish_reason`" in cells[0])
    assert set(re.findall(r"`(\w+)`", ends)) == {reason.value for reason in FinishReason}
    trained = {
        end: cells[2].strip()
        for cells in rows("environments.md", "| `finish_reason` | cause | trained |")
        for end in re.findall(r"`(\w+)`", cells[0])
    }
    assert trained == {reason.value: "yes" if reason.is_trainable else "no" for reason in FinishReason}
