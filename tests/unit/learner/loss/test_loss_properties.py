"""What holds for every loss of the catalogue: invariances, padding, extreme numbers."""

import functools
import math
import random

import pytest
import torch

from heterorl.learner.loss.loss_config import DecoupledPpoConfig, GepoConfig, GspoConfig, LossConfig, TisConfig
from heterorl.learner.loss.loss_spec import loss_spec_of
from heterorl.learner.loss.policy_loss import policy_loss
from heterorl.learner.train.batch import build_batch, collate
from heterorl.learner.train.step import step_coefficients, with_first_pass
from tests.support.losses import CATALOGUE, groups_of, run_loss, with_reference

SHAPE = [[3, 5, 1, 4], [2, 6, 4], [1, 1, 5]]


def _case(seed=0, shape=SHAPE, spread=0.35):
    rng = random.Random(seed)
    sampler = [[[-2 * rng.random() - 0.01 for _ in range(size)] for size in sizes] for sizes in shape]
    rewards = [[float(rng.randint(0, 4)) / 4 for _ in sizes] for sizes in shape]
    learner = [[x + spread * rng.gauss(0, 1) for x in row] for rows in sampler for row in rows]
    return learner, groups_of(sampler, rewards)


def _assert_same(one, other, tolerance=1e-12):
    assert other.value == pytest.approx(one.value, abs=tolerance)
    for left, right in zip(one.gradients, other.gradients, strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CATALOGUE)
def test_loss_does_not_depend_on_micro_batches_their_order_or_padding(name):
    # Parts are also what ranks would hold: the loss of a rank is the sum of its parts. Each has its own width.
    learner, groups = _case()
    whole = run_loss(CATALOGUE[name], learner, groups)

    for parts in ([[i] for i in range(10)], [[9, 0, 4], [1, 2, 3, 5], [8, 7, 6]]):
        _assert_same(whole, run_loss(CATALOGUE[name], learner, groups, parts=parts))


def _inputs(config: LossConfig, learner, groups):
    spec = loss_spec_of(config)
    batch = build_batch(groups, loss=config, head_version=3)
    if spec.needs_reference:
        batch = with_reference(batch)
    logprobs = [torch.tensor(row, dtype=torch.float64) for row in learner]
    if spec.needs_first_pass:
        batch = with_first_pass(spec, batch, logprobs, max_new_tokens=8)
    inputs = collate(batch.sequences, batching="padded").loss_inputs
    coefficients = step_coefficients(spec, inputs.mask_BT, batch, max_new_tokens=8)
    return spec, inputs, inputs.padded(torch.cat(logprobs)), {"coefficients_BT": coefficients, "step": batch.whole}


@pytest.mark.parametrize("name", CATALOGUE)
def test_gradient_reaches_learner_logprobs_only(name):
    learner, groups = _case(4)
    spec, inputs, learner_BT, given = _inputs(CATALOGUE[name], learner, groups)
    constants = [
        inputs.sampler_BT,
        inputs.advantages_B,
        inputs.log_denominators_B,
        inputs.log_expectations_B,
        inputs.couplings_B,
        inputs.staleness_BT,
        *([] if inputs.reference_BT is None else [inputs.reference_BT]),
    ]
    for tensor in (learner_BT, *constants):
        tensor.requires_grad_()

    policy_loss(spec, inputs, learner_BT, **given).contributions_B.sum().backward()

    assert learner_BT.grad.abs().max() > 0
    assert all(tensor.grad is None for tensor in constants if tensor is not inputs.staleness_BT)
    assert torch.equal(learner_BT.grad[~inputs.mask_BT], torch.zeros_like(learner_BT.grad[~inputs.mask_BT]))


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_stands_in_padding_changes_nothing(name):
    learner, groups = _case(5)
    spec, inputs, learner_BT, given = _inputs(CATALOGUE[name], learner, groups)
    mask = inputs.mask_BT
    clean = policy_loss(spec, inputs, learner_BT, **given).contributions_B
    garbage = learner_BT.masked_fill(~mask, float("nan")).requires_grad_()
    inputs.sampler_BT.masked_fill_(~mask, float("inf"))

    dirty = policy_loss(spec, inputs, garbage, **given).contributions_B
    dirty.sum().backward()

    assert torch.equal(clean, dirty)
    assert garbage.grad.isfinite().all()


