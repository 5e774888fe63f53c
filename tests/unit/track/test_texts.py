"""A table of samples: bounded in prompts and characters, best and worst, only what has texts."""

import dataclasses

from heterorl.common.errors import UnknownSample
from heterorl.common.types.sample import SampleKind, SampleList
from heterorl.track.texts import COLUMNS, MAX_TEXT, read_table, sample_rows
from tests.support.samples import make_rollout, make_sample


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
