"""Sharing a step out over ranks changes neither its loss nor its gradient, whatever the number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterorl.learner.loss.loss_config import (
    EqpConfig,
    GepoConfig,
    GrpoConfig,
    GspoConfig,
    ImpalaConfig,
    M2poConfig,
    MoisConfig,
)
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.train.batch import Batch, assign_groups, build_batch, collate, empty_pass, share_out
from heterorl.learner.train.model import learner_logprobs
from heterorl.learner.train.step import micro_batch_loss, with_first_pass
from tests.support.losses import CATALOGUE, with_reference
from tests.support.training import random_groups, tiny_model

MODEL = tiny_model(dtype=torch.float64)
LOSSES = [
    GepoConfig(), GrpoConfig(), GspoConfig(), EqpConfig(), M2poConfig(), GepoConfig(aggregation="token_mean"),
    ImpalaConfig(), MoisConfig(mixture_age=1.0), GrpoConfig(reference_kl=0.3, aggregation="token_mean"), CATALOGUE["custom"],
    CATALOGUE["custom of the step"],
]  # fmt: skip


def _gradient(loss, groups, *, num_ranks, batching="padded"):
    """What the ranks' gradients add up to, and their losses."""
    model = MODEL
    model.zero_grad(set_to_none=True)
    spec = loss_spec_of(loss)
    batch = build_batch([queued.group for queued in groups], loss=loss, head_version=2)
    if spec.needs_reference:
        batch = with_reference(batch)
    shares = share_out(batch.sequences, num_ranks=num_ranks, max_tokens=40, batching=batching)
    if spec.needs_first_pass:
        with torch.no_grad():
            values = [
                learner_logprobs(model, collate(part, batching=batching), temperature=1.0)[0]
                for parts in shares.parts
                for part in parts
            ]
        ordered = Batch(sequences=tuple(shares.ordered()))
        known = with_first_pass(spec, ordered, values, max_new_tokens=16)
        shares, batch = shares.replaced(known.sequences), batch.with_whole(known, torch.device("cpu"))
    total = 0.0
    for parts in shares.parts:
        for part in parts:
            micro_batch = collate(part, batching=batching)
            logprobs_N, entropies_N = learner_logprobs(model, micro_batch, temperature=1.0)
            value, _ = micro_batch_loss(spec, micro_batch, logprobs_N, entropies_N, batch, max_new_tokens=16)
            value.backward()
            total += float(value.detach())
    return total, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind}-{loss.aggregation}-{loss.advantage}")
def test_ranks_gradients_add_up_to_that_of_one_rank(loss):
    groups = random_groups(5, seed=3)
    expected, expected_gradient = _gradient(loss, groups, num_ranks=1)

    for num_ranks, batching in ((2, "padded"), (3, "packed"), (8, "padded")):
        actual, gradient = _gradient(loss, groups, num_ranks=num_ranks, batching=batching)
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)
        # Norms in the model's attention are computed in fp64 too; what is left is the order of sums.
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_groups_are_balanced(costs, num_ranks):
    ranks = assign_groups(costs, num_ranks)

    loads = [
        sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == number) for number in range(num_ranks)
    ]
    assert len(ranks) == len(costs)
    assert set(ranks) <= set(range(num_ranks))
    # When the fullest rank got its last group it had least of all, so no more than the mean of what was given out.
    assert max(loads) * num_ranks <= sum(costs) + (num_ranks - 1) * max(costs, default=0)


def test_dear_groups_go_to_ranks_of_their_own():
    # 7 | 4 + 2 + 2 | 3 + 3: the dearest first, each to the rank that has least, the lower of equals
    assert assign_groups([2, 7, 3, 4, 2, 3], 3) == [1, 0, 2, 1, 1, 2]


def test_group_stays_whole_and_every_sequence_is_somewhere_once():
    batch = build_batch([queued.group for queued in random_groups(7, seed=1)], loss=GepoConfig())

    shares = share_out(batch.sequences, num_ranks=3, max_tokens=30, batching="padded")

    places = [{sequence.group for part in parts for sequence in part} for parts in shares.parts]
    assert sum(len(place) for place in places) == 7
    assert sorted(map(id, shares.ordered())) == sorted(map(id, batch.sequences))
    assert shares.num_passes == max(len(parts) for parts in shares.parts)


def test_sequences_that_were_replaced_stand_where_the_others_stood():
    batch = build_batch([queued.group for queued in random_groups(4, seed=1)], loss=GepoConfig())
    shares = share_out(batch.sequences, num_ranks=2, max_tokens=30, batching="padded")

    same = shares.replaced(shares.ordered())

    assert [[list(map(id, part)) for part in parts] for parts in same.parts] == [
        [list(map(id, part)) for part in parts] for parts in shares.parts
    ]


def test_more_ranks_than_groups_leave_some_without_work():
    batch = build_batch([queued.group for queued in random_groups(2, seed=1)], loss=GepoConfig())

    shares = share_out(batch.sequences, num_ranks=4, max_tokens=1000, batching="padded")

    assert [len(parts) for parts in shares.parts] == [1, 1, 0, 0]
    assert shares.num_passes == 1
    assert share_out((), num_ranks=4, max_tokens=10, batching="padded").num_passes == 0


def test_empty_pass_can_be_read():
    for batching in ("padded", "packed"):
        logprobs_N, _ = learner_logprobs(tiny_model(), collate([empty_pass()], batching=batching), temperature=1.0)
        assert logprobs_N.shape == (1,)
        assert logprobs_N.isfinite().all()
