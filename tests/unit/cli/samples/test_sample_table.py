"""The list of samples on a narrow terminal: texts are read, and no reward is said three times."""

import dataclasses
import io
import itertools

import numpy as np
import pytest
from rich.console import Console

from heterorl.cli.samples.sample_table import coloured, sample_page, samples_table
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import RewardPart
from heterorl.common.types.sample import SampleKind, SampleSummary
from tests.support.samples import ANSWERED, ASKED, make_turns

PROMPT = "Describe a dragon in three words."


def summary(**changes):
    values = {
        "id": 36, "kind": SampleKind.CONSUMED, "kept_because": "consumed", "site": SiteId("us-west-1"), "group": None,
        "version": 12, "oldest_version": 10, "kept_time": 0.0, "prompt_index": 3, "num_rollouts": 8, "num_truncated": 1,
        "num_tokens": 640, "reward_min": 0.0, "reward_mean": 0.5, "reward_max": 1.0, "has_texts": True,
        "prompt_preview": PROMPT, "completion_preview": "It breathes\n\nfire.",
    }  # fmt: skip
    return SampleSummary(**{**values, **changes})


def shown(*summaries, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(samples_table(summaries))
    return out.getvalue().splitlines()


def test_texts_have_lines_of_their_own():
    head, facts, prompt, completion = shown(summary())

    assert head.split() == ["id", "version", "behind", "site", "reward", "tokens", "cut", "kept", "because"]
    # The group trained at version 11, and 12 came of it.
    assert facts.split() == ["36", "12", "1", "us-west-1", "0.5", "[0,", "1]", "640", "1/8", "consumed"]
    assert prompt == f"    prompt      {PROMPT}"
    assert completion == "    completion  It breathes fire."


def test_a_dropped_group_was_behind_the_version_of_its_end():
    assert shown(summary(kind=SampleKind.DROPPED))[1].split()[2] == "2"


def test_columns_of_several_samples_stand_under_one_another():
    lines = shown(summary(id=7), summary(id=12345, site=SiteId("")))

    assert [line.index("12 ") for line in (lines[1],)] == [lines[0].index("version")]
    assert lines[4].index("learner") == lines[1].index("us-west-1") == lines[0].index("site")


@pytest.mark.parametrize("changes", [{"prompt_preview": "long " * 40}, {"detail": "many words " * 20}])
def test_a_line_that_is_too_long_is_cut(changes):
    lines = shown(summary(**changes))

    assert len(lines) == 4
    assert max(map(len, lines)) == 80


def test_one_reward_is_said_once():
    assert "0.467 " in shown(summary(reward_min=0.467, reward_mean=0.467, reward_max=0.467))[1]
    assert "[" not in shown(summary(reward_min=0.467, reward_mean=0.467, reward_max=0.467))[1]


def test_a_text_cannot_steer_the_terminal():
    lines = shown(summary(prompt_preview="\x1b[2J\u202e", detail="a\r\nb"))

    assert lines[2] == "    prompt      \\x1b[2J\\u202e"
    assert lines[1].endswith("consumed (a b)")


def page(sample, *, only=None):
    out = io.StringIO()
    Console(file=out, width=100).print(*sample_page(sample, only=only))
    return out.getvalue()


def test_turns_stand_under_one_another_below_who_wrote_them():
    lines = [line.strip("| \u2502") for line in page(make_turns(5), only=1).splitlines()]

    first = lines.index("[version 40]")
    assert lines[first : first + 10] == [
        "[version 40]", "Let me add.", "[environment]", ASKED, "[versions 40, 41]", "So it is 42.", "[environment]",
        ANSWERED, "[version 41]", "Done.",
    ]  # fmt: skip
    assert "[environment, in a new sequence that keeps 3 tokens]" in page(make_turns(5), only=2)
    # A single completion has no head.
    assert "[version" not in page(make_turns(5), only=0)


def test_given_tokens_are_dim_and_drawn_ones_have_the_colour_of_their_own_ratio():
    rollout = make_turns(5).rollouts[1]
    moved = np.full(len(rollout.log_ratios), -1.0, np.float32)
    moved[rollout.turns[0].end] = 1.0

    text = coloured(dataclasses.replace(rollout, log_ratios=moved))

    styles = {
        name: "".join(text.plain[span.start : span.end] for span in text.spans if span.style == name)
        for name in ("dim", "green")
    }
    assert styles == {"dim": ASKED + ANSWERED, "green": "So"}
    assert "red" in {span.style for span in text.spans}


def test_titles_count_drawn_tokens_and_say_what_was_lost():
    sample = make_turns(5)
    lines = page(sample).splitlines()
    titles = [under for line, under in itertools.pairwise(lines) if "completion " in line]

    want = [len(one.sampler_logprobs) for one in sample.rollouts]
    given = len(sample.rollouts[1].token_ids) - want[1]
    assert f"reward 0.5, {want[1]} tokens, {given} given, turns" in titles[1]
    assert " lost: engine_failed" in titles[3]
    assert f" {want[4]} tokens" in titles[4]
    assert "lost: tool_lost" in titles[4]
    assert "reward" not in titles[3] + titles[4]


def test_facts_of_a_completion_are_whole_at_80_columns():
    sample = make_turns(1)
    parts = tuple(RewardPart(name=f"part_number_{number}", value=0.25) for number in range(8))
    rollouts = tuple(dataclasses.replace(rollout, reward_parts=parts) for rollout in sample.rollouts)
    out = io.StringIO()
    Console(file=out, width=80).print(*sample_page(dataclasses.replace(sample, rollouts=rollouts), only=0))

    assert all(part.name in out.getvalue() for part in parts)


def test_a_list_with_lost_members_has_a_column_of_them():
    lines = shown(summary(), summary(num_lost=2))

    assert lines[0].split()[-4:] == ["cut", "lost", "kept", "because"]
    assert [lines[1].split()[-2], lines[4].split()[-2]] == ["0/8", "2/8"]
