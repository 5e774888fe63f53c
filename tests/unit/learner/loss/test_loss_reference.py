"""Every loss against the same loss written with loops: value, and gradient by central differences."""

import dataclasses
import math

import pytest

from heterorl.learner.loss.loss_config import DecoupledPpoConfig
from tests.support.loss_cases import HEAD, assert_equals, case_of, coefficient, groups_of_case
from tests.support.loss_reference import Reference, advantage, drifted, second_moment_kept
from tests.support.losses import CATALOGUE, run_loss

# Algorithm -> objective, advantage, aggregation.
REFERENCES = {
    "gepo": (Reference.gepo, "mean", "sequence_mean"),
    "gepo arithmetic": (lambda self, i, a: self.gepo(i, a, "arithmetic"), "mean", "sequence_mean"),
    "gepo geometric": (lambda self, i, a: self.gepo(i, a, "geometric"), "mean", "sequence_mean"),
    "gepo raw": (Reference.gepo_raw, "mean", "sequence_mean"),
    "gepo preserving": (Reference.gepo_preserving, "mean", "sequence_mean"),
    "gepo clipped on gspo": (Reference.gepo_on_gspo, "mean", "sequence_mean"),
    "gepo with opsm": (Reference.gepo, "mean", "sequence_mean"),
    "gepo with m2po": (Reference.gepo_spread, "mean", "sequence_mean"),
    "gepo with topr": (Reference.gepo_topr, "mean", "sequence_mean"),
    "gepo with topr within its clip": (Reference.gepo_topr_clipped, "mean", "sequence_mean"),
    "gepo leaving itself out": (Reference.gepo_others, "mean", "sequence_mean"),
    "gepo with dual clip": (Reference.gepo_dual, "mean", "sequence_mean"),
    "gepo_1s": (Reference.gepo_1s, "mean", "sequence_mean"),
    "gepo_product": (Reference.gepo_product, "mean", "sequence_mean"),
    "gepo_whole": (Reference.gepo_whole, "mean", "sequence_mean"),
    "gepo_plus": (Reference.gepo_plus, "mean", "sequence_mean"),
    "eqp": (Reference.eqp, "mean", "sequence_mean"),
    "eqp with opsm": (Reference.eqp, "mean", "token_mean"),
    "gspo": (Reference.gspo, "mean_std", "sequence_mean"),
    "gspo clipped on gepo": (Reference.gspo_on_gepo, "mean_std", "sequence_mean"),
    "gspo without clip": (Reference.gspo_unclipped, "mean_std", "sequence_mean"),
    "ds_gspo": (Reference.ds_gspo, "mean_std", "sequence_mean"),
    "gmpo": (Reference.gmpo, "mean_std", "sequence_mean"),
    "grpo": (Reference.grpo, "mean_std", "sequence_mean"),
    "grpo with dual clip": (Reference.grpo_dual, "mean_std", "sequence_mean"),
    "mois": (lambda self, i, a: self.mois(i, a, False, 0.1), "mean", "sequence_mean"),
    "mois differentiated": (lambda self, i, a: self.mois(i, a, True, 0.05), "mean", "sequence_mean"),
    "reinforce": (Reference.reinforce, "mean", "token_mean"),
    "impala": (lambda self, i, a: self.impala(i, a, 1.0, 1.0), "mean", "token_mean"),
    "impala wider": (lambda self, i, a: self.impala(i, a, 1.3, 1.1), "mean", "token_mean"),
    "dr_grpo": (Reference.grpo, "mean", "max_length"),
    "dapo": (Reference.dapo, "mean_std", "token_mean"),
    "dapo dropping": (Reference.dapo, "mean_std", "token_mean"),
    "bnpo": (Reference.dapo, "beta", "token_mean"),
    "delta_l": (Reference.grpo, "mean", "length_power"),
    "topr": (Reference.topr, "mean", "sequence_sum"),
    "cispo": (lambda self, i, a: self.truncated(i, a, 1.2), "mean_std", "token_mean"),
    "tis": (lambda self, i, a: self.truncated(i, a, 1.1), "mean", "token_mean"),
    "tis sequence": (Reference.tis_sequence, "mean", "token_mean"),
    "mis": (Reference.mis, "mean", "token_mean"),
    "mis token": (Reference.mis_token, "mean", "token_mean"),
    "mis geometric": (Reference.mis_geometric, "mean", "token_mean"),
    "decoupled_ppo": (lambda self, i, a: self.decoupled(i, a, True, 0.2), "mean_std", "token_mean"),
    "decoupled_ppo loglinear": (lambda self, i, a: self.decoupled(i, a, False, 0.05), "mean_std", "token_mean"),
    "m2po": (Reference.unclipped, "mean_std", "token_mean"),
    "opsm": (Reference.grpo, "mean_std", "sequence_mean"),
    "custom": (Reference.gspo, "mean_std", "sequence_mean"),
    "custom of the step": (Reference.normalised, "mean", "sequence_mean"),
}


