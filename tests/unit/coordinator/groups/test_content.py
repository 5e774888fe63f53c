"""A group's numbers are judged by its columns, as the same rules asked rollout by rollout would judge them."""

import dataclasses
import math
import random
import re

import numpy as np
import pytest

from heterorl.common.errors import MalformedPayload
from heterorl.common.types.rollout import GIVEN, MAX_PART_NAME, MAX_REWARD_PARTS, FinishReason, Group, Rollout, Span
from heterorl.common.wire.sealed_groups import columns_of
from heterorl.coordinator.groups.validation import content_problem
from tests.support.groups import group_to_pb
from tests.support.odd_groups import EOS, LONGEST, MAX_PROMPT, changed_group, contract_of, sound_group

VOCABULARIES = (40, 128, 256, 257, 17_001, 65_537, 150_000, 2**24 + 1, 2**31)


def _problem(group: Group, contract) -> str:
    try:
        columns = columns_of(group_to_pb(group))
    except MalformedPayload as error:
        return f"malformed: {error}"
    return content_problem(columns, contract, max_prompt_tokens=MAX_PROMPT)


def _turns(rollout: Rollout) -> list[tuple[int, int]]:
    """Runs of drawn tokens."""
    marks = "".join("gd"[span.is_drawn] * (span.end - span.start) for span in rollout.spans)
    return [match.span() for match in re.finditer("d+", marks)]


def _expected(group: Group, contract) -> str:
    """The field that a reader of the rules, one rollout at a time, would name; empty where nothing is wrong."""
    ends, prompt = contract.end_token_ids, group.prompt_token_ids.tolist()
    drawn = [span.end - span.start for rollout in group.rollouts for span in rollout.spans if span.is_drawn]
    if sum(drawn) != sum(rollout.num_drawn for rollout in group.rollouts):
        return "malformed: logprobs"
    if len(prompt) > MAX_PROMPT or not prompt or max(prompt) >= contract.vocab_size:
        return "prompt"
    if not math.isfinite(group.generation_s) or group.generation_s < 0:
        return "generation_s"
    ended = [rollout.finish_reason.is_trainable for rollout in group.rollouts]
    if sum(ended) < (contract.min_members or contract.group_size):
        return "endings"
    wrong = set()
    longest = contract.max_trajectory_tokens if contract.max_turns > 1 else LONGEST
    for rollout in group.rollouts:
        ids, logprobs, spans = rollout.token_ids.tolist(), rollout.sampler_logprobs.tolist(), rollout.spans
        if not (0 if not rollout.finish_reason.is_trainable else 1) <= len(ids) <= longest:
            wrong.add("lengths")
            continue
        if len(rollout.routed_experts) not in (0, contract.routed_token_bytes * (len(prompt) + len(ids) - 1)):
            wrong.add("record_lengths")
        values = [rollout.reward, *(part.value for part in rollout.reward_parts)]
        if not all(map(math.isfinite, values)):
            wrong.add("rewards")
        if not all(math.isfinite(part.weight) for part in rollout.reward_parts):
            wrong.add("part_weights")
        if not all(math.isfinite(number) and number <= 0 for number in logprobs):
            wrong.add("logprobs")
        if not ids:
            continue
        if not spans:
            wrong.add("span_counts")
            continue
        if sum(s.end - s.start for s in spans) != len(ids) or any(s.end == s.start for s in spans):
            wrong.add("span_lengths")
            continue
        has_bad_version = any(span.version < (GIVEN if contract.max_turns > 1 else 0) for span in spans)
        if has_bad_version or not spans[0].is_drawn or (rollout.finish_reason.is_trainable and not spans[-1].is_drawn):
            wrong.add("span_versions")
            continue
        sequences = [len(prompt)]
        for number, span in enumerate(spans):
            if span.keeps is not None and (span.is_drawn or not number or span.keeps > sequences[-1]):
                wrong.add("span_keeps")
            if span.keeps is not None:
                sequences.append(span.keeps)
            sequences[-1] += span.end - span.start
        if len(sequences) > 1 and len(sequences) * max(sequences) > len(prompt) + longest:
            wrong.add("span_keeps")
        if len(sequences) > 1 and rollout.routed_experts:
            wrong.add("several_records")
        turns = _turns(rollout)
        if len(turns) > contract.max_turns:
            wrong.add("num_turns")
        if max(ids) >= contract.vocab_size:
            wrong.add("token_ids")
        if any(end - start > LONGEST for start, end in turns):
            wrong.add("long_turn")
        if ends:
            if any(token in ends for start, end in turns for token in ids[start : end - 1]):
                wrong.add("early_end")
            if any(ids[end - 1] not in ends and end - start < LONGEST for start, end in turns):
                wrong.add("unended")
            said, is_ended = rollout.finish_reason, ids[turns[-1][1] - 1] in ends
            if (said is FinishReason.EOS and not is_ended) or (said is FinishReason.LENGTH and is_ended):
                wrong.add("endings")
            if contract.max_turns == 1 and said in (FinishReason.CONTEXT, FinishReason.SECONDS):
                wrong.add("other_endings")
    order = {
        "lengths": "lengths", "record_lengths": "record_lengths", "span_counts": "span_counts",
        "span_lengths": "span_lengths", "span_versions": "span_versions", "span_keeps": "span_keeps",
        "several_records": "record_lengths", "num_turns": "span_versions", "token_ids": "token_ids", "long_turn": "lengths", "early_end": "token_ids",
        "endings": "endings", "unended": "token_ids", "other_endings": "endings", "logprobs": "logprobs", "rewards": "rewards",
        "part_weights": "part_weights",
    }  # fmt: skip
    for name, field in order.items():
        if name in wrong:
            return field
    oldest = min(span.version for rollout in group.rollouts for span in rollout.spans if span.is_drawn)
    return "" if oldest == group.oldest_version else "oldest_version"


