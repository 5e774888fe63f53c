"""Tokens as a browser shows them: their text, their colours, their numbers."""

import dataclasses
import math

import numpy as np
import pytest

from heterorl.common.types.rollout import Span
from heterorl.view.token_colours import probability_classes, ratio_classes, tokens_of
from tests.support.samples import ANSWERED, ASKED, TURNS, make_rollout, make_turns, pieces_of

TEXT = "Wait, 12 + 30\nis 42."
NONE = np.zeros(0, np.float32)


def floats(*values):
    return np.array(values, np.float32)


def test_ratios_have_steps_on_both_sides_of_none():
    values = floats(-3, -1.0001, -0.6, -0.3, -0.1, -0.04, 0, 0.04, 0.1, 0.3, 0.6, 3, math.nan)

    assert ratio_classes(values) == ["n4", "n4", "n3", "n2", "n1", "z", "z", "z", "p1", "p2", "p3", "p4", "x"]


def test_probabilities_have_steps_from_sure_to_surprising():
    values = np.log(np.array([1.0, 0.91, 0.8, 0.3, 0.05, 0.001], np.float32))

    assert probability_classes(values) == ["l0", "l0", "l1", "l2", "l3", "l4"]


def test_all_text_is_there_once():
    tokens, rest = tokens_of(make_rollout(TEXT, seed=1), limit=1000)

    assert [token.text for token in tokens] == pieces_of(TEXT)
    assert rest == ""


def test_what_is_behind_the_limit_is_text():
    tokens, rest = tokens_of(make_rollout(TEXT, seed=1), limit=3)

    assert len(tokens) == 3
    assert "".join(token.text for token in tokens) + rest == TEXT


def test_numbers_are_the_tokens_own():
    rollout = make_rollout(
        "ab c", seed=2, version=7, sampler_logprobs=floats(-0.5, -2.0), log_ratios=floats(0.25, -1.5)
    )

    tokens, _ = tokens_of(rollout, limit=10)

    assert [token.numbers.split()[1:] for token in tokens] == [["-0.5", "0.25", "7"], ["-2", "-1.5", "7"]]
    assert [token.classes for token in tokens] == ["p2 l1", "n4 l2"]


def test_another_policy_is_marked_where_it_begins():
    rollout = make_rollout("a b c", seed=1)
    spans = (Span(version=4, start=0, end=2), Span(version=5, start=2, end=len(rollout.token_ids)))

    tokens, _ = tokens_of(dataclasses.replace(rollout, spans=spans), limit=10)

    assert [token.switch for token in tokens] == ["", "", "5"]


def test_nothing_is_said_of_what_nobody_stated():
    tokens, _ = tokens_of(make_rollout("a", seed=1, log_ratios=NONE, sampler_logprobs=NONE, spans=()), limit=10)

    assert tokens[0].numbers.split()[1:] == ["-", "-", "-"]
    assert tokens[0].classes == "x x"


@pytest.mark.parametrize("ends", [[], [1], [5, 2, 20], [1, 2, 999], [-5, 3, 4]])
def test_ends_that_are_not_of_this_text_cut_nothing(ends):
    rollout = make_rollout("a b c", seed=1, token_ends=np.array(ends, np.int32))

    assert tokens_of(rollout, limit=10) == ([], "a b c")


def test_without_text_ids_are_shown():
    rollout = make_rollout("a b", seed=1)

    tokens, rest = tokens_of(dataclasses.replace(rollout, completion=""), limit=10)

    assert [token.text.strip() for token in tokens] == [str(number) for number in rollout.token_ids]
    assert rest == ""


def test_a_token_without_characters_is_there_to_be_pointed_at():
    rollout = make_rollout("ab", seed=1)
    doubled = {name: np.repeat(getattr(rollout, name), 2) for name in ("token_ids", "sampler_logprobs", "log_ratios")}

    tokens, _ = tokens_of(dataclasses.replace(rollout, **doubled, token_ends=np.array([2, 2], np.int32)), limit=9)

    assert [token.text for token in tokens] == ["ab", ""]
    assert tokens[1].classes.endswith(" none")


@pytest.mark.parametrize("number", range(len(TURNS)))
def test_turns_are_whole_and_given_tokens_have_no_number(number):
    rollout = make_turns(1).rollouts[number]

    tokens, rest = tokens_of(rollout, limit=1000)

    assert "".join(token.text for token in tokens) + rest == rollout.completion
    given = "".join(token.text for token in tokens if "given" in token.classes.split())
    assert given == "".join(text for version, text, *_ in TURNS[number][2] if version < 0)
    for token in tokens:
        if "given" in token.classes.split():
            assert token.numbers.split()[1:] == ["-", "-", "given"]
            assert token.classes.startswith("x x")


def test_numbers_of_turns_are_those_of_the_drawn_tokens_in_their_order():
    rollout = make_turns(1).rollouts[1]

    tokens, _ = tokens_of(rollout, limit=1000)

    drawn = [token.numbers.split() for token in tokens if "given" not in token.classes]
    assert [float(said) for _, said, _, _ in drawn] == rollout.sampler_logprobs.tolist()
    assert [float(moved) for _, _, moved, _ in drawn] == rollout.log_ratios.tolist()
    # The first tokens alone, in the middle of what was given.
    cut = rollout.turns[1].start + 3
    assert tokens_of(rollout, limit=cut)[0] == tokens[:cut]


def test_heads_say_who_writes_and_a_switch_within_a_turn_is_marked():
    tokens, _ = tokens_of(make_turns(1).rollouts[1], limit=1000)

    heads = [(token.head, token.text) for token in tokens if token.head]
    assert heads == [
        ("version 40", "Let"), ("environment", "<"), ("versions 40, 41", "So"), ("environment", "<"),
        ("version 41", "Done"),
    ]  # fmt: skip
    assert [(token.switch, token.text) for token in tokens if token.switch] == [("41", " is")]
    # A single completion has no head, and another sequence says what it keeps.
    assert not any(token.head for token in tokens_of(make_turns(1).rollouts[0], limit=1000)[0])
    kept = [token.head for token in tokens_of(make_turns(1).rollouts[2], limit=1000)[0] if token.head]
    assert kept[3] == "environment, in a new sequence that keeps 3 tokens"


def test_spans_of_other_tokens_say_nothing():
    spans = (Span(version=40, start=0, end=3), Span(version=-1, start=3, end=99_999))
    rollout = dataclasses.replace(make_turns(1).rollouts[1], spans=spans)

    tokens, rest = tokens_of(rollout, limit=1000)

    assert "".join(token.text for token in tokens) + rest == rollout.completion
    assert ASKED + "So it is 42." + ANSWERED in rollout.completion
    assert not any(token.head for token in tokens)
    assert rollout.turn_texts == ()