def _value(name, case, learner, fixed):
    objective, kind, aggregation = REFERENCES[name]
    reference = Reference(case, learner, fixed)
    advantages = [advantage(case, i, kind) for i in range(len(case.group))]
    chosen = [i for i in range(len(case.group)) if name != "dapo dropping" or case.group[i] != 2]
    kept = None
    if name in ("m2po", "gepo with m2po"):
        kept = second_moment_kept(case, fixed, advantages, 0.02)
    total = 0.0
    for i in chosen:
        if name in ("opsm", "gepo with opsm", "eqp with opsm") and drifted(case, fixed, i, advantages[i], 0.05):
            continue
        factor = coefficient(case, i, aggregation, chosen)
        terms = objective(reference, i, advantages[i])
        total -= sum(factor * term for t, term in enumerate(terms) if kept is None or (i, t) in kept)
    return total


def test_every_loss_of_the_catalogue_has_a_reference():
    assert REFERENCES.keys() == CATALOGUE.keys(), "write it with loops in tests/support/loss_reference.py"


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_gradient_equal_the_reference(name, seed):
    case, learner = case_of(seed)

    assert_equals(
        CATALOGUE[name],
        case,
        learner,
        lambda moved: _value(name, case, moved, learner),
        num_rollouts=7 if name == "dapo dropping" else 10,
    )


@pytest.mark.parametrize("name", CATALOGUE)
def test_some_gradient_is_left(name):
    case, learner = case_of(1)
    rows = learner[:7] if name == "dapo dropping" else learner

    outcome = run_loss(CATALOGUE[name], rows, groups_of_case(case), max_tokens=case.max_tokens, head_version=HEAD)

    assert max(float(gradient.abs().max()) for gradient in outcome.gradients) > 1e-3


@pytest.mark.parametrize("name", [name for name in CATALOGUE if "without clip" not in name])
def test_bounds_and_masks_act_on_the_cases(name):
    # Otherwise the comparison with the reference would say nothing about them.
    acted = False
    for seed in (1, 2, 3):
        case, learner = case_of(seed)
        rows = learner[:7] if name == "dapo dropping" else learner
        outcome = run_loss(CATALOGUE[name], rows, groups_of_case(case), max_tokens=case.max_tokens, head_version=HEAD)
        terms = outcome.terms[0]
        acted |= bool(terms.is_clipped.any()) or int(terms.is_kept_BT.sum()) < sum(map(len, rows))

    assert acted or name in ("decoupled_ppo", "reinforce", "custom of the step")


@pytest.mark.parametrize("age", [2, 3, 9])
@pytest.mark.parametrize("cap", [1.1, 1.5])
def test_product_of_two_ratios_is_bounded_as_in_the_reference(age, cap):
    case, learner = case_of(1)
    case = dataclasses.replace(case, staleness=[age] * 10)
    config = DecoupledPpoConfig(proximal="loglinear", behaviour_cap=cap, max_log_weight=0.2)
    advantages = [advantage(case, i, "mean_std") for i in range(10)]
    factor = coefficient(case, 0, "token_mean", range(10))

    def value(moved):
        reference = Reference(case, moved, learner)
        rows = [reference.decoupled(i, a, False, 0.2, cap=cap, most=math.exp(0.2)) for i, a in enumerate(advantages)]
        return -factor * sum(map(sum, rows))

    assert_equals(config, case, learner, value)