@pytest.mark.parametrize(
    ("vocabulary", "ends", "max_turns"),
    [
        (vocabulary, ends, 1 if (row + column) % 2 else 3)
        for row, vocabulary in enumerate(VOCABULARIES)
        for column, ends in enumerate([(), (2,), (39,), (128,), (EOS,), (2, 128), (39, 300, EOS)])
    ],
)
def test_columns_are_judged_as_rollouts_one_by_one_would_be(vocabulary, ends, max_turns):
    draw = random.Random(vocabulary * 100 + sum(ends))
    ends = [token for token in ends if token < vocabulary]
    contract = contract_of(
        vocabulary, *ends, routed_token_bytes=6, max_turns=max_turns, min_members=draw.choice([0, 1])
    )
    seen = {True: 0, False: 0}
    for _ in range(60):
        group = changed_group(sound_group(draw, contract), draw)

        problem, expected = _problem(group, contract), _expected(group, contract)

        assert problem.startswith(expected), f"{problem!r}, {expected!r}\n{group}"
        assert bool(problem) == bool(expected), f"{problem!r}, {expected!r}\n{group}"
        seen[not problem] += 1
    assert min(seen.values()) > 5


@pytest.mark.parametrize(
    ("part_changes", "count", "problem"),
    [
        ({"name": "a" * (MAX_PART_NAME + 1)}, 1, "part_names: a name has at most"),
        ({"name": "a\x07b"}, 1, "part_names: a name has at most"),
        ({}, MAX_REWARD_PARTS + 1, f"part_counts: rollout 1 has {MAX_REWARD_PARTS + 1} parts"),
        ({"name": "a" * MAX_PART_NAME}, MAX_REWARD_PARTS, ""),
    ],
)
def test_parts_of_rewards_are_bounded(part_changes, count, problem):
    contract = contract_of(300)
    group = sound_group(random.Random(3), contract)
    first, second = group.rollouts
    parts = (dataclasses.replace(first.reward_parts[0], **part_changes),) * count
    group = dataclasses.replace(group, rollouts=(first, dataclasses.replace(second, reward_parts=parts)))

    assert _problem(group, contract).startswith(problem)
    assert bool(_problem(group, contract)) == bool(problem)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_group_has_the_size_of_the_contract(count):
    contract = contract_of(300)
    group = sound_group(random.Random(4), contract)

    assert _problem(dataclasses.replace(group, rollouts=group.rollouts[:1] * count), contract) == (
        f"lengths: {count} rollouts, the group size is 2"
    )