WITH_M2 = [name for name, config in CATALOGUE.items() if config.kind not in ("eqp", "custom") and not config.m2_budget]


@pytest.mark.parametrize("name", WITH_M2)
def test_a_budget_that_drops_no_token_changes_no_gradient(name):
    # Clipped tokens keep no gradient, and the tokens of a sum all of theirs.
    learner, groups = _case()
    config = CATALOGUE[name]

    _assert_same(
        run_loss(config, learner, groups), run_loss(config.model_copy(update={"m2_budget": 1e9}), learner, groups)
    )


LENGTH = 16384
EXTREMES = {
    "learner far above": (-100.0, -20000.0),
    "learner far below": (-20000.0, -100.0),
    "both far down": (-20000.0, -19000.0),
    "sampler beyond any probability": (-100.0, -2e7),
}


@functools.cache
def _long_groups(sampler_sum):
    """A truncated member of one token, a group of equal rewards and a group of one beside the long rollouts."""
    long = [sampler_sum / LENGTH] * LENGTH
    return groups_of([[long, [-0.5], long], [[-1.0], [-2.0]], [[-3.0]]], [[1.0, 0.5, 0.0], [1.0, 1.0], [0.0]])


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize(("learner_sum", "sampler_sum"), EXTREMES.values(), ids=EXTREMES.keys())
def test_loss_and_gradient_are_finite_on_16k_tokens(name, learner_sum, sampler_sum):
    long = torch.full((LENGTH,), learner_sum / LENGTH, dtype=torch.float64)
    learner = [long, [-0.6], long, [-1.0], [-2.0], [-3.0]]
    if name == "dapo dropping":
        learner = learner[:3]

    outcome = run_loss(CATALOGUE[name], learner, _long_groups(sampler_sum), max_tokens=LENGTH, head_version=5)

    assert math.isfinite(outcome.value)
    assert all(gradient.isfinite().all() for gradient in outcome.gradients)
    assert all(terms.weights.isfinite().all() for terms in outcome.terms)


@pytest.mark.parametrize(
    "config",
    [TisConfig(cap=math.inf, max_log_weight=20.0), DecoupledPpoConfig(behaviour_cap=math.inf, max_log_weight=20.0)],
)
def test_weights_without_a_bound_of_their_own_are_finite(config):
    outcome = run_loss(config, [[-1.0], [-1.0]], groups_of([[[-2000.0], [-1.0]]], [[1.0, 0.0]]))

    # Capped at e^20, with A = .5 over two tokens and log p = -1 or ratio 1.
    assert outcome.terms[0].weights.max() == pytest.approx(math.exp(20))
    assert math.isfinite(outcome.value)


@pytest.mark.parametrize("name", CATALOGUE)
def test_groups_of_equal_rewards_add_no_policy_gradient(name):
    learner, groups = _case(7)
    flat = [[0.5] * len(group.rollouts) for group in groups]
    groups = groups_of([[m.sampler_logprobs.tolist() for m in g.rollouts] for g in groups], flat)
    learner = [] if name == "dapo dropping" else learner
    if not learner:
        assert build_batch(groups, loss=CATALOGUE[name]).num_sequences == 0
        return

    outcome = run_loss(CATALOGUE[name], learner, groups)

    assert outcome.value == pytest.approx(0.0, abs=1e-15)
    assert all(gradient.abs().max() < 1e-15 for gradient in outcome.gradients)


@pytest.mark.parametrize("config", [GspoConfig(), GepoConfig(), CATALOGUE["grpo"]])
def test_clip_mask_is_exactly_where_the_gradient_vanishes(config):
    learner, groups = _case(8, shape=[[1] * 8] * 5, spread=0.6)
    spec, inputs, learner_BT, given = _inputs(config, learner, groups)
    learner_BT.requires_grad_()

    terms = policy_loss(spec, inputs, learner_BT, **given)
    terms.contributions_B.sum().backward()

    moves = learner_BT.grad[:, 0] != 0
    is_clipped = terms.is_clipped.flatten()
    assert torch.equal(moves[inputs.advantages_B != 0], ~is_clipped[inputs.advantages_B != 0])
    assert is_clipped.any()


def test_loss_refuses_misaligned_tensors():
    learner, groups = _case(1)
    spec, inputs, learner_BT, given = _inputs(GepoConfig(), learner, groups)

    with pytest.raises(AssertionError):
        policy_loss(spec, inputs, learner_BT[:, :2], **given)
