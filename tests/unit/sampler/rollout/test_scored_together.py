"""Rewards that are computed of a whole group: asked once, when its last completion has ended."""

from types import SimpleNamespace

from heterorl.common.types.rollout import RewardPart
from heterorl.sampler.rollout.group_builder import Scorer


class Maker:
    """Two completions make a group; remembers what was asked together."""

    group_size = 2

    def __init__(self, by_group):
        self.task = SimpleNamespace(by_group=by_group, num_workers=1)
        self.asked = []

    def score_all(self, prompt, completions):
        self.asked.append(list(completions))
        return [(RewardPart(name="r", value=float(len(text))),) for text in completions]


async def test_members_are_scored_as_they_end_or_together():
    draft = SimpleNamespace(prompt=None, completions={1: "bb"})
    for by_group, first, last in ((False, (1,), (0,)), (True, (), (0, 1))):
        builder = Maker(by_group)
        scorer = Scorer(builder)
        draft.completions = {1: "bb"}
        assert scorer.ready(draft, 1) == first
        draft.completions[0] = "a"
        assert scorer.ready(draft, 0) == last
        rows = await scorer.score(None, [draft.completions[member] for member in last])
        assert [row[0].value for row in rows] == [len(draft.completions[member]) for member in last]
        assert builder.asked == [[draft.completions[member] for member in last]]
        scorer.close()