@pytest.mark.parametrize(
    ("token_bytes", "change", "is_right"),
    [
        (6, lambda record: record, True),
        (6, lambda _: b"", True),
        (6, lambda record: record[:-1], False),
        (6, lambda record: record + record, False),
        (7, lambda record: record, False),
        # No routing is replayed in this run.
        (0, lambda record: record, False),
        (0, lambda _: b"", True),
    ],
)
def test_record_of_experts_has_the_size_that_the_contract_states(token_bytes, change, is_right):
    contract = contract_of(300, routed_token_bytes=token_bytes)
    group = sound_group(random.Random(1), contract)
    first = group.rollouts[0]
    record = bytes(6 * (group.prompt_token_ids.size + first.token_ids.size - 1))
    first = dataclasses.replace(first, routed_experts=change(record))

    problem = _problem(dataclasses.replace(group, rollouts=(first, *group.rollouts[1:])), contract)

    assert problem == "" if is_right else problem.startswith("record_lengths: rollout 0 has")


def _of_sequences(pieces: list[tuple[int, int | None, int]], record: bytes = b"") -> Group:
    """A group of one trainable rollout: pieces are given tokens, how many tokens are kept before them, drawn tokens."""
    spans: list[Span] = []
    for given, keeps, drawn in pieces:
        start = spans[-1].end if spans else 0
        if given:
            spans.append(Span(version=GIVEN, start=start, end=start + given, keeps=keeps))
        spans.append(Span(version=3, start=start + given, end=start + given + drawn))
    count = sum(drawn for _, _, drawn in pieces)
    rollout = Rollout(
        token_ids=np.full(spans[-1].end, 5, np.int32), sampler_logprobs=np.full(count, -1.0, np.float32),
        spans=tuple(spans), reward=1.0, reward_parts=(), finish_reason=FinishReason.LENGTH, routed_experts=record,
    )  # fmt: skip
    lost = dataclasses.replace(
        rollout, token_ids=rollout.token_ids[:0], sampler_logprobs=rollout.sampler_logprobs[:0], spans=(),
        finish_reason=FinishReason.TOOL_LOST, routed_experts=b"",
    )  # fmt: skip
    group = sound_group(random.Random(1), contract_of(300))
    return dataclasses.replace(group, prompt_token_ids=np.full(5, 5, np.int32), rollouts=(lost, rollout))


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        # Of a prompt of 5 and 35 more tokens: 2 of 20 fit and 2 of 21 do not, and so do not 3 of which two are short.
        ([(0, None, 9), (4, 7, 9)], ""),
        ([(0, None, 9), (4, 8, 9)], "span_keeps: rollout 1 has 2 sequences of up to 21 tokens; together they may have"),
        ([(0, None, 9), (1, 0, 1), (1, 0, 1)], "span_keeps: rollout 1 has 3 sequences of up to 14 tokens"),
        ([(0, None, 9), (8, None, 9), (8, None, 1)], ""),
    ],
)
def test_sequences_of_a_rollout_cost_no_more_than_the_longest_one_may(pieces, problem):
    contract = contract_of(300, max_turns=4, min_members=1, longest=35)

    found = _problem(_of_sequences(pieces), contract)

    assert found.startswith(problem)
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(("keeps", "problem"), [(None, ""), (5, "record_lengths: rollout 1 has several sequences")])
def test_rollout_of_several_sequences_has_no_record_of_experts(keeps, problem):
    contract = contract_of(300, max_turns=2, min_members=1, routed_token_bytes=2)
    group = _of_sequences([(0, None, 9), (2, keeps, 9)], record=bytes(2 * (5 + 20 - 1)))

    found = _problem(group, contract)

    assert found.startswith(problem)
    assert bool(found) == bool(problem)
