"""The list of samples on a narrow terminal: texts are read, and no reward is said three times."""

import io

import pytest
from rich.console import Console

from heterorl.cli.samples.table import samples_table
from heterorl.common.types.common import SiteId
from heterorl.common.types.sample import SampleKind, SampleSummary

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
    assert facts.split() == ["36", "12", "2", "us-west-1", "0.5", "[0,", "1]", "640", "1/8", "consumed"]
    assert prompt == f"    prompt      {PROMPT}"
    assert completion == "    completion  It breathes fire."


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
