"""A table of samples: bounded in prompts and characters, best and worst, only what has texts."""

import dataclasses

from heterorl.common.errors import UnknownSample
from heterorl.common.types.sample import SampleKind, SampleList
from heterorl.track.tracker import COLUMNS, MAX_TEXT, read_table, sample_rows
from tests.support.samples import ANSWERED, ASKED, make_rollout, make_sample, make_turns


def sample(number, **changes):
    found = make_sample(number)
    return dataclasses.replace(found, summary=dataclasses.replace(found.summary, id=number, **changes))


class Kept:
    """A ring of samples, in pages of two."""

    def __init__(self, *samples):
        self.samples, self.wanted = {found.summary.id: found for found in samples}, []
        self.gone = set()

    async def list_samples(self, *, wanted, page):
        self.wanted.append(wanted.kind)
        left = [found.summary for id_, found in sorted(self.samples.items(), reverse=True) if id_ < (page.before or 99)]
        rest = dataclasses.replace(page, before=left[1].id) if len(left) > 2 else None
        return SampleList(samples=tuple(left[:2]), next_page=rest, num_kept=1, kept_bytes=1, limit_bytes=1)

    async def get_sample(self, *, sample_id):
        if sample_id in self.gone:
            raise UnknownSample("gone")
        return self.samples[sample_id]


def test_best_and_worst_completion_of_a_prompt():
    rollouts = tuple(make_rollout(text, seed=1, reward=reward) for text, reward in (("a", 0.5), ("b", 1.0), ("c", 0.0)))
    found = dataclasses.replace(sample(1), rollouts=rollouts, prompt="x" * (MAX_TEXT + 1))
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in sample_rows(found)]

    assert [(row["completion"], row["reward"]) for row in rows] == [("b", 1.0), ("c", 0.0)]
    assert rows[0]["prompt"] == "x" * MAX_TEXT + f"... ({MAX_TEXT + 1} characters)"
    assert len(sample_rows(dataclasses.replace(found, rollouts=rollouts[:1] * 2))) == 1


async def test_newest_prompts_with_texts_over_pages():
    api = Kept(*(sample(number, has_texts=number != 4) for number in range(1, 6)))
    api.gone = {3}
    table = await read_table(api, version=9, most=2)

    assert table.version == 9
    assert {row[2] for row in table.rows} == {api.samples[5].prompt, api.samples[2].prompt}
    assert set(api.wanted) == {SampleKind.CONSUMED}


async def test_there_is_no_table_without_texts():
    assert await read_table(Kept(sample(1, has_texts=False)), version=9, most=2) is None


def test_turns_are_below_who_wrote_them_and_no_lost_member_is_best():
    found = make_turns(1)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in sample_rows(found)]

    # The rewards that a lost member states, 9, are none.
    assert [(row["reward"], row["finish_reason"]) for row in rows] == [(1.0, "eos"), (0.0, "length")]
    assert rows[0]["completion"] == "The sum is 42."
    assert rows[1]["completion"].splitlines() == [
        "[version 40]", "I look.", "[environment]", ASKED, "[version 40]", "Next.",
        "[environment, in a new sequence that keeps 3 tokens]", ANSWERED, "[version 41]", "It is 42.",
    ]  # fmt: skip
    assert [row["tokens"] for row in rows] == [len(found.rollouts[n].sampler_logprobs) for n in (0, 2)]


def test_a_sample_whose_members_are_all_lost_has_one_row():
    found = make_turns(1)

    (row,) = sample_rows(dataclasses.replace(found, rollouts=found.rollouts[3:]))

    assert row[-1] == "engine_failed"
