"""Groups of one push, judged as one: each has the arrival that it has alone."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from heterorl.common.types.rollout import FinishReason, Group, Rollout
from heterorl.common.wire.sealed_groups import shape_of
from heterorl.coordinator.groups import intake
from heterorl.coordinator.groups.intake import Arrival, examined
from heterorl.v1 import rollout_pb2
from tests.support.groups import group_to_pb
from tests.support.odd_groups import MAX_PROMPT, changed_group, contract_of, sound_group

COLUMNS = [field.name for field in rollout_pb2.Group.DESCRIPTOR.fields if field.type == field.TYPE_BYTES]
ROUTED = 6
"""Bytes of a token's record of experts."""


def _examined(messages: Sequence[rollout_pb2.Group], contract) -> list[Arrival]:
    # A message is cleaned where it lies.
    copies = [rollout_pb2.Group.FromString(message.SerializeToString()) for message in messages]
    return examined(copies, contract, max_prompt_tokens=MAX_PROMPT)


def _alone(messages: Sequence[rollout_pb2.Group], contract) -> list[Arrival]:
    return [_examined([message], contract)[0] for message in messages]


def _with(group: Group, *, prompt: int, records_of: int = 0, **change: object) -> Group:
    """The group with a prompt of this length, and records of experts for a prompt of that length."""

    def changed(some: Rollout) -> Rollout:
        record = bytes(ROUTED * (records_of + some.token_ids.size - 1)) if records_of else b""
        return dataclasses.replace(some, routed_experts=record, **change)

    prompt_ids = np.ones(prompt, np.int32)
    return dataclasses.replace(group, prompt_token_ids=prompt_ids, rollouts=tuple(map(changed, group.rollouts)))


@pytest.mark.parametrize("max_turns", [1, 3])
@pytest.mark.parametrize("vocabulary", [40, 300, 150_000])
def test_odd_groups_among_sound_ones_are_found(vocabulary, max_turns):
    draw = random.Random(vocabulary + max_turns)
    contract = contract_of(vocabulary, 2, 39, routed_token_bytes=ROUTED, max_turns=max_turns, min_members=1)
    seen = {True: 0, False: 0}
    for _ in range(40):
        groups = [sound_group(draw, contract) for _ in range(draw.randint(2, 5))]
        if draw.random() < 0.7:
            at = draw.randrange(len(groups))
            groups[at] = changed_group(groups[at], draw)
        messages = [group_to_pb(group) for group in groups]

        together = _examined(messages, contract)

        # By their texts: a duration that is no number differs from itself.
        assert repr(together) == repr(_alone(messages, contract))
        seen[all(not arrived.problem for arrived in together)] += 1
    assert min(seen.values()) > 5


@pytest.mark.parametrize("column", COLUMNS)
def test_column_that_one_group_lacks_and_its_neighbour_has_is_found(column):
    contract = contract_of(300)
    first, second = (group_to_pb(sound_group(random.Random(5), contract)) for _ in range(2))
    size = max(1, len(getattr(first, column)) // 2)
    moved = (getattr(second, column) or bytes(64))[:size]
    setattr(first, column, getattr(first, column) + moved)
    setattr(second, column, getattr(second, column)[size:])

    arrivals = _examined([first, second], contract)

    assert arrivals[0].problem
    assert repr(arrivals) == repr(_alone([first, second], contract))


@pytest.mark.parametrize(
    "odd",
    [{"prompt": 9, "records_of": 3}, {"prompt": 9, "records_of": 9, "finish_reason": FinishReason.TOOL_LOST}],
    ids=["records of the neighbour's prompt", "all members lost"],
)
def test_rules_of_a_whole_group_hold_for_each(odd):
    contract = contract_of(40, routed_token_bytes=ROUTED, min_members=1)
    group = sound_group(random.Random(3), contract)
    messages = [group_to_pb(_with(group, prompt=3, records_of=3)), group_to_pb(_with(group, **odd))]

    assert [bool(arrived.problem) for arrived in _examined(messages, contract)] == [False, True]


@pytest.mark.parametrize(("judged_bytes", "num_reads"), [(1 << 20, 2), (1, 6)])
def test_sound_groups_of_one_shape_are_read_at_once(monkeypatch, judged_bytes, num_reads):
    draw, reads = random.Random(7), []
    # The second contract's ids need three bytes each.
    kinds = [contract_of(40), contract_of(150_000)]
    messages = [group_to_pb(sound_group(draw, kinds[place % 2])) for place in range(6)]
    for place, message in enumerate(messages):
        message.id.sequence = place + 1
    real = intake.columns_of
    monkeypatch.setattr(intake, "JUDGED_BYTES", judged_bytes)
    monkeypatch.setattr(intake, "columns_of", lambda *some: reads.append(len(some)) or real(*some))

    arrivals = _examined(messages, kinds[1])

    assert [arrived.id.sequence for arrived in arrivals] == [1, 2, 3, 4, 5, 6]
    assert all(not arrived.problem for arrived in arrivals)
    assert len({shape_of(message) for message in messages}) == 2
    assert (len(reads), sum(reads)) == (num_reads, 6)
