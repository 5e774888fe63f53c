"""Which merged deltas are made and kept, as pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.coordinator.payloads.merged_deltas import KEEP_VERSIONS, Span, due_blocks, to_evict, worth_merging


def spans(text):
    return [Span(*map(int, word.split("-"))) for word in text.split()]


def payload(kind, start, stop):
    return PayloadRef(kind=kind, from_version=start, to_version=stop, digest=Digest(""), num_bytes=1)


@pytest.mark.parametrize(
    ("head", "window", "have", "expected"),
    [
        (-1, 256, "", ""),
        (3, 256, "", ""),
        (4, 256, "", "0-4"),
        (4, 256, "0-4", ""),
        (11, 256, "", "4-8 0-4"),
        (16, 256, "12-16 4-8", "8-12 0-4 0-16"),
        # Of the last 4 versions, 5..8: only what ends in them, and nothing longer than them.
        (8, 4, "", "4-8"),
        (9, 4, "", "4-8"),
        (19, 16, "", "12-16 8-12 4-8 0-4 0-16"),
        (20, 16, "", "16-20 12-16 8-12 4-8 0-16"),
    ],
)
def test_due_blocks_are_those_of_the_window_small_before_large(head, window, have, expected):
    assert list(due_blocks(head=head, window=window, have=spans(have))) == spans(expected)


@given(head=st.integers(0, 700), window=st.integers(1, 300))
def test_due_blocks_are_blocks_that_exist_and_are_not_evicted_at_once(head, window):
    due = list(due_blocks(head=head, window=window, have=()))

    assert len(due) == len(set(due))
    assert all(span.is_block and span.start >= 0 and span.stop <= head for span in due)
    assert to_evict(dict.fromkeys(due, 1), head=head, window=window, budget_bytes=len(due)) == []


@pytest.mark.parametrize(
    ("span", "is_block"),
    [("0-4", True), ("4-8", True), ("2-6", False), ("0-8", False), ("16-32", True), ("8-24", False), ("0-2", False),
     ("0-64", True), ("3-4", False)],
)  # fmt: skip
def test_block_is_a_power_of_4_at_a_multiple_of_its_length(span, is_block):
    assert spans(span)[0].is_block == is_block


D, M, S = PayloadKind.DELTA, PayloadKind.MERGED, PayloadKind.SNAPSHOT


@pytest.mark.parametrize(
    ("payloads", "head", "expected"),
    [
        ([], 4, None),
        ([(D, 3, 4)], 4, None),
        ([(M, 0, 4)], 4, None),
        ([(D, 0, 1), (D, 1, 2), (D, 2, 3)], 3, None),  # too short to be worth it
        ([(D, 0, 1), (D, 1, 2), (D, 2, 3), (D, 3, 4)], 4, Span(0, 4)),
        ([(D, 0, 1), (D, 1, 2), (D, 2, 3), (D, 3, 4)], 5, None),  # nobody else will want an old version
        ([(D, 3, 4), (M, 4, 8)], 8, Span(3, 8)),
        ([(S, -1, 2), (M, 2, 6), (D, 6, 7)], 7, Span(2, 7)),
        ([(S, -1, 2), (M, 2, 7)], 7, None),
    ],
)
def test_plan_is_worth_merging_when_several_deltas_lead_far_enough_to_the_head(payloads, head, expected):
    assert worth_merging([payload(*entry) for entry in payloads], head=head) == expected


@pytest.mark.parametrize(
    ("have", "head", "window", "budget", "evicted"),
    [
        ("0-4 4-8", 20, 16, 99, "0-4"),
        ("0-4 4-8", 19, 16, 99, ""),
        ("3-8", 8 + KEEP_VERSIONS, 99, 99, ""),
        ("3-8", 9 + KEEP_VERSIONS, 99, 99, "3-8"),
        ("0-4 4-8 0-16 9-18", 18, 99, 4, ""),
        ("0-4 4-8 0-16 9-18", 18, 99, 3, "9-18"),
        ("0-4 4-8 0-16 9-18", 18, 99, 1, "9-18 0-4 4-8"),
        ("12-16 0-16", 18, 99, 1, "12-16"),
        ("0-4", 4, 99, 0, "0-4"),
    ],
)
def test_useless_goes_first_then_the_least_useful_until_the_budget_is_kept(have, head, window, budget, evicted):
    sizes = dict.fromkeys(spans(have), 1)

    assert to_evict(sizes, head=head, window=window, budget_bytes=budget) == spans(evicted)


def test_budget_counts_bytes():
    sizes = {Span(0, 4): 10, Span(4, 8): 7, Span(8, 12): 7}

    assert to_evict(sizes, head=12, window=99, budget_bytes=14) == [Span(0, 4)]
    assert to_evict(sizes, head=12, window=99, budget_bytes=13) == [Span(0, 4), Span(4, 8)]
