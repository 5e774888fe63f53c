"""A rollout's sequences and turns: each drawn token in one sequence, behind what the policy had read."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.types.rollout import GIVEN, FinishReason, Rollout, Span, parts_of, spread, strips_of, turns_of

PROMPT = np.array([1, 2, 3], np.int32)


def _rollout(*spans):
    """Of (version, tokens) or (version, tokens, keeps); tokens are numbered from 10."""
    made, start = [], 0
    for version, length, *keeps in spans:
        made.append(Span(version=version, start=start, end=start + length, keeps=keeps[0] if keeps else None))
        start += length
    drawn = sum(span.end - span.start for span in made if span.is_drawn)
    return Rollout(
        token_ids=np.arange(10, 10 + start, dtype=np.int32), sampler_logprobs=np.full(drawn, -0.5, np.float32),
        spans=tuple(made), reward=0.0, reward_parts=(), finish_reason=FinishReason.EOS,
    )  # fmt: skip


def _shown(rollout):
    return [(strip.token_ids.tolist(), np.flatnonzero(strip.is_drawn).tolist()) for strip in strips_of(PROMPT, rollout)]


def test_a_completion_is_one_strip_behind_its_prompt():
    assert _shown(_rollout((7, 2), (8, 1))) == [([1, 2, 3, 10, 11, 12], [3, 4, 5])]
    assert strips_of(PROMPT, _rollout((7, 2)))[0].num_inputs == 4


def test_turns_are_drawn_runs_of_one_strip():
    rollout = _rollout((7, 2), (GIVEN, 3), (7, 1), (8, 1))

    assert _shown(rollout) == [([1, 2, 3, 10, 11, 12, 13, 14, 15, 16], [3, 4, 8, 9])]
    assert turns_of(rollout) == ((0, 2), (5, 7))


def test_a_sequence_keeps_tokens_of_the_one_before_as_context():
    rollout = _rollout((7, 2), (GIVEN, 1, 4), (7, 1), (GIVEN, 2, 0), (8, 1))

    assert _shown(rollout) == [
        ([1, 2, 3, 10, 11], [3, 4]),
        # The first drawn token of the first turn is kept, and counted there alone.
        ([1, 2, 3, 10, 12, 13], [5]),
        ([14, 15, 16], [2]),
    ]
    assert turns_of(rollout) == ((0, 2), (3, 4), (6, 7))


def test_what_follows_the_last_drawn_token_is_not_read():
    assert _shown(_rollout((7, 1), (GIVEN, 2))) == [([1, 2, 3, 10], [3])]
    assert _shown(_rollout((7, 1), (GIVEN, 2, 3))) == [([1, 2, 3, 10], [3])]
    assert _shown(_rollout()) == []


_SPANS = st.lists(
    st.tuples(st.sampled_from([GIVEN, 4, 5]), st.integers(1, 4), st.none() | st.integers(0, 3)), max_size=6
)


@given(_SPANS)
def test_each_drawn_token_is_in_one_strip_in_its_order(spans):
    rollout = _rollout(*spans)
    drawn = np.concatenate(
        [rollout.token_ids[span.start : span.end] for span in rollout.spans if span.is_drawn] or [np.zeros(0, np.int32)]
    )

    strips = strips_of(PROMPT, rollout)

    assert [token for strip in strips for token in strip.token_ids[strip.is_drawn].tolist()] == drawn.tolist()
    assert all(strip.is_drawn[-1] for strip in strips)


def test_parts_say_who_wrote_them():
    rollout = _rollout((7, 2), (8, 1), (7, 1), (GIVEN, 3), (8, 1), (GIVEN, 1), (GIVEN, 2, 4), (9, 1))

    found = parts_of(rollout.spans)

    assert [(part.start, part.end, part.writer) for part in found] == [
        (0, 4, "versions 7, 8"), (4, 7, "environment"), (7, 8, "version 8"), (8, 9, "environment"),
        (9, 11, "environment, in a new sequence that keeps 4 tokens"), (11, 12, "version 9"),
    ]  # fmt: skip
    assert parts_of(()) == ()


@given(_SPANS)
def test_parts_cover_all_tokens_once(spans):
    rollout = _rollout(*spans)

    places = [place for part in parts_of(rollout.spans) for place in range(part.start, part.end)]

    assert places == list(range(rollout.token_ids.size))


def test_numbers_of_drawn_tokens_stand_at_their_places():
    drawn = np.array([True, False, True])

    np.testing.assert_array_equal(spread(np.array([-1, -2], np.float32), drawn), np.array([-1, np.nan, -2], np.float32))
    # One number a token says not which are of drawn ones.
    assert np.isnan(spread(np.zeros(3, np.float32), drawn)).all()
    assert spread(np.zeros(0, np.float32), drawn[:0]).size == 0
