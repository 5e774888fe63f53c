"""What is claimed about GEPO's shared denominator, whether it holds, and the evidence, as rows of a table.

Guarantees: every number in a row is computed here or by `checks`; text is HTML, written by us alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from heterorl_research.lab.theory import checks, theorems
from heterorl_research.lab.theory.checks import TrialCount
from heterorl_research.lab.theory.estimators import exact_expectation, limit, on_policy_weights
from heterorl_research.lab.theory.samples import GROUP, SoftmaxCases, softmax_cases
from heterorl_research.lab.theory.theorems import Array

# A long answer and the vocabulary of a current model, to size n = V^T; and two entropies per token.
TOKENS, VOCABULARY, COLLISION_ENTROPY = 1000, 151_936, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row: the statement, a verdict of a few words, and the evidence; HTML.

    Example:
        Claim(statement="Var<sub>q</sub>[p/q] &ge; exp(KL) - 1", verdict="holds", evidence="Jensen")
    """

    statement: str
    verdict: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of every check, for one seed."""

    first: checks.TheoremOne
    second: checks.TheoremTwo
    third: checks.TheoremThree
    softmax: SoftmaxCases


def find(*, seed: int, num_trials: int) -> Findings:
    """Run every check; each draws from a stream of its own, so that a change of one leaves the others as they were."""
    streams = [np.random.default_rng([seed, stream]) for stream in range(4)]
    return Findings(
        first=checks.check_theorem_one(streams[0], num_trials=num_trials),
        second=checks.check_theorem_two(streams[1], num_trials=num_trials),
        third=checks.check_theorem_three(streams[2], num_trials=num_trials),
        softmax=softmax_cases(streams[3], num_cases=max(100, num_trials // 50)),
    )


def claims(findings: Findings) -> list[Claim]:
    """The table, weights and estimators first, then the theorems."""
    return [*_variance_claims(findings), *_theorem_claims(findings), *_practice_claims()]


def _variance_claims(findings: Findings) -> list[Claim]:
    bins = findings.softmax.bins()
    near, far = bins[0], bins[-1]
    q = np.array([0.5, 0.25, 0.25])
    same = float(theorems.variance_shared(q, q))
    narrow = float(theorems.gaussian_variance_shared(np.array(0.0), np.array(0.001)))
    p, skewed, advantages = np.array([0.5, 0.5]), np.array([0.9, 0.1]), np.array([1.0, 0.0])
    ordinary, shared = theorems.weighted_variances(p, skewed, advantages)
    return [
        Claim(
            statement="Var<sub>q</sub>[p/q] grows at least like exp(KL(p||q)).",
            verdict="holds",
            evidence="Var<sub>q</sub>[p/q] &ge; exp(KL(p||q)) - 1, by Jensen: E<sub>q</sub>[(p/q)<sup>2</sup>] = "
            "E<sub>p</sub>[p/q]. KL(q||p) gives no such floor.",
        ),
        Claim(
            statement="Var<sub>q</sub>[p/E<sub>q</sub>q] stays bounded.",
            verdict="holds for n outcomes, not for densities",
            evidence="p lies in [0, 1], so the variance is at most 1/(4S<sup>2</sup>) &le; n<sup>2</sup>/4, "
            f"S = &sum;q<sup>2</sup>. For p = N(0, s<sup>2</sup>), q = N(0, 1) it grows like &radic;2/s: {narrow:.0f} "
            "at s = 0.001.",
        ),
        Claim(
            statement="The shared denominator always varies less than p/q.",
            verdict="false near on-policy",
            evidence=f"At p = q = (1/2, 1/4, 1/4): {same:.4f} against 0. Random softmax policies of 64 outcomes: "
            f"it varies less in {near.share_varies_less:.0%} of pairs with KL below {near.high:g} and in "
            f"{far.share_varies_less:.0%} above {far.low:g}.",
        ),
        Claim(
            statement="A small Var(w) means a small Var(wA).",
            verdict="false",
            evidence="p = (1/2, 1/2), q = (0.9, 0.1), A = (1, 0): Var[p/E<sub>q</sub>q] = 0 and Var[p/q] = "
            f"{float(theorems.variance_ordinary(p, skewed)):.3f}, yet Var[wA] is {float(shared):.4f} with the shared "
            f"denominator and {float(ordinary):.4f} with p/q. The gradient feels wA, so watch that.",
        ),
    ]


def _theorem_claims(findings: Findings) -> list[Claim]:
    first, second, third = findings.first, findings.second, findings.third
    log_stated = 2 * TOKENS * math.log(VOCABULARY)
    log_entropy = 2 * TOKENS * COLLISION_ENTROPY - math.log(4.0)
    spread, point = np.full(1000, 1e-3), np.concatenate([[1 - 999e-9], np.full(999, 1e-9)])
    bias, bound = checks.bias_and_bound(spread, point, np.ones(1000))
    sides = [f"{float(side):.3f}" for side in checks.third_sides(*published_counterexample(), is_repaired=False)]
    simple = [float(side) for side in checks.third_sides(*simple_counterexample(), is_repaired=False)]
    centred = [f"{float(side):.2f}" for side in checks.third_sides(*centred_counterexample(), is_repaired=False)]
    return [
        Claim(
            statement="<b>Theorem 1.</b> Var<sub>q</sub>[p/q] - Var<sub>q</sub>[p/E<sub>q</sub>q] &ge; exp(KL(p||q)) "
            "- C with C = n<sup>2</sup> + 1.",
            verdict="holds, but says nothing for sequences",
            evidence=f"{_count(first.stated)}; worst (exp(KL) - difference)/(n<sup>2</sup>+1) = {first.worst:.4f}. "
            "C = 1 + n<sup>2</sup>/4 is enough (the two rows above), also without violation in "
            f"{first.sharper.trials:,} trials. With n = V<sup>T</sup>, V = {VOCABULARY:,} and T = {TOKENS:,}, the "
            f"right side is negative until KL exceeds log C = {log_stated:,.0f} nats per answer. Even C = 1 + "
            f"1/(4S<sup>2</sup>), for a policy of collision entropy {COLLISION_ENTROPY} nat per token, needs "
            f"{log_entropy:,.0f} nats. And it is about the exact E<sub>q</sub>q of whole sequences, not the group "
            "estimate of length-normalised ones.",
        ),
        Claim(
            statement="<b>Theorem 2.</b> |E<sub>p</sub>A - E<sub>q</sub>[(p/E<sub>q</sub>q)A]| &lt; ||p||/||q|| for "
            "bounded A.",
            verdict="false as stated",
            evidence=f"p uniform on 1000 outcomes, q almost a point mass, A = 1: {float(bias):.3f} &gt; "
            f"{float(bound):.4f}. Violated in {_rate(second.bounded)} with A uniform in [-1, 1], in "
            f"{_rate(second.constant)} with A = 1.",
        ),
        Claim(
            statement="Theorem 2 with E<sub>p</sub>A = 0 and |A| &le; 1.",
            verdict="holds",
            evidence="The bias is then |&sum;qpA|/||q||<sup>2</sup> &le; ||pA||/||q|| by Cauchy-Schwarz; "
            f"{_count(second.centred_learner)}. The condition is on the <i>learner's</i> mean. Advantages are centred "
            "on samples of the sampler policy; with E<sub>q</sub>A = 0 the bound fails in "
            f"{_rate(second.centred_sampler)}.",
        ),
        Claim(
            statement="<b>Theorem 3.</b> Var<sub>q</sub>[Ap/q] - Var<sub>q</sub>[Ap/E<sub>q</sub>q] &ge; "
            "A<sub>min</sub><sup>2</sup>exp(KL(p||q)) - A<sub>max</sub><sup>2</sup>/||q||<sup>2</sup>.",
            verdict="false as stated",
            evidence=f"p = (1, 0, 0), q = (1/2, 1/4, 1/4), A = 1: left {simple[0]:.4f} (-7/9), right {simple[1]:.4f} "
            "(-2/3). With A = 1, every point mass p on an outcome with S &lt; q<sub>k</sub> &lt; 1 - S breaks it. With "
            "full support, p = (.0011, .0056, .9930, 1.7e-5, 3.4e-4), q = (.1427, .1312, .3656, .1662, .1943): "
            f"{sides[0]} &lt; {sides[1]}. Centring does not help: p = (1/2, 1/2, 0, ...), q = (.2, .2, 30 x .02), "
            f"A = &plusmn;1 with E<sub>p</sub>A = E<sub>q</sub>A = 0: {centred[0]} &lt; {centred[1]}. Seeded search: "
            f"{_rate(third.random)} of unguided draws, {_rate(third.directed)} with p near a point mass at the mode "
            "of q and A = 1.",
        ),
        Claim(
            statement="Theorem 3 with A<sub>max</sub><sup>2</sup>(1 + 1/||q||<sup>4</sup>) subtracted instead.",
            verdict="holds",
            evidence="Var<sub>q</sub>[Ap/q] &ge; A<sub>min</sub><sup>2</sup>exp(KL) - A<sub>max</sub><sup>2</sup>, and "
            "|Ap/E<sub>q</sub>q| &le; A<sub>max</sub>/S bounds the other variance by A<sub>max</sub><sup>2</sup>"
            f"/S<sup>2</sup>; {_count(third.repaired)}. As vacuous for sequences as theorem 1.",
        ),
    ]


def _practice_claims() -> list[Claim]:
    q = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    expected = limit(q, kind="arithmetic")
    at_eight = exact_expectation(q, 8, kind="contraharmonic") / expected - 1
    at_limit = limit(q, kind="contraharmonic") / expected - 1
    plain = abs(exact_expectation(q, 8, kind="arithmetic") / expected - 1)
    weights = on_policy_weights(GROUP)
    advantages = np.array([0.5, -0.5, 0.5, -0.5])
    bound = 1.0 / (GROUP[0] / float(weights[0]))
    listed = ", ".join(f"{weight:.3f}" for weight in weights)
    return [
        Claim(
            statement="&Ecirc; = &sum;q<sub>i</sub><sup>2</sup>/&sum;q<sub>i</sub> estimates E<sub>q</sub>q.",
            verdict="false: too large",
            evidence="It is the contraharmonic mean and tends to E<sub>q</sub>[q<sup>2</sup>]/E<sub>q</sub>[q] &ge; "
            "E<sub>q</sub>[q]; the excess is the squared coefficient of variation of q. For q = (.4, .3, .15, .1, "
            f".05): {at_eight:+.1%} at G = 8 (exact sum over all groups), {at_limit:+.1%} in the limit.",
        ),
        Claim(
            statement="The plain mean of q<sub>i</sub> is wrong, since it ignores how likely the samples were.",
            verdict="false: it is unbiased",
            evidence="The samples already come with probability q, so (1/G)&sum;q<sub>i</sub> has expectation "
            f"E<sub>q</sub>q exactly; the sum over all groups of 8 agrees to {plain:.0e}. Weighting by q<sub>i</sub> "
            "once more counts the probability twice.",
        ),
        Claim(
            statement="With learner and sampler equal, GEPO is the ordinary policy gradient.",
            verdict="false: biased on-policy",
            evidence="The weight is then c<sub>i</sub> = q<sub>i</sub>/&Ecirc; with mean ESS/G = "
            "(&sum;q)<sup>2</sup>/(G&sum;q<sup>2</sup>) &le; 1, larger for confident completions. A group with "
            f"q = ({', '.join(f'{value:.3f}' for value in GROUP)}) has c = ({listed}), mean {weights.mean():.4f}; with "
            f"A = (.5, -.5, .5, -.5) the sum of Ac is {float((advantages * weights).sum()):.4f}, not 0; the last "
            "member is outside 1 &plusmn; 0.2, so clipped with no staleness at all. Exactly: E<sub>q</sub>[(p/E<sub>q"
            "</sub>q)f] is proportional to the mean of f under pq/&sum;pq, on-policy q<sup>2</sup>/&sum;q<sup>2</sup>: "
            "the policy at temperature 1/2.",
        ),
        Claim(
            statement="The length-normalised weight cannot explode.",
            verdict="holds",
            evidence="p<sub>i</sub> = exp(mean token log-prob) &le; 1, so 0 &lt; w &le; 1/&Ecirc;: at most "
            f"{bound:.3f} for that group, whatever the staleness. This bound, which is not in the theorems, is what "
            "holds in practice.",
        ),
    ]


def published_counterexample() -> tuple[Array, Array, Array]:
    """p, q and A = 1 of five outcomes, each policy divided by its sum, that break theorem 3 with full support."""
    p = np.array([0.0011, 0.0056, 0.9930, 1.7e-5, 3.4e-4])
    q = np.array([0.1427, 0.1312, 0.3656, 0.1662, 0.1943])
    return p / p.sum(), q / q.sum(), np.ones(5)


def simple_counterexample() -> tuple[Array, Array, Array]:
    """The smallest that breaks theorem 3, in fractions: left side -7/9, right side -2/3."""
    return np.array([1.0, 0.0, 0.0]), np.array([0.5, 0.25, 0.25]), np.ones(3)


def centred_counterexample() -> tuple[Array, Array, Array]:
    """Theorem 3 also fails with E_p A = E_q A = 0: two likely outcomes among thirty unlikely ones."""
    p = np.concatenate([[0.5, 0.5], np.zeros(30)])
    q = np.concatenate([[0.2, 0.2], np.full(30, 0.02)])
    return p, q, np.tile([1.0, -1.0], 16)


def _count(count: TrialCount) -> str:
    return f"{count.violations:,} violations in {count.trials:,} random trials"


def _rate(count: TrialCount) -> str:
    return f"{count.rate:.2%} ({count.violations:,} of {count.trials:,})"
